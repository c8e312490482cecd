"""The field's words stand in the public names: of modules, classes, functions, their parameters, and fields."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hpctrain"

FIELD_S_WORD = {
    "Common": "ShardedBuffer",
    "Copies": "ReplicatedBuffer",
    "Summed": "AllReduceBuffer",
    "Shared": "SharedMemoryBuffer",
    "Watch": "Watchdog",
    "Checks": "CollectiveChecker",
    "Method": "DataParallelStrategy",
    "Place": "GradSync",
    "Key": "RngKey",
    "become": "swap_class",
    "carry_out": "apply",
    "walks": "pipelined_loops",
    "depth_rows": "two_half_d_rows",
    "turned": "rotated",
    "catalogue": "registry",
    "listing": "list_scheduler",
    "policy": "reinforce",
    "flush": "synchronous",
    "cut": "layers_per_stage",
    "chunks": "virtual_stages",
    "wire": "transport of a grid, comm_dtype of a precision",
    "sync": "sync_gradients",
    "clip_": "clip_grad_norm_",
    "words": "elements",
    "room": "buffer",
    "held": "local, in_flight",
    "told": "reported, manifest",
    "made": "the noun itself",
}
# where the word itself is meant
MEANT = {
    ("data.chunks", "chunks"),  # HDF5's
    ("files", "sync"), ("train.run_folder", "sync"),  # to the disk
    ("files", "flush"),  # of a file
    ("matmul.plane", "cut"), ("matmul.two_half_d_rows", "cut"),  # of matrices
    ("randomness", "words"),  # of a generator
}  # fmt: skip


def public_names():
    """(module, name) of everything public."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield module, path.stem
        for name in defined(ast.parse(path.read_text(encoding="utf-8"))):
            yield module, name


def defined(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and (child.name[0] != "_" or child.name == "__init__"):
            yield child.name
            if isinstance(child, ast.ClassDef):
                yield from defined(child)
            else:
                yield from (a.arg for a in (*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs))
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            yield child.target.id


def test_public_names():
    found = {(module, name) for module, name in public_names() if name in FIELD_S_WORD}
    assert [f"{module}: {name}, say {FIELD_S_WORD[name]}" for module, name in sorted(found - MEANT)] == []
