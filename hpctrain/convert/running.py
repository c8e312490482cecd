"""Layers that are divided together pass on parts of activations, so that only their unit may call them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any


class Running:
    """Of a unit, whether it is called at the moment.

    Attributes: `unit`, what calls its layers, for people; `calls`, how many are not finished.
    """

    def __init__(self, unit: str):
        self.unit, self.calls = unit, 0

    def __enter__(self) -> None:
        self.calls += 1

    def __exit__(self, *error: object) -> None:
        self.calls -= 1

    def check(self, path: str) -> None:
        """Raise ValueError where somebody else calls the layer `path`."""
        if not self.calls:
            raise ValueError(
                f"{path} was called by itself, but ht.parallelize divided it together with the layer that takes its "
                f"output, so that each rank makes a part of it: call {self.unit}, or list {path!r} in replicate"
            )


def running_type(base: type, methods: Iterable[str]) -> type:
    """A type as `base`, whose `running` notes when one of these methods is called."""

    def noting(method: str):
        inherited = getattr(base, method)

        @functools.wraps(inherited)
        def call(self: Any, *args: Any, **kwargs: Any):
            with self.running:
                return inherited(self, *args, **kwargs)

        return call

    own = {"__module__": base.__module__, "__doc__": base.__doc__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {**own, **{method: noting(method) for method in methods}})
