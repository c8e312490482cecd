"""Imports point down: no package needs one above it, and no modules need each other, for types and inside of functions
too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hpctrain"

# From the top; those of one line do not import each other. The last stand on nothing of the package.
LAYERS = [
    ("cli", "__main__"),
    ("scale", "doctor", "report"),
    ("slurm",),
    ("train",),
    ("one_line",),
    ("plan",),
    ("config",),
    ("checkpoint",),
    ("models",),  # of which plain modules are trained by way of convert
    ("integrations",),
    ("convert",),
    ("pipeline",),
    ("data_parallel",),
    ("layers",),
    ("matmul",),
    ("data",),
    ("comm",),
    ("rank_gradient",),
    ("grid", "launch", "parameter", "layout"),
    ("grad_sync",),
    (
        "grid_shape", "gemm", "shard", "shard_entries", "trace", "traffic", "randomness", "files", "home", "page",
        "cores", "digest", "choices", "given", "reclaim", "resident", "rank_job", "once_differentiable",
    ),
]  # fmt: skip
ONE_CONCEPT = [{"cli", "__main__"}, {"shard", "shard_entries"}]  # of several files


def modules():
    """{name: (its file, the names that its relative imports start from)}, all without `hpctrain.`"""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        parts = parts[:-1] if is_package else parts
        found[".".join(parts)] = path, (parts if is_package else parts[:-1])
    return found


def imports():
    """{module: {module: line}} of all import statements, wherever they stand."""
    known = modules()
    found = {}
    for name, (path, here) in known.items():
        found[name] = {}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for wanted in named(node, here):
                while wanted not in known:  # a name in a module
                    wanted = wanted.rpartition(".")[0]
                if wanted not in ("", name):
                    found[name].setdefault(wanted, node.lineno)
    return found


def named(node, here):
    """What a statement imports of the package."""
    if isinstance(node, ast.Import):
        return [alias.name.removeprefix("hpctrain.") for alias in node.names if alias.name.startswith("hpctrain.")]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = (node.module or "").split(".") if node.module else []
    if node.level:
        base = [*here[: len(here) - node.level + 1], *base]
    elif base[0] != "hpctrain":
        return []
    else:
        base = base[1:]
    return [".".join([*base, alias.name]) for alias in node.names]


LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def upward():
    found = []
    for module, wanted in imports().items():
        for other, line in wanted.items():
            top, its = module.split(".")[0], other.split(".")[0]
            together = top == its or any({top, its} <= concept for concept in ONE_CONCEPT)
            if top and not together and LEVEL[its] <= LEVEL[top]:
                found.append(f"{module} imports {other} (line {line})")
    return found


def circles():
    """Sets of modules each of which comes back to itself."""
    graph = {module: set(wanted) for module, wanted in imports().items()}
    reached = {module: set(wanted) for module, wanted in graph.items()}
    for between in graph:
        for module in graph:
            if between in reached[module]:
                reached[module] |= reached[between]
    return {frozenset(other for other in graph if other in reached[m] and m in reached[other]) for m in graph} - {
        frozenset()
    }


def test_every_part_has_a_place():
    parts = {name.split(".")[0] for name in modules()} - {""}
    assert parts == set(LEVEL)


def test_imports_point_down():
    assert upward() == []


def test_no_circles():
    assert [sorted(circle) for circle in circles()] == []


def test_a_command_line_is_read_without_torch():
    """Which takes seconds; help, plans and what goes to Slurm never need it."""
    program = "import sys, hpctrain.cli.parser; print({'torch', 'numpy', 'h5py', 'mpi4py'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("statement", "here", "expected"),
    [
        ("from hpctrain import comm, grid", (), ["comm", "grid"]),
        ("from hpctrain.comm.windows import a", (), ["comm.windows.a"]),
        ("import hpctrain.comm.windows", (), ["comm.windows"]),
        ("from .windows import a", ("comm",), ["comm.windows.a"]),
        ("from . import windows", ("comm",), ["comm.windows"]),
        ("from ..shard import Shard", ("comm", "algorithms"), ["comm.shard.Shard"]),
        ("from .. import grid", ("comm",), ["grid"]),
        ("from torch import nn", (), []),
    ],
)
def test_statements_are_read(statement, here, expected):
    assert named(ast.parse(statement).body[0], here) == expected
