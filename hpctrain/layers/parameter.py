"""Making parameters: only this rank's slice is ever filled, from the numbers that belong to it."""

from __future__ import annotations

import contextlib
import copy
import functools
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch

from hpctrain import gemm
from hpctrain.grid import Grid
from hpctrain.parameter import annotate, on_arrival
from hpctrain.randomness import RngKey, check_key, fill_slice
from hpctrain.rank_gradient import mark_gradient
from hpctrain.shard import Shard

if TYPE_CHECKING:
    from hpctrain.layers.tokens import Tokens


class Factory(TypedDict):
    """Of what kind a layer's parameters are."""

    dtype: torch.dtype | None
    device: torch.device | str | None


class ProductQueue(Protocol):
    """Where products put off their weight gradients: `layers.split_backward.SplitBackward`."""

    queue: list[Callable[[], None]] | None


def parameter(
    grid: Grid,
    shard: Shard,
    key: RngKey,
    std: float | None,
    value: float = 0.0,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> torch.nn.Parameter:
    """A parameter holding a slice: normal with standard deviation `std`, or constant `value` where std is None."""
    data = torch.empty(shard.shape, dtype=dtype)
    if not data.is_floating_point():
        raise ValueError(f"dtype must be one of real floating point numbers, such as torch.float32, got {dtype}")
    if std is None:
        data.fill_(value)
    else:
        fill_slice(data, shard, lambda start, count: key.normal(start, count) * std)
    made = annotate(torch.nn.Parameter(data.to(device)), shard=shard)
    summands = grid.alike(shard).size > 1 or (shard.partial and any(grid.shape[axis] > 1 for axis in shard.replicated))
    if summands or shard.divided:  # until a strategy puts its own hook there
        _mark(made, functools.partial(mark_gradient, summed=not summands))
    return made


def _mark(parameter, marks):
    on_arrival(annotate(parameter, unmanaged=marks), marks)


class Layer(torch.nn.Module):
    """A layer of such parameters. In a deep copy, such as an average of weights, they are slices as well, of no
    strategy. A deep copy gathers weights that ZeRO-3 has spread, so it is collective.

    `load_state_dict` takes slices, and also whole tensors, as of `ht.gather_state_dict`, of which it loads the slices.

    Raises:
        ValueError: from a deep copy, for a weight that somebody else than ZeRO-3 has freed.
    """

    def __deepcopy__(self, memo):
        copied = memo[id(self)] = type(self).__new__(type(self))
        released = {name: p for name, p in self._parameters.items() if p is not None and _has_no_memory(p)}
        if foreign := [name for name, p in released.items() if "gathered" not in vars(p)]:
            raise ValueError(
                f"{foreign[0]} of {type(self).__name__} was freed, and not by ZeRO-3, which would gather it: make the "
                "deep copy before that"
            )
        with contextlib.ExitStack() as readable:
            for gathered in dict.fromkeys(vars(p)["gathered"] for p in released.values()):
                readable.enter_context(gathered)
            copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        for name, parameter in self._parameters.items():
            own = copied._parameters[name]
            if parameter is None or own is None:
                continue
            known = vars(parameter)
            annotate(own, **{key: known[key] for key in ("shard", "same_as") if key in known})
            if "unmanaged" in known:
                _mark(own, known["unmanaged"])
        return copied

    def _load_from_state_dict(self, state_dict, prefix, *others):
        shards = {name: vars(p).get("shard") for name, p in self._parameters.items() if p is not None}
        shards |= dict.fromkeys(self._buffers, vars(self).get("shard"))  # of a layer that divides its own
        for name, shard in shards.items():
            given = state_dict.get(prefix + name)
            if shard is not None and isinstance(given, torch.Tensor) and given.shape == shard.global_shape:
                state_dict[prefix + name] = given[shard.slices]
        super()._load_from_state_dict(state_dict, prefix, *others)


def _has_no_memory(parameter: torch.nn.Parameter) -> bool:
    return bool(parameter.numel()) and not parameter.untyped_storage().nbytes()


def put_off(later: ProductQueue | None, weight: torch.nn.Parameter, gradient: Callable) -> bool:
    """Leave `gradient()`, the weight's or None, to be computed later; whether that is done. A weight with hooks
    (`register_hook`) has its own at once: autograd calls them with what the backward gives."""
    if later is None or later.queue is None or weight._backward_hooks:
        return False
    if weight.requires_grad:
        later.queue.append(lambda: accumulate(weight, gradient()))
    return True


def refuse_autocast(x: torch.Tensor) -> None:
    """Raise ValueError within torch.autocast."""
    gemm.refuse_autocast(
        x,
        "ht.layers compute in the type of their weights",
        "make the layers with dtype=torch.bfloat16, or give a strategy, which keeps master weights, "
        "hpctrain.data_parallel.Precision(compute=torch.bfloat16)",
    )


def accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Add to the parameter's gradient and call its hooks, as autograd does."""
    if gradient is not None:
        gradient = gradient.to(getattr(parameter, "grad_dtype", None) or parameter.dtype)
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)


def check_sizes(**sizes: int) -> None:
    """Raise ValueError for one that is none, before only the ranks with a part of it fail."""
    for name, size in sizes.items():
        if not isinstance(size, numbers.Integral) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")


def check_tokens(layer: torch.nn.Module, grid: Grid, tokens: Tokens) -> None:
    """Raise ValueError unless the tokens were made for the layer's grid; what they say of rows is of its axes."""
    if tokens.grid is not grid and tokens.grid.shape != grid.shape:
        raise ValueError(
            f"{type(layer).__name__}({layer.extra_repr()}) is of a grid of {grid.shape}, got tokens of one of "
            f"{tokens.grid.shape}; make them by Tokens.of with the layer's grid"
        )


def check_shape(layer: torch.nn.Module, x: torch.Tensor, expected: tuple[int, int], layout: str = "residual") -> None:
    """Raise ValueError unless x is of this shape, that of this rank's part of it in this layout."""
    if x.shape != expected:
        raise ValueError(
            f"{type(layer).__name__}({layer.extra_repr()}) takes this rank's {expected[0]} rows and {expected[1]} "
            f"columns of x in the {layout} layout, got {tuple(x.shape)}; the tokens must be those of x, made for the "
            "layer's grid and algorithm"
        )


def drawn_key(grid: Grid, key: RngKey | None) -> RngKey:
    """`key`, or one drawn from torch's default generator on the first rank of the data and tensor axes.

    So `torch.manual_seed` decides the weights, as it does for torch's own layers.
    """
    if key is not None:
        return check_key(key)
    seed = int(torch.randint(2**62, ()))
    return RngKey(grid.data.comm.bcast(grid.tensor.comm.bcast(seed)))
