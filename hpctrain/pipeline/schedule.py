"""Schedules: for each rank an ordered list of actions. Order only; no times, no messages."""

from __future__ import annotations

from typing import NamedTuple


class Action(NamedTuple):
    """One thing a rank does.

    Attributes:
        kind: "forward", "backward", "send" or "receive".
        stage, microbatch: what is worked on. The stage of a message is its sender's.
        peer: the rank at the other end of a message.
        edge: the message's connection, the same at both ends: 2 s for activations between stages s and s+1,
            2 s + 1 for their gradients. (With two stages, the next rank is also the previous one.)
    """

    kind: str
    stage: int
    microbatch: int
    peer: int | None = None
    edge: int | None = None


def one_f_one_b(stages: int, microbatches: int) -> list[list[Action]]:
    """1F1B: after a warm-up of forwards, one forward and one backward in turn, so that stage s holds at most stages - s
    microbatches. Backward runs in the order of the microbatches, as in serial accumulation.

    Source: Narayanan et al., "PipeDream" (SOSP 2019), with a flush at the end of every step (Fan et al., DAPPLE, 2021).

    >>> ["".join(f"{a.kind[0]}{a.microbatch}" for a in rank) for rank in one_f_one_b(2, 3)]
    ['f0f1b0f2b1b2', 'f0b0f1b1f2b2']
    """
    order = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, microbatches)
        forwards = [Action("forward", stage, m) for m in range(microbatches)]
        backwards = [Action("backward", stage, m) for m in range(microbatches)]
        rank = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards):
            rank += [forward, backward]
        order.append(rank + backwards[microbatches - ahead :])
    return order


def forward_only(stages: int, microbatches: int) -> list[list[Action]]:
    """Forwards alone, for evaluation."""
    return [[Action("forward", stage, m) for m in range(microbatches)] for stage in range(stages)]
