"""Seconds spent in communication, noted in the grid's ledger beside the bytes: a microsecond a call."""

from __future__ import annotations

import functools
from time import perf_counter

from hpctrain.comm.buffers import Work


def timed(function):
    """A communication function (tensor, axis, …) whose seconds are noted for its axis and name. What such a function
    calls in turn is part of it; waiting for the `Work` that it started is noted as "NAME wait"."""
    name = function.__name__.removesuffix("_start")

    @functools.wraps(function)
    def call(tensor, axis, *arguments, **options):
        return _timed(axis, name, function, tensor, axis, *arguments, **options)

    return call


def timed_method(method):
    """The same for a method of something with an `axis`."""
    name = method.__name__.removesuffix("_start")

    @functools.wraps(method)
    def call(self, *arguments, **options):
        return _timed(self.axis, name, method, self, *arguments, **options)

    return call


def _timed(axis, name, function, *arguments, **options):
    traffic = axis.wire.traffic
    if traffic.timing:
        return function(*arguments, **options)
    traffic.timing = True
    start = perf_counter()
    try:
        result = function(*arguments, **options)
    finally:
        traffic.timing = False
        traffic.add_seconds(axis.name, name, perf_counter() - start)
    if isinstance(result, Work):
        result.owner = axis, name
    return result
