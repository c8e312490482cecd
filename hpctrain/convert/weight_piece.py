"""What optimizers of one's own see, while they step, of weights that ranks hold parts of, and of their states."""

from __future__ import annotations

import sys

import torch

from hpctrain.convert.gradients import PartialGradient, part_of_weight
from hpctrain.convert.part import Part
from hpctrain.convert.refusals import by_user
from hpctrain.convert.sharded_parameter import Sharded
from hpctrain.convert.whole_operands import of_shape
from hpctrain.rank_gradient import as_tensors


class WeightPiece(PartialGradient, torch.nn.Parameter):
    """This rank's elements of a weight that replicas share out, flat and possibly none. Norms and sums are those of the
    whole weight, as is its shape.

    Attributes: `whole_shape`.
    """

    part: Part
    whole_shape: tuple[int, ...]

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if of_shape(function) and by_user(sys._getframe(1)):
            whole = torch.empty(arguments[0].whole_shape, dtype=arguments[0].dtype, device="meta")
            return function(whole, *arguments[1:], **(options or {}))
        return PartialGradient.__torch_function__(function, types, arguments, options)

    def like(self, tensor: torch.Tensor) -> PartialGradient:
        result = tensor.as_subclass(PartialGradient)
        result.part = self.part
        return result


def by_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's, which treat every element by itself or are refused by name."""
    return type(optimizer).__module__.startswith("torch.")


def mark_states(optimizer: torch.optim.Optimizer) -> None:
    """Let the states that an optimizer of one's own has for parts of weights be known as parts: those that were loaded,
    or are older than the division, are ordinary tensors."""
    if by_torch(optimizer):
        return
    with as_tensors():
        for group in optimizer.param_groups:
            for p in group["params"]:
                values = optimizer.state.get(p, {}) if isinstance(p, (Sharded, WeightPiece)) else {}
                for key, value in values.items():
                    if type(value) is torch.Tensor and value.dim() and value.shape == p.shape:
                        values[key] = part_of_weight(value, p.sharding) if isinstance(p, Sharded) else p.like(value)
