"""What a module's source says of two of its children: that one is given what the other makes, and nobody else is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from torch import nn

from hpctrain.convert.sources import each_once, is_child, may_count, methods_of

# Where statements run more than once, or not all of them, or later; and where others may read what is assigned.
_UNCLEAR = (
    ast.For, ast.While, ast.AsyncFor, ast.Try, ast.TryStar, ast.Yield, ast.YieldFrom, ast.Await, ast.Global,
    ast.Nonlocal,
)  # fmt: skip
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.GeneratorExp)


def hands_on(module: nn.Module, giver: str, taker: str, several: bool = False) -> str:
    """The method that calls `self.giver` and, in the statement that follows, `self.taker` with its result, or the first
    of `several` results, before all else, each in one place of all methods' source, and uses it no more; or "".

    >>> hands_on(nn.TransformerEncoderLayer(8, 2), "linear1", "linear2")
    ''
    """
    methods = methods_of(module)
    if not each_once(methods, giver, taker):
        return ""
    for method in methods:
        for body in bodies(method.tree):
            for first, second in zip(body, body[1:]):
                if isinstance(first, ast.Assign) and _calls(first, giver) and _calls(second, taker):
                    alone = _goes_nowhere_else(method.tree, first, second, several)
                    return method.name if alone and may_count(module, methods, method) else ""
    return ""


def bodies(method: Any) -> Iterator[list]:
    """Every list of statements of a method of `self`, which run one after the other."""
    arguments = method.args.args if isinstance(method, ast.FunctionDef) else []
    nodes = [*ast.walk(method)]
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    if not arguments or arguments[0].arg != "self" or "self" in stored or any(isinstance(n, _UNCLEAR) for n in nodes):
        return
    later = _later(method)
    for node in nodes:
        lists = (getattr(node, name, None) for name in ("body", "orelse"))
        yield from (each for each in lists if isinstance(each, list) and id(node) not in later)


def _later(method: Any) -> set[int]:
    """Ids of the nodes of inner functions, classes and generators, which may run at another time."""
    inner = [node for node in ast.walk(method) if isinstance(node, _LATER) and node is not method]
    return {id(node) for each in inner for node in ast.walk(each)}


def _calls(statement, name):
    """Whether it returns what the child makes, or assigns it to one name or several."""
    if not isinstance(statement, (ast.Assign, ast.Return)):
        return False
    call, targets = statement.value, getattr(statement, "targets", [])
    names = targets[0].elts if targets and isinstance(targets[0], ast.Tuple) else targets
    well = len(targets) <= 1 and all(isinstance(each, ast.Name) for each in names)
    return well and isinstance(call, ast.Call) and is_child(call.func, name)


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
    if one_of_several:  # and its others are whatever they are
        passed += [node.value for node in ast.walk(method) if isinstance(node, ast.Subscript) and _item(node, name)]
    return not read_elsewhere(method, {name}, passed, [first, second], first.value)


def read_elsewhere(method: Any, names: set[str], passed: list, statements: list, call: ast.AST) -> bool:
    """Whether any of these names is read from the first of the statements on, by the order of lines, or assigned within
    one of them.

    Not counted are the places `passed`; those in `call`, of the first, which takes what the name was before; and those
    after the last, where that assigns something else to the name.
    """
    first, last = statements[0], statements[-1]
    targets = getattr(last, "targets", [])
    again = targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None
    taken, later = {id(node) for node in (*passed, *ast.walk(call))}, _later(method)
    if any(_assigns(node, names) for each in statements for node in ast.walk(each.value)):
        return True
    return any(
        (id(node) in later or (node.lineno >= first.lineno and id(node) not in taken))
        and not (node.id == again and node.lineno > last.end_lineno and id(node) not in later)
        for node in ast.walk(method)
        if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load)
    )


def _assigns(node, names):
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names


def _item(node, name):
    """The first index that a subscript of a name takes; None of anything else."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == name):
        return None
    index = node.slice.lower if isinstance(node.slice, ast.Slice) else node.slice
    return index.value if isinstance(index, ast.Constant) and isinstance(index.value, int) else None
