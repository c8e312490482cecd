"""The executor: runs one rank's program, messages under way while it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from hpctrain import comm
from hpctrain.pipeline.lowering import blocking_replay, lower
from hpctrain.pipeline.schedule import Action


class Stage(Protocol):
    """What the executor asks of a stage, for microbatch m."""

    def empty_input(self, m: int) -> torch.Tensor:
        """Room for the activation that the previous stage sends."""

    def forward(self, m: int, x: torch.Tensor | None) -> torch.Tensor:
        """The activation for the next stage, or the last stage's loss. x is None on the first stage."""


class Executor:
    """Runs the programs of a schedule on the pipeline axis.

    Args:
        axis: the pipeline axis.
        order: the schedule, one list of actions a stage; it is lowered and checked here, before anything is sent.
    """

    def __init__(self, axis, order: list[list[Action]]):
        programs = lower(order)
        blocking_replay(programs)
        self.axis, self.program = axis, programs[axis.rank]
        backwards = [action.microbatch for action in self.program if action.kind == "backward"]
        self.last_backward = backwards[-1] if backwards else None
        self.training = bool(backwards)

    def run(self, stage: Stage, on_last_backward: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        """Carry out the program; returns the outputs of the last stage (its losses, if it trains), [] elsewhere.

        `on_last_backward` is called before the backward after which this rank's gradients are complete.
        """
        axis, synchronous = self.axis, self.axis.wire.synchronous
        first, last = axis.rank == 0, axis.rank == axis.size - 1
        held: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}  # microbatch -> (input, output)
        produced: dict[tuple[int, int], torch.Tensor] = {}  # (edge, microbatch) -> to be sent
        arriving: dict[tuple[int, int], comm.Work] = {}
        leaving: list[comm.Work] = []
        results = []
        down, up = 2 * axis.rank, 2 * (axis.rank - 1)  # edges of activations to the next and from the previous stage
        for kind, _, m, peer, edge in self.program:
            if kind == "receive":
                out = stage.empty_input(m) if edge == up else torch.empty_like(held[m][1])
                work = arriving[edge, m] = comm.recv_start(out, axis, peer, tag=edge)
                if synchronous:
                    work.wait()
            elif kind == "send":
                if synchronous:
                    comm.send(produced.pop((edge, m)), axis, peer, tag=edge)
                else:
                    leaving = [work for work in leaving if not work.test()]
                    leaving.append(comm.send_start(produced.pop((edge, m)), axis, peer, tag=edge))
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
            else:
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
