"""Keeping the replicas of a model alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hpctrain import comm
from hpctrain.data_parallel.asynchronous import AsyncParameterServer
from hpctrain.data_parallel.data_parallel import DataParallel
from hpctrain.data_parallel.local_sgd import LocalSGD
from hpctrain.data_parallel.mixed import MixedDataParallel
from hpctrain.data_parallel.parameter_server import ParameterServer
from hpctrain.data_parallel.precision import AS_GIVEN, Precision
from hpctrain.data_parallel.strategy import DataParallelStrategy
from hpctrain.data_parallel.zero import Zero1
from hpctrain.data_parallel.zero2 import Zero2
from hpctrain.data_parallel.zero3 import Zero3

if TYPE_CHECKING:
    from hpctrain.grid import Grid

__all__ = [
    "AsyncParameterServer",
    "DataParallel",
    "LocalSGD",
    "DataParallelStrategy",
    "MixedDataParallel",
    "ParameterServer",
    "Precision",
    "Zero1",
    "Zero2",
    "Zero3",
    "is_mixed",
    "make",
]


def make(
    options: Any, model: torch.nn.Module, grid: Grid, optimizer: torch.optim.Optimizer, precision: Precision = AS_GIVEN
) -> DataParallelStrategy:
    """The method that the section `[data_parallel]` of the configuration asks for.

    Raises:
        ValueError: on every rank, when it does not work on this grid, or in this precision.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = comm.all_gather_object(parameters[0].dtype if parameters else None, grid.world)  # some have no weights
    dtype = next(filter(None, found), None)
    if dtype is not None and None in found and precision.compute not in (None, dtype):
        raise ValueError(
            f"rank {found.index(None)} has no weights to train, and does not know that others compute in "
            f"{precision.compute}; use precision.master=compute, or fewer pipeline stages"
        )
    mixed = is_mixed(options.method, dtype, precision)
    if options.method == "zero3":
        return Zero3(model, grid, optimizer, precision=precision)
    given = {"parameters": parameters, "grid": grid, "optimizer": optimizer}
    made = _MAKERS[options.method](options, precision if mixed else None, given)
    if dtype is None:
        raise ValueError("the model has no weights to train")
    return made


def is_mixed(method: str, dtype: torch.dtype | None, precision: Precision) -> bool:
    """Whether training of parameters of this dtype needs more than one precision. Raises ValueError where the method
    has not got it."""
    mixed = len({dtype, precision.compute, precision.reduce, precision.comm_dtype} - {None}) > 1
    mixed = mixed or dtype == torch.float16  # whose loss is scaled
    if mixed and method in ("parameter_server", "local_sgd"):
        raise ValueError(
            f"data_parallel.method={method} has weights and gradients in one precision, got {precision}; use "
            "precision.compute=fp32 or fp64 without comm_dtype=bf16, or another method"
        )
    return mixed


# All of hpctrain.choices.STRATEGIES but zero3: function (options, precision or None, arguments of all).
_MAKERS: dict[str, Callable[..., DataParallelStrategy]] = {
    "ddp": lambda _, precision, given: (
        MixedDataParallel(**given, precision=precision) if precision else DataParallel(**given)
    ),
    "zero1": lambda _, precision, given: Zero1(**given, precision=precision or AS_GIVEN),
    "zero2": lambda _, precision, given: Zero2(**given, precision=precision or AS_GIVEN),
    "parameter_server": lambda options, _, given: (
        AsyncParameterServer(**given, servers=options.servers, staleness=options.staleness)
        if options.staleness
        else ParameterServer(**given, servers=options.servers)
    ),
    "local_sgd": lambda options, _, given: LocalSGD(**given, every=options.average_every, state=options.average_state),
}
