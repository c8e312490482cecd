"""How a weight lies on the ranks of the tensor axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.convert import boundary
from hpctrain.convert.refusals import hook_refused
from hpctrain.grid import Axis
from hpctrain.shard import Shard

local = torch._C.DisableTorchFunctionSubclass  # within it, weights are the shards that this rank holds; 0.2 µs

ATTRIBUTES = vars(torch._C.TensorBase)  # of tensors, whose `__get__` and `__set__` are what torch functions are given

_OPERATORS = ("add", "sub", "mul", "truediv")
# Element by element, all shapes alike. (Of random numbers every rank draws the whole, as one rank would.)
POINTWISE = {
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg", "abs", "pow", "sqrt", "rsqrt",
    "exp", "log", "square", "reciprocal", "clamp", "clamp_min", "clamp_max", "clip", "fill", "zero", "copy", "lerp",
    "addcmul", "addcdiv", "maximum", "minimum", "sign", "round", "floor", "ceil", "nan_to_num", "masked_fill", "where",
    "erfinv", "tanh", "sigmoid", "clone",
    *_OPERATORS, *(f"r{name}" for name in _OPERATORS), *(f"i{name}" for name in _OPERATORS),
}  # fmt: skip

VIEWS = {torch.Tensor.T, torch.Tensor.mT, torch.Tensor.H, torch.Tensor.mH, torch.Tensor.real, torch.Tensor.imag}
# What asks or makes something of a weight without its elements: memory, gradients, what the state of an optimizer is
# made of.
METADATA = {
    "grad", "detach_", "requires_grad_", "retain_grad", "share_memory_", "zeros_like", "ones_like", "empty_like",
    "full_like", "new_empty", "new_zeros", "new_ones", "new_full", "register_post_accumulate_grad_hook", "data_ptr",
    "element_size", "storage", "untyped_storage", "_typed_storage", "storage_offset", "stride", "is_contiguous",
    "is_floating_point", "is_complex", "is_shared", "is_pinned", "is_inference", "get_device", "result_type", "dim",
    "ndimension", "__delete__", "_is_view",
}  # fmt: skip


@dataclass(frozen=True)
class Sharding:
    """Which shard of a weight this rank holds, and how to get the rest.

    Attributes:
        path: its name in the model.
        axis: the ranks that hold it.
        shard: this rank's part. Its shape has one dim more than the weight where several matrices are stacked.
        dim: of `shard.global_shape`, along which it is divided.
        counts: how many of that dim each rank holds.
        whole_shape: of the weight.
        replicas: how many compute a gradient of their own, to be summed later.
        alike: how many ranks compute the same from the whole weight, where somebody reads it: those of the tensor axis.
        blocks: the slices of each rank, where they are of several dims; `counts` are then elements.
    """

    path: str
    axis: Axis
    shard: Shard
    dim: int
    counts: tuple[int, ...]
    whole_shape: tuple[int, ...]
    replicas: int = 1
    alike: int = 1
    blocks: tuple[tuple[slice, ...], ...] | None = None

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole of what the ranks have parts of. Adjoint: `take`, of the sum of what other batches give."""
        part = part.view(self.shard.shape)
        if self.blocks is not None:
            whole = boundary.gather_blocks(part, self.axis, self.blocks, self.shard.global_shape)
        elif self.shard.alike == "data":
            whole = boundary.gather(part, self.axis, self.counts, self.dim)
        else:
            whole = boundary.gather_for_batches(part, self.axis, self.counts, self.dim, self.alike)
        return whole.reshape(self.whole_shape)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part, in memory of its own; with as many dims as the weight."""
        part = whole.reshape(self.shard.global_shape)[self.shard.slices].clone(memory_format=torch.contiguous_format)
        return part.view(self.local_shape)

    def on_parts(self, operands: Sequence[torch.Tensor]) -> bool:
        """Whether code of the user's may do something element by element with parts alone, of these operands in their
        order.

        Every rank says the same. Parts must have the same elements of theirs. What is no part is whole, or of one
        element along the dim that ranks divide, which is stretched; but a tensor of this rank's shape is a part as
        well, unless that is the whole shape: one rank may have all of a narrow weight.
        """
        shape = self.local_shape
        for number, x in enumerate(operands):
            if not x.dim():
                continue
            is_part = hasattr(x, "sharding") or hasattr(x, "part")
            if x.shape == shape and (self.is_of(x) if is_part else shape != self.whole_shape):
                continue
            if is_part or number == 0 or not self._stretches(x):
                return False
        return True

    def is_of(self, part: Any, moved: tuple = ()) -> bool:
        """Whether a part, be it of another weight, has the elements that it would have by this sharding, `moved` as a
        `PartialGradient` says."""
        other = part.sharding if hasattr(part, "sharding") else part.part and part.part.sharding
        alike = other is self or (other is not None and other._layout == self._layout)
        return alike and getattr(part, "moved", ()) == moved

    @property
    def _layout(self):
        return self.axis.name, self.shard.global_shape, self.dim, self.counts, self.blocks

    def _stretches(self, x):
        missing = len(self.whole_shape) - x.dim()
        if self.blocks is not None or len(self.shard.shape) != len(self.whole_shape):
            return missing >= 0 and x.numel() == 1
        return missing >= 0 and (self.dim < missing or x.shape[self.dim - missing] == 1)

    @property
    def local_shape(self) -> tuple[int, ...]:
        shape = self.shard.shape
        if len(shape) == len(self.whole_shape):
            return shape
        return (*shape[: self.dim - 1], shape[self.dim - 1] * shape[self.dim], *shape[self.dim + 1 :])


def hooked(hook: Callable, sharding: Sharding):
    """A hook on the gradient, for the whole of it: nobody knows whether it treats every element by itself.

    Raises:
        ValueError: where replicas would call it with parts of a sum.
    """
    if sharding.replicas > 1:
        raise ValueError(hook_refused(sharding.path))

    def on_part(gradient):
        changed = hook(sharding.gather(gradient))
        return None if changed is None else sharding.take(changed)

    return on_part
