"""The executor: runs one rank's program, messages under way while it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from hpctrain import comm
from hpctrain.pipeline.schedules import Schedule


class Stage(Protocol):
    """What the executor asks of a stage, for microbatch m."""

    def empty_input(self, m: int) -> torch.Tensor:
        """Room for the activation that the previous stage sends."""

    def forward(self, m: int, x: torch.Tensor | None) -> torch.Tensor:
        """The activation for the next stage, or the last stage's loss. x is None on the first stage."""


class Executor:
    """Runs the programs of a schedule on the pipeline axis: of a chain, stage s on rank s, with whole backwards.
    The schedule's reductions and updates are the caller's, after `run`.

    Args:
        axis: the pipeline axis.
        schedule: is lowered and checked here, before anything is sent.
    """

    def __init__(self, axis, schedule: Schedule):
        chain = all((edge.source, edge.target) == (e, e + 1) for e, edge in enumerate(schedule.graph.edges))
        alone = dict(schedule.placement) == {(0, stage): stage for stage in range(axis.size)}
        if not chain or not alone or schedule.slices > 1 or schedule.delayed:
            raise ValueError(
                f"the executor runs a chain with stage s on rank s of the {axis.size} of axis {axis.name}, got "
                f"{schedule.name} on {schedule.ranks}; use gpipe or 1f1b"
            )
        lowered = schedule.lower()
        self.axis, self.program = axis, lowered.programs[axis.rank]
        self.tags = [2 * a.edge + lowered.is_gradient(a) if a.peer is not None else None for a in self.program]
        if any(a.kind.endswith("_gradient") for a in self.program):
            raise ValueError(f"the executor runs whole backwards, {schedule.name} splits them; use gpipe or 1f1b")
        backwards = [action.microbatch for action in self.program if action.kind == "backward"]
        self.last_backward = backwards[-1] if backwards else None
        self.training = schedule.training

    def run(self, stage: Stage, on_last_backward: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        """Carry out the program; returns the outputs of the last stage (its losses, if it trains), [] elsewhere.

        `on_last_backward` is called before the backward after which this rank's gradients are complete.
        """
        axis, synchronous = self.axis, self.axis.wire.synchronous
        first, last = axis.rank == 0, axis.rank == axis.size - 1
        held: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}  # microbatch -> (input, output)
        produced: dict[tuple[int, int], torch.Tensor] = {}  # (tag, microbatch) -> to be sent
        arriving: dict[tuple[int, int], comm.Work] = {}
        leaving: list[comm.Work] = []
        results = []
        down, up = 2 * axis.rank, 2 * (axis.rank - 1)  # tags of activations to the next and from the previous stage
        for action, tag in zip(self.program, self.tags):
            kind, m, peer = action.kind, action.microbatch, action.peer
            if kind == "receive":
                out = stage.empty_input(m) if tag == up else torch.empty_like(held[m][1])
                work = arriving[tag, m] = comm.recv_start(out, axis, peer, tag=tag)
                if synchronous:
                    work.wait()
            elif kind == "send":
                if synchronous:
                    comm.send(produced.pop((tag, m)), axis, peer, tag=tag)
                else:
                    leaving = [work for work in leaving if not work.test()]
                    leaving.append(comm.send_start(produced.pop((tag, m)), axis, peer, tag=tag))
            elif kind == "forward":
                x = None if first else arriving.pop((up, m)).wait()
                if x is not None and self.training:
                    x.requires_grad_()
                y = stage.forward(m, x)
                if self.training:
                    held[m] = x, y
                if last:
                    results.append(y.detach())
                else:
                    produced[down, m] = y.detach()
            elif kind == "backward":
                gradient = None if last else arriving.pop((down + 1, m)).wait()
                x, y = held.pop(m)
                if m == self.last_backward:
                    on_last_backward()
                torch.autograd.backward(y, gradient)
                if not first:
                    produced[up + 1, m] = x.grad
        for work in leaving:
            work.wait()
        return results
