"""Schedules that feed microbatches from both ends: Chimera, DualPipe, and DualPipeV, which folds the two into a V."""

from __future__ import annotations

from hpctrain.pipeline.actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Fused
from hpctrain.pipeline.schedules import Schedule
from hpctrain.pipeline.synchronous import check, with_flush
from hpctrain.pipeline.zero_bubble import v_placement


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Chimera with two pipelines: replica 0 goes down the ranks with the first half of every `ranks` microbatches,
    replica 1 up with the second. Each fills the other's bubbles; the weights are held twice.

    A unit of `ranks` microbatches takes 2 ranks slots on every rank and tiles without a gap, so more microbatches are
    units one after another ("direct concatenation"), and fewer are a unit with slots left empty.

    Source: Li and Hoefler, "Chimera" (SC 2021), §3.1 and §3.5.

    Raises:
        ValueError: for an odd number of ranks.
    """
    check(ranks=ranks, microbatches=microbatches)
    _even("chimera", ranks)
    order: list[list[Action]] = []
    for rank in range(ranks):
        slots = []
        for m in range(microbatches):
            unit, within = divmod(m, ranks)
            # the last unit may be short: then its microbatches take turns between the directions
            short = microbatches - unit * ranks < ranks
            replica, at = (within % 2, within // 2) if short else divmod(within, ranks // 2)
            stage = rank if replica == 0 else ranks - 1 - rank
            start = 2 * (unit * ranks + at)
            slots.append((start + stage, Action(FORWARD, replica, stage, m)))
            slots.append((start + 2 * ranks - 1 - stage, Action(BACKWARD, replica, stage, m)))
        slots.sort(key=lambda slot: (slot[0], slot[1].kind))
        order.append([action for _, action in slots])
    return with_flush("chimera", order, _both_ways(ranks), microbatches)


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """DualPipe: as Chimera, two directions on two copies of the weights, the first half of the microbatches from the
    one end and the rest from the other; forwards of one direction are fused with backwards of the other, and backwards
    are split at the end to fill the bubble.

    Source: DeepSeek-AI, "DeepSeek-V3 technical report" (2024), §3.2.1, and their code.

    Raises:
        ValueError: for an odd number of ranks.
    """
    check(ranks=ranks, microbatches=microbatches)
    _even("dualpipe", ranks)
    counts = -(-microbatches // 2), microbatches // 2
    many = max(counts[0], ranks)
    order = []
    for rank in range(ranks):
        swapped = rank >= ranks // 2  # here the far end's direction is the near one
        work: list[Action | Fused] = []
        for entry in _phases(min(rank, ranks - 1 - rank), ranks // 2, many):
            left = []
            for kind, phase, at in entry:
                replica = phase ^ swapped
                if at < counts[replica]:
                    stage = rank if replica == 0 else ranks - 1 - rank
                    left.append(Action(kind, replica, stage, at + replica * counts[0]))
            work += [Fused(*left)] if len(left) == 2 else left
        order.append(work)
    return with_flush("dualpipe", order, _both_ways(ranks), microbatches)


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV: DualPipe cut in half. Rank r has stages r and 2 ranks - 1 - r of one chain, so the weights are held
    once and any number of ranks will do.

    Source: Qi et al., "cut-in-half", and DeepSeek-AI's DualPipe code.
    """
    check(ranks=ranks, microbatches=microbatches)
    order = []
    for rank in range(ranks):
        stages = rank, 2 * ranks - 1 - rank
        work: list[Action | Fused] = []
        for entry in _phases(rank, ranks, max(microbatches, 2 * ranks)):
            actions = [Action(kind, 0, stages[phase], at) for kind, phase, at in entry]
            work += [Fused(*actions)] if len(actions) == 2 else actions
        order.append(work)
    return with_flush("dualpipev", order, v_placement(ranks), microbatches)


def _phases(rank: int, ranks: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    """The eight steps of DualPipe on `rank` of the half of `ranks` ranks that mirrors the other half.

    Entries of one or, fused, two (kind, phase, number): phase 0 moves away from this end, phase 1 comes back. The steps
    are named as in DeepSeek-AI's code; n of a kind and phase, n at least 2 ranks.
    """
    entries: list[list[tuple[str, int, int]]] = []
    done: dict[tuple[str, int], int] = {}
    late: list[tuple[int, int]] = []  # input gradients whose weight gradients wait

    def take(kind, phase):
        done[kind, phase] = done.get((kind, phase), 0) + 1
        return done[kind, phase] - 1

    def forward(phase):
        entries.append([(FORWARD, phase, take(FORWARD, phase))])

    def backward(phase, split=False):
        at = take(BACKWARD, phase)
        entries.append([(INPUT_GRADIENT if split else BACKWARD, phase, at)])
        if split:
            late.append((phase, at))

    def weight():
        entries.append([(WEIGHT_GRADIENT, *late.pop(0))])

    def both(phase):
        """The forward of `phase` with the backward of the other."""
        entries.append([(FORWARD, phase, take(FORWARD, phase)), (BACKWARD, 1 - phase, take(BACKWARD, 1 - phase))])

    inner = ranks - 1 - rank  # ranks between this one and the middle
    for _ in range(2 * inner):  # 1: F0
        forward(0)
    for _ in range(rank + 1):  # 2: F0 F1
        forward(0)
        forward(1)
    for _ in range(inner):  # 3: I1 W1 F1
        backward(1, split=True)
        weight()
        forward(1)
    for step in range(microbatches - 2 * ranks + rank + 1):  # 4: F0B1 F1B0
        if step == 0 and inner == 0:  # in the middle the first pair would wait for itself
            forward(0)
            backward(1)
        else:
            both(0)
        both(1)
    for _ in range(inner):  # 5: B1 F1B0
        backward(1)
        both(1)
    split = False
    for step in range(rank + 1):  # 6: B1 B0, split from the middle on
        split = split or (rank % 2 == 1 and step == (rank + 1) // 2)
        backward(1, split)
        split = split or (rank % 2 == 0 and step == (rank + 1) // 2)
        backward(0, split)
    for _ in range(inner):  # 7: W I0
        weight()
        backward(0, split=True)
    for _ in range(rank + 1):  # 8: W
        weight()
    return entries


def _both_ways(ranks: int) -> dict[tuple[int, int], int]:
    return {(0, stage): stage for stage in range(ranks)} | {(1, stage): ranks - 1 - stage for stage in range(ranks)}


def _even(name: str, ranks: int) -> None:
    if ranks % 2:
        raise ValueError(f"{name} pairs ranks from both ends, got ranks={ranks}; use {ranks + 1}, or zb-v or dualpipev")
