"""Layers that are divided together pass on parts of activations, so that their unit alone may call them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch


class UnitCalls:
    """Counts the calls of a unit that are not finished; `unit` is what one calls, for people."""

    def __init__(self, unit: str):
        self.unit, self.count = unit, 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *error: object) -> None:
        self.count -= 1

    def check(self, path: str) -> None:
        """Raise ValueError where somebody else calls the layer `path`; in backward, what was checkpointed within the
        unit computes it once more."""
        if not self.count and torch._C._current_graph_task_id() == -1:
            raise ValueError(
                f"{path} was called by itself, but ht.parallelize divided it together with others, so that each rank "
                f"takes or gives a part of what lies between: call {self.unit}, or list {path!r} in replicate"
            )


def counting_type(base: type, methods: Iterable[str]) -> type:
    """A type as `base`, whose `unit_calls` counts the calls of these methods."""

    def counting(method: str):
        inherited = getattr(base, method)

        @functools.wraps(inherited)
        def call(self: Any, *args: Any, **kwargs: Any):
            with self.unit_calls:
                return inherited(self, *args, **kwargs)

        return call

    own = {"__module__": base.__module__, "__doc__": base.__doc__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {**own, **{method: counting(method) for method in methods}})
