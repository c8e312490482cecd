"""What this package hangs on a parameter: all attributes, who sets them and what for.

They are read as attributes of the `torch.nn.Parameter`, and set by `annotate`, which knows these alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypedDict, Unpack

import torch

from hpctrain.grad_sync import GradSync
from hpctrain.shard import Shard


class Strategy(Protocol):
    """`data_parallel.DataParallelStrategy`."""

    uses_grad: bool

    def hand_over(self) -> None: ...


class Annotations(TypedDict, total=False):
    """Attributes of a parameter, beside torch's own.

    A layer, `ht.parallelize` or a model that is cut into stages sets, once:
        shard: which slice of the global tensor this rank holds. Every parameter that is trained or saved has one;
            gradient sums, the clipping norm, ZeRO, checkpoints and export read nothing else.
        same_as: name, in checkpoints of other libraries, of the weight of another stage that this one is tied to.
        unmanaged: of a layer's, and of one whose gradient is a part or of one replica alone, what `arrival` is until a
            strategy has the parameter.
        whole_shape: of a parameter that `ht.parallelize` divided or left whole, its shape in the user's own module.
        sharding: of one that it divided, a `convert.sharding.Sharding`, by which the whole is cut and gathered.
        replicas: of one whose gradient it averages over the replicas, who does: `convert.averaging.MeanGradients`, or
            `convert.zero.ZeroGradients`.

    A strategy of `data_parallel` sets, anew for the next strategy over the same parameters:
        grad_sync: where the gradient is to lie, and how far its sum is in this step; see `GradSync`. Only of strategies
            that keep gradients in buckets.
        arrival: what is called when a gradient has been added to the parameter's; see `on_arrival`.
        strategy: itself, which the next one has hand the parameter over.
        gathered: of ZeRO-3, `with parameter.gathered:` the parameter has memory to be read; collective over data.
        grad_dtype: torch's own attribute: the dtype of gradients, where it is not that of the parameter; None (torch
            then takes any dtype) after hand over.
    """

    shard: Shard
    same_as: str
    unmanaged: Callable
    whole_shape: tuple[int, ...]
    sharding: object
    replicas: object
    grad_sync: GradSync
    arrival: Callable
    strategy: Strategy
    gathered: AbstractContextManager
    grad_dtype: torch.dtype | None


def annotate(parameter: torch.nn.Parameter, **attributes: Unpack[Annotations]) -> torch.nn.Parameter:
    """Set attributes of the parameter; returns it."""
    assert attributes.keys() <= Annotations.__annotations__.keys(), f"not declared: {sorted(attributes)}"
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


def shard_of(parameter: torch.Tensor) -> Shard:
    """The parameter's `shard`."""
    return parameter.__dict__["shard"]  # half the time of vars()


def grad_sync_of(parameter: torch.Tensor) -> GradSync:
    """The parameter's `grad_sync`, where a strategy keeps gradients in buckets."""
    return parameter.__dict__["grad_sync"]


def forget_strategy(parameter: torch.nn.Parameter) -> None:
    """No strategy has the parameter any more: its gradient goes to no bucket, and layers defer no sum to one."""
    for name in ("grad_sync", "strategy", "gathered"):
        vars(parameter).pop(name, None)
    parameter.grad = None
    annotate(parameter, arrival=vars(parameter).get("unmanaged", _unmanaged))


def on_arrival(parameter: torch.nn.Parameter, hook: Callable) -> None:
    """Call `hook` whenever a gradient has been added to the parameter's, and no longer that of an earlier strategy.

    The parameter keeps it, and torch only a function: Python's collector does not see what torch keeps, so that a
    strategy there, which has the parameter, would never be freed.
    """
    if not hasattr(parameter, "arrival"):
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # torch refuses a hook on a frozen one, which may be trained later
        parameter.register_post_accumulate_grad_hook(_arrived)
        parameter.requires_grad_(trained)
    annotate(parameter, arrival=hook)


def _unmanaged(parameter: torch.nn.Parameter) -> None:
    """The gradient is left where backward puts it."""


def _arrived(parameter: torch.nn.Parameter) -> None:
    vars(parameter)["arrival"](parameter)
