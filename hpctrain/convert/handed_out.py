"""What is whole to the user's code beside this rank's part of it, with which the model goes on.

As the hidden states that a model returns with shard_activations=True, and attention weights. What else the model
computes comes from the parts, so that of the whole's gradient autograd by itself knows what the user's code gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from hpctrain.convert import boundary
from hpctrain.convert.gathered_copy import GatheredCopy, read
from hpctrain.convert.refusals import place
from hpctrain.convert.sharding import local
from hpctrain.grid import Axis


@dataclass(frozen=True)
class Parts:
    """How a whole tensor lies on the ranks.

    Attributes:
        mine: this rank's part, of which the rest of the model is computed.
        gather: the whole, of every rank's part, differentiable.
        take: this rank's part of a whole.
    """

    mine: torch.Tensor
    gather: Callable[[torch.Tensor], torch.Tensor]
    take: Callable[[torch.Tensor], torch.Tensor]

    def register_hook(self, hook: Callable) -> RemovableHandle:
        """A hook on the gradient of the part, which is given, and may change, the whole one."""
        gather, take = self.gather, self.take  # not the part, which has the hook

        def on_part(gradient):
            changed = hook(gather(gradient))
            return None if changed is None else take(changed)

        with local():
            return torch.Tensor.register_hook(self.mine, on_part)


class HandedOut(torch.Tensor):
    """A tensor like any other, whose gradient is that of all parts. All ranks must ask for it, or none.

    Raises:
        ValueError: for `retain_grad`, and where a backward is to keep its gradient.
    """

    _parts: Parts
    _as_given: int  # its version

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return gradients(types, *args, **kwargs)
        if func is torch.autograd.backward:  # which Tensor.backward calls
            check_inputs(kwargs["inputs"])
        if func in (torch.autograd.backward, torch.Tensor.backward):
            return func(*tree_map(_whole, args), **kwargs)
        if not all(kind in (cls, GatheredCopy, torch.Tensor) for kind in types):
            return NotImplemented  # others, whose types know what to do with a tensor
        with local():
            return read(func, args, kwargs) if GatheredCopy in types else func(*args, **kwargs)

    @property
    def parts(self) -> Parts:
        return self._parts if self._version == self._as_given else written(self)

    def whole(self) -> torch.Tensor:
        """Of torch's own type."""
        with local():
            return self.as_subclass(torch.Tensor)

    def register_hook(self, hook: Callable):
        """The hook is given the whole gradient."""
        return self.parts.register_hook(hook)

    def retain_grad(self):
        raise refused("retain_grad")

    def __reduce_ex__(self, protocol):
        return self.whole().__reduce_ex__(protocol)


def of_heads(weights: torch.Tensor, axis: Axis, counts: tuple[int, ...]) -> torch.Tensor:
    """All attention weights, (batch, heads, queries, keys), of which rank r has counts[r] heads; of none, maybe one of
    zeros."""
    none = weights.shape[1] - counts[axis.rank]
    parts = Parts(
        weights,
        lambda part: boundary.gather(part[:, : counts[axis.rank]], axis, counts, 1),
        lambda whole: F.pad(boundary.take(whole, axis, counts, 1), (0, 0, 0, 0, 0, none)),
    )
    return handed_out(parts.gather(weights), parts)


def written(whole: torch.Tensor) -> Parts:
    """Of a whole tensor that was changed in place since it was gathered, so that the parts do not make it."""
    return Parts(whole, _same, _same)


def handed_out(whole: torch.Tensor, parts: Parts) -> torch.Tensor:
    """The whole, gathered from parts, for code that is not ours."""
    if not whole.requires_grad:
        return whole
    with local():
        given = whole.as_subclass(HandedOut)
    given._parts, given._as_given = parts, given._version
    return given


def gradients(
    types: Iterable[type], outputs: Any, inputs: Sequence[Any], *, grad_outputs: Any, allow_unused: bool,
    materialize_grads: bool, **options: Any,
):  # fmt: skip
    """torch.autograd.grad, where a tensor that has `parts` stands for the whole of all."""
    if any(issubclass(kind, torch.nn.Parameter) for kind in types):
        return NotImplemented  # of weights first
    parts = [getattr(x, "parts", None) for x in inputs]
    with local():
        edges = [x if part is None else get_gradient_edge(part.mine) for x, part in zip(inputs, parts)]
    options["allow_unused"] = allow_unused or materialize_grads
    found = list(torch.autograd.grad(tree_map(_whole, outputs), edges, tree_map(_whole, grad_outputs), **options))
    for number, (x, part, gradient) in enumerate(zip(inputs, parts, found)):
        if gradient is None and materialize_grads:
            found[number] = torch.zeros_like(x, requires_grad=options["create_graph"])
        elif gradient is not None and part is not None:
            found[number] = part.gather(gradient)
    return tuple(found)


def check_inputs(inputs: Sequence[torch.Tensor] | None) -> None:
    """Raise ValueError where a backward is to keep the gradient of a tensor that has `parts`."""
    if any(hasattr(x, "parts") for x in inputs or ()):
        raise refused("inputs=[...] of backward")


def refused(name: str) -> ValueError:
    return ValueError(
        f"{place()}: {name}, for a tensor of which every rank goes on with a part, as ht.parallelize has divided it, "
        "would keep the gradient of a part; torch.autograd.grad gives the whole one, and so does register_hook"
    )


def _whole(x):
    return x.whole() if hasattr(x, "parts") else x


def _same(x):
    return x
