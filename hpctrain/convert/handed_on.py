"""What a module's source says of two of its children: that one is given what the other makes, and nobody else is."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from types import FunctionType
from typing import Any

from torch import nn


def hands_on(module: nn.Module, giver: str, taker: str, several: bool = False) -> bool:
    """Whether it calls `self.giver` and, in the statement that follows, `self.taker` with its result, or the first of
    `several` results, before all else, each in one place of its methods' source, and uses it no more.

    >>> hands_on(nn.TransformerEncoderLayer(8, 2), "linear1", "linear2")
    False
    """
    kind, of_torch = type(module), vars(nn.Module).values()
    methods = {name: inspect.getattr_static(kind, name) for name in dir(kind) if name != "__init__"}
    methods = {name: each for name, each in methods.items() if inspect.isfunction(each) and each not in of_torch}
    if not methods.keys().isdisjoint(vars(module)):  # somebody put others in their place
        return False
    return _hands_on(tuple(methods.values()), giver, taker, several)


@functools.cache
def _hands_on(functions: tuple[FunctionType, ...], giver: str, taker: str, several: bool) -> bool:
    try:
        methods = [ast.parse(textwrap.dedent(inspect.getsource(each))).body[0] for each in functions]
    except (OSError, TypeError, SyntaxError):  # nobody has it
        return False
    if any(sum(_is_child(node, name) for each in methods for node in ast.walk(each)) != 1 for name in (giver, taker)):
        return False
    for method in methods:
        if any(isinstance(node, (ast.For, ast.While, ast.AsyncFor)) for node in ast.walk(method)):
            continue
        for node in ast.walk(method):
            body = getattr(node, "body", None)
            for first, second in zip(body, body[1:]) if isinstance(body, list) else ():
                if isinstance(first, ast.Assign) and _calls(first, giver) and _calls(second, taker):
                    return _goes_nowhere_else(method, first, second, several)
    return False


def _is_child(node, name):
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _calls(statement, name):
    """Whether it returns what the child makes, or assigns it to one name or several."""
    if not isinstance(statement, (ast.Assign, ast.Return)):
        return False
    call, targets = statement.value, getattr(statement, "targets", [])
    names = targets[0].elts if targets and isinstance(targets[0], ast.Tuple) else targets
    well = len(targets) <= 1 and all(isinstance(each, ast.Name) for each in names)
    return well and isinstance(call, ast.Call) and _is_child(call.func, name)


def _goes_nowhere_else(method: ast.stmt, first: Any, second: Any, several: bool) -> bool:
    """Whether the result of the first call, or the first of its results, is the second's first argument alone."""
    target = first.targets[0]
    unpacked = isinstance(target, ast.Tuple)
    name = (target.elts[0] if unpacked else target).id
    given: Any = second.value.args[0] if second.value.args else None
    one_of_several = _item(given, name) == 0
    if not (one_of_several or (isinstance(given, ast.Name) and given.id == name)):
        return False
    if several != (unpacked or one_of_several) or (unpacked and one_of_several):
        return False
    passed: list[Any] = [given.value if one_of_several else given]
    (again,) = getattr(second, "targets", [None])
    if isinstance(again, ast.Name) and again.id == name:  # it is something else afterwards
        passed += [node for node in ast.walk(method) if getattr(node, "lineno", 0) > second.end_lineno]
    elif one_of_several:  # and its others are whatever they are
        passed += [node.value for node in ast.walk(method) if isinstance(node, ast.Subscript) and _item(node, name)]
    loads = [node for node in ast.walk(method) if isinstance(node, ast.Name) and node.id == name]
    return all(
        node in passed or not isinstance(node.ctx, ast.Load) or node.lineno < first.lineno or _within(node, first.value)
        for node in loads
    )


def _item(node, name):
    """The first index that a subscript of a name takes; None of anything else."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == name):
        return None
    index = node.slice.lower if isinstance(node.slice, ast.Slice) else node.slice
    return index.value if isinstance(index, ast.Constant) and isinstance(index.value, int) else None


def _within(node, other):
    """Of what it was before."""
    return any(each is node for each in ast.walk(other))
