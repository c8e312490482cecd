"""One parameter's gradient between the layer that computes it and the bucket that sums it over the ranks."""

from __future__ import annotations

import enum
from typing import Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from hpctrain import gemm


class GradState(enum.Enum):
    """How far a gradient is in a step. `zero_grad()` begins with ACCUMULATING.

    ACCUMULATING --enable_grad_sync()--> SYNCING --the gradient arrives--> DONE
    """

    ACCUMULATING = "backwards add up on this rank; the last one is still to be announced"
    SYNCING = "the gradient of the next backward completes it: its bucket may be summed when that has come"
    DONE = "it has come, and its bucket's sum may be under way: nothing may be added any more"


class SumOver(Protocol):
    """The ranks whose products are summed: `matmul.sharded_dim.Rows`."""

    def sum(self, matrix: torch.Tensor) -> torch.Tensor: ...


class GradSync:
    """Where a parameter's gradient is to lie, `view`, a part of a bucket, and its state; `parameter.grad_sync`.

    A layer may
    - write the first product of a step to `out()`, so that nothing need be copied;
    - put off the sum over ranks of a gradient (`defer`) while `defers`, and complete it with that of the last backward.
      Until then the rank keeps its summand for all of their parts: where z ranks hold a weight, z times the memory of
      the gradient, kept from step to step.

    Args:
        view: part of a bucket, of the parameter's shape.
        direct: products have the view's dtype, so that both are possible.
    """

    __slots__ = ("direct", "state", "view", "_deferred", "_over", "_written", "_has_deferred")

    def __init__(self, view: torch.Tensor, direct: bool = True):
        self.view, self.direct, self.state = view, direct, GradState.ACCUMULATING
        self._written = False  # the first product of the step
        self._has_deferred = False
        self._deferred: torch.Tensor | None = None
        self._over: SumOver | None = None

    # Called by layers, in backward -----------------------------------------------------------------------------------

    def out(self) -> torch.Tensor | None:
        """A tensor on the view, once a step; autograd takes over only what nobody else holds, so always a new one."""
        if self._written or not self.direct:
            return None
        self._written = True
        return self.view.view(self.view.shape)

    @property
    def defers(self) -> bool:
        """Whether a later backward of the step may take this one's sum over ranks along."""
        return self.direct and self.state is not GradState.SYNCING

    def defer(self, a: torch.Tensor, b: torch.Tensor, over: SumOver) -> None:
        """Keep a @ b, to be summed over the ranks of `over` (`matmul.sharded_dim.Rows`)."""
        if self._deferred is None:
            self._deferred = gemm.mm(a, b)
        elif self._has_deferred:
            gemm.addmm(self._deferred, a, b, out=self._deferred)
        else:
            gemm.mm(a, b, out=self._deferred)
        self._has_deferred, self._over = True, over

    def deferred(self) -> torch.Tensor | None:
        """What was put off, once."""
        pending, self._has_deferred = self._has_deferred, False
        return self._deferred if pending else None

    # Called by the strategy ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._written = self._has_deferred = False
        self.state = GradState.ACCUMULATING

    def enable(self) -> None:
        """The next backward is the step's last that computes this gradient."""
        self.state = GradState.SYNCING

    def arrived(self, parameter: torch.nn.Parameter) -> bool:
        """A backward has come to the parameter: bring its gradient to the view. Whether it is complete now.

        Raises:
            RuntimeError: when it was complete before, in this step or, where no `begin_step()` came since, the last.
        """
        if self.state is GradState.DONE:
            raise RuntimeError(
                f"a gradient of shape {tuple(parameter.shape)} came twice in the last backward of a step, as by "
                "torch.utils.checkpoint(use_reentrant=True) of a module that is used twice; use use_reentrant=False; "
                "or strategy.zero_grad() was not called since the last step"
            )
        if parameter.grad is None:
            return False  # put off, so that this is not the last backward
        if parameter.grad.data_ptr() != self.view.data_ptr():
            parameter.grad = self.view.copy_(parameter.grad)
        self._written = True  # also where no layer wrote it: another that shares the weight would write over it
        if self.state is GradState.ACCUMULATING:
            return False
        self.state = GradState.DONE
        self.add_deferred(parameter)
        return True

    def add_deferred(self, parameter: torch.nn.Parameter) -> None:
        """Add the sum of what the layer put off, if anything is left of it."""
        over, pending = self._over, self.deferred()
        if over is None or pending is None:
            return
        late = over.sum(pending)
        parameter.grad = self.view.copy_(late) if parameter.grad is None else parameter.grad.add_(late)


def grad_sync_of_backward(weight: torch.Tensor) -> GradSync | None:
    """The weight's `grad_sync` for a layer's backward; None where there is none, or where the backward adds nothing to
    `weight.grad`: torch.autograd.grad gives what it computes to its caller, and backward(inputs=...) may leave the
    weight out."""
    sync = getattr(weight, "grad_sync", None)
    return sync if sync is not None and _accumulates(weight) else None


def _accumulates(weight: torch.Tensor) -> bool:
    if torch._C._current_graph_task_id() == -1:  # a product that was put off
        return True
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(weight).node)
    except RuntimeError:  # torch's answer for what torch.autograd.grad is asked for
        return False
