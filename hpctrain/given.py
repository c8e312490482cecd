"""What public functions are given: the types of it."""

from __future__ import annotations

from typing import Any


def check_types(**given: tuple[object, Any]) -> None:
    """Raise ValueError for the first argument that is not of its type, of (value, type) by names of arguments.

    >>> check_types(steps=(3, int), path=(str, str))
    Traceback (most recent call last):
    ValueError: path must be of type str, got the class str
    """
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
            raise ValueError(f"{name} must be of type {kind.__name__}, got {got}")
