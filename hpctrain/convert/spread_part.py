"""What `.data` and `.detach()` of a divided weight are where replicas share out the weights too."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves

from hpctrain.convert.gathered_copy import writes
from hpctrain.convert.gradients import PartialGradient
from hpctrain.convert.refusals import place
from hpctrain.convert.sharding import METADATA, local


class SpreadPart(PartialGradient):
    """This rank's part of a weight that zero=3 spreads over the replicas: of memory that they share, or of a copy.

    Raises:
        ValueError: for operations in place.
    """

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        name, options = function.__name__, options or {}
        written = options.get("out", arguments[0] if writes(name) and name not in METADATA else None)
        if any(isinstance(x, cls) for x in tree_leaves(written)):
            raise ValueError(
                f"{place()}: {name} writes to a view of a weight that zero=3 of ht.parallelize spreads over the "
                "replicas, and would be lost, or done by each of them; let an optimizer change it, or use zero=2"
            )
        return super().__torch_function__(function, types, arguments, options)

    def like(self, tensor: torch.Tensor) -> PartialGradient:
        result = super().like(tensor)
        with local():
            if tensor.untyped_storage()._cdata != self.untyped_storage()._cdata:
                result.__class__ = PartialGradient
        return result
