"""Every parameter of a public function or method says its type, and `mypy` checks all."""

import ast
import configparser

import pytest
from running import ROOT

NAMED = ("self", "cls", "ctx")


def unannotated(tree, of=""):
    """NAME(PARAMETER) for each parameter of what is public, that of classes within classes too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from unannotated(node, f"{of}{node.name}.")
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if node.name.startswith("_") and node.name != "__init__":
            continue
        taken = node.args
        parameters = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, *filter(None, (taken.vararg, taken.kwarg))]
        for parameter in parameters:
            if parameter.annotation is None and parameter.arg not in NAMED:
                yield f"{of}{node.name}({parameter.arg})"


def test_parameters_are_annotated():
    found = {}
    for path in sorted((ROOT / "hpctrain").rglob("*.py")):
        names = list(unannotated(ast.parse(path.read_text())))
        if names:
            found[str(path.relative_to(ROOT))] = names
    assert found == {}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(a: int, b, *c, d=1, **e): ...", ["f(b)", "f(d)", "f(c)", "f(e)"]),
        ("class A:\n def __init__(self, a): ...\n def g(self, b, /): ...", ["A.__init__(a)", "A.g(b)"]),
        ("class A:\n class B:\n  @classmethod\n  def of(cls, a): ...", ["A.B.of(a)"]),
        ("def _f(a): ...\nclass _A:\n def f(self, a): ...\ndef f():\n def g(a): ...", []),
    ],
)
def test_what_is_found(code, expected):
    assert list(unannotated(ast.parse(code))) == expected


def test_the_type_checker_leaves_nothing_out():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert [name for name in config.sections() if config[name].getboolean("ignore_errors", fallback=False)] == []
