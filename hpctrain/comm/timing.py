"""Seconds of communication, noted in the grid's ledger beside the bytes, and in its trace: a microsecond a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from hpctrain.comm.buffers import Work
from hpctrain.grid import Axis

P = ParamSpec("P")
R = TypeVar("R")


class OnAxis(Protocol):
    @property
    def axis(self) -> Axis: ...


Owner = TypeVar("Owner", bound=OnAxis)


def timed(
    function: Callable[Concatenate[torch.Tensor, Axis, P], R],
) -> Callable[Concatenate[torch.Tensor, Axis, P], R]:
    """A communication function (tensor, axis, …) whose seconds are noted for its axis and name. What such a function
    calls in turn is part of it; waiting for the `Work` that it started is noted as "NAME wait"."""
    name = function.__name__.removesuffix("_start")

    @functools.wraps(function)
    def call(tensor: torch.Tensor, axis: Axis, *arguments: P.args, **options: P.kwargs) -> R:
        return time_call(axis, name, function, tensor, axis, *arguments, **options)

    return call


def timed_method(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """The same for a method of something with an `axis`."""
    name = method.__name__.removesuffix("_start")

    @functools.wraps(method)
    def call(self: Owner, *arguments: P.args, **options: P.kwargs) -> R:
        return time_call(self.axis, name, method, self, *arguments, **options)

    return call


def time_call(axis: Axis, name: str, function: Callable[..., R], *arguments: Any, **options: Any) -> R:
    """`function(*arguments, **options)`, whose seconds are noted for the axis and name."""
    traffic = axis.transport.traffic
    if traffic.timing or axis.size == 1:
        return function(*arguments, **options)
    traffic.timing = True
    trace = axis.transport.trace
    before = traffic.moved() if trace is not None else (0, 0)
    start = perf_counter()
    watchdog, checker = axis.transport.watchdog, axis.transport.checker
    peer = None
    if name in ("send", "recv"):
        peer = arguments[2] if len(arguments) > 2 else options.get("dest", options.get("source"))
    if watchdog is not None:
        watchdog.begin(axis, name, peer)
    try:
        if checker is not None:
            checker(axis, name, arguments, options)
        result = function(*arguments, **options)
    finally:
        traffic.timing = False
        traffic.add_seconds(axis.name, name, perf_counter() - start)
        if watchdog is not None:
            watchdog.end()
    if trace is not None:
        trace.add_operation(f"{name} {axis.name}", peer, start, before, traffic.moved())
    if isinstance(result, Work):
        result.owner = axis, name, peer
    return result
