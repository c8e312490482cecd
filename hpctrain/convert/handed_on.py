"""What a module's source says of two of its children: that one is given what the other makes, and nobody else is."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Hashable
from typing import Any, cast

from torch import nn


def hands_on(module: nn.Module, giver: str, taker: str, several: bool = False) -> bool:
    """Whether it calls `self.giver` and, in the statement that follows, `self.taker` with its result, or the first of
    `several` results, before all else, each in one place of its type's own source, and uses it no more.

    >>> hands_on(nn.TransformerEncoderLayer(8, 2), "linear1", "linear2")
    False
    """
    return _hands_on(cast(Hashable, type(module)), giver, taker, several)


@functools.cache
def _hands_on(kind: Hashable, giver: str, taker: str, several: bool) -> bool:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cast(type, kind)))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # nobody has it
        return False
    methods = [each for each in getattr(tree, "body", ()) if isinstance(each, ast.FunctionDef)]
    methods = [each for each in methods if each.name != "__init__"]
    if any(sum(_is_child(node, name) for each in methods for node in ast.walk(each)) != 1 for name in (giver, taker)):
        return False
    for method in methods:
        if any(isinstance(node, (ast.For, ast.While, ast.AsyncFor)) for node in ast.walk(method)):
            continue
        for node in ast.walk(method):
            body = getattr(node, "body", None)
            for first, second in zip(body, body[1:]) if isinstance(body, list) else ():
                if _calls(first, giver) and _calls(second, taker):
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
    """Whether it is an assignment of what the child makes, to one name or several."""
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return False
    call, target = statement.value, statement.targets[0]
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    return isinstance(call, ast.Call) and _is_child(call.func, name) and all(isinstance(n, ast.Name) for n in names)


def _goes_nowhere_else(method: ast.FunctionDef, first: Any, second: Any, several: bool) -> bool:
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
    again = second.targets[0]
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
