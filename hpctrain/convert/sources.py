"""The source of a module's methods, where all that may use its children can be read."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

_INSIDE = ("fget", "fset", "fdel", "__func__", "func", "__wrapped__")  # of properties, static methods, decorated ones
# Ways to children beside their names, and functions that may be given the module itself.
_BY_OTHER_WAYS = {"_modules", "children", "named_children", "modules", "named_modules", "get_submodule", "__dict__"}
_HARMLESS = {"getattr", "hasattr", "isinstance", "super", "type"}


class MethodSource(NamedTuple):
    """Attributes: `tree`, its definition; `local`, names of its own and of functions around it; `known`, all others and
    their values."""

    name: str
    tree: Any
    local: set[str]
    known: dict[str, Any]

    def value(self, node: ast.expr | None, module: nn.Module) -> Any:
        """Of a constant, and of a name with dots that is known outside of the method and stays as it is, the module
        being `self`; else None."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value, module)
            computed = hasattr(inspect.getattr_static(type(owner), node.attr, None), "__get__")
            return None if computed else getattr(owner, node.attr, None)
        if not isinstance(node, ast.Name):
            return None
        if node.id == "self":
            return module
        return None if node.id in self.local else self.known.get(node.id)


def methods_of(module: nn.Module) -> tuple[MethodSource, ...]:
    """Every method that its type has besides nn.Module's. With what is around decorated ones, and where a method asks
    for them, those of types that it inherits from. None where one cannot be read, or the object has others in place.

    >>> [each.name for each in methods_of(nn.Tanh())]
    ['forward']
    """
    versions: dict[str, list[Any]] = {}
    for base in type(module).__mro__:
        if base not in nn.Module.__mro__:
            for name, value in vars(base).items():
                versions.setdefault(name, []).append(value)
    found: dict[FunctionType, MethodSource] = {}
    left = [(name, values[0]) for name, values in versions.items()]
    while left:
        name, value = left.pop()
        functions = _functions(value)
        for function in functions or ():
            if function not in found and (tree := _parsed(function)) is not None:
                code = function.__code__
                local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
                found[function] = MethodSource(name, tree, local, function.__globals__)
                left += [(each, version) for each in _asked_of_others(tree) for version in versions.get(each, ())]
        if functions is None or not found.keys() >= {*functions}:
            return ()
    own = vars(module)
    replaced = any(each.name in own for each in found.values())
    bound = any(isinstance(value, MethodType) and value.__self__ is module for value in own.values())
    return () if replaced or bound else tuple(found.values())


def _asked_of_others(tree) -> set[str]:
    """Names of attributes, but for those of `self`: in `super().forward(x)`, forward."""
    return {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute) and not _is_self(each.value)}


def _functions(value: Any) -> list[FunctionType] | None:
    """All that a class's attribute may call; None where nobody knows."""
    if inspect.isfunction(value):
        return [value, *(_functions(value.__wrapped__) or () if hasattr(value, "__wrapped__") else ())]
    if isinstance(value, type) or inspect.isgetsetdescriptor(value) or inspect.ismemberdescriptor(value):
        return []
    inside = [each for name in _INSIDE if (each := getattr(value, name, None)) is not None]
    if inside:
        return [function for each in inside for function in _functions(each) or ()]
    return None if callable(value) or hasattr(type(value), "__get__") else []


@functools.cache
def _parsed(function: FunctionType) -> Any:
    """Its definition, or None."""
    try:
        source = inspect.getsource(function.__code__)  # not of another, which it may say that it wraps
        indented = source[:1].isspace()
        (definition,) = ast.parse("if True:\n" + source if indented else source).body
    except Exception:  # there is none, or it is another file's by now
        return None
    return definition.body[0] if indented and isinstance(definition, ast.If) else definition


def each_once(methods: Iterable[MethodSource], *children: str) -> bool:
    """Whether these children of `self` are each named in one place of all methods, and cannot be reached otherwise."""
    others = [each for each in methods if each.name != "__init__"]
    nodes = [(node, each) for each in others for node in ast.walk(each.tree)]
    if any(_goes_other_ways(*each) for each in nodes):
        return False
    if any(_kept_elsewhere(each.tree, children) for each in methods if each.name == "__init__"):
        return False
    return all(sum(_names(node, child) for node, _ in nodes) == 1 for child in children)


def may_count(module: nn.Module, methods: Iterable[MethodSource], method: MethodSource) -> bool:
    """Whether every call of a method goes to the attribute of its name: it is a function, has no other name, and no
    other method asks for that of an inherited type."""
    kind, name = type(module), method.name
    value = inspect.getattr_static(kind, name)
    names = [other for other in dir(kind) if inspect.getattr_static(kind, other, None) is value]
    others = [other for other in methods if other.name not in (name, "__init__", "__init_subclass__")]
    asked = any(name in _asked_of_others(other.tree) for other in others)
    return inspect.isfunction(value) and names == [name] and not asked


def is_child(node: Any, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and _is_self(node.value)


def _is_self(node):
    return isinstance(node, ast.Name) and node.id == "self"


def _names(node, child):
    return (isinstance(node, ast.Attribute) and node.attr == child) or (
        isinstance(node, ast.Constant) and node.value == child
    )


def _goes_other_ways(node, method):
    """Whether it is a way to all children, as `self.children()` is, or gives the module to somebody else."""
    if isinstance(node, ast.Attribute):
        return node.attr in _BY_OTHER_WAYS and _is_self(node.value)
    if not isinstance(node, ast.Call):
        return False
    name = _name(node.func)
    if name == "partial" and node.args:
        name = _name(node.args[0])
    if name == "getattr" and len(node.args) > 1 and _is_self(node.args[0]):
        return not isinstance(node.args[1], ast.Constant)
    given = any(map(_is_self, [*node.args, *(each.value for each in node.keywords)]))
    return given and name not in _HARMLESS and name not in method.local  # as a wrapper calls what it wraps


def _name(node):
    return node.id if isinstance(node, ast.Name) else ""


def _kept_elsewhere(tree, children):
    """Whether `__init__` does more with a child than make it, and give its weights their numbers."""
    nodes: list[Any] = [*ast.walk(tree)]
    bases = {id(each.value) for each in nodes if isinstance(each, ast.Attribute)}
    later = [each for each in nodes if isinstance(each, (ast.FunctionDef, ast.Lambda)) and each is not tree]
    inner = {id(each) for function in later for each in ast.walk(function)}
    found = [each for each in nodes if any(is_child(each, child) for child in children)]
    return any(id(e) in inner or (isinstance(e.ctx, ast.Load) and id(e) not in bases) for e in found)
