"""Checkpoints of two steps, and ways to change what their manifests say."""

import hashlib
import json
from pathlib import Path

import pytest
from checkpoint_checks import Alone, Numbers

from hpctrain.checkpoint import Checkpointer

SIZES = ((3,), (7, 5))


@pytest.fixture
def root(tmp_path):
    """Checkpoints of steps 1 and 2."""
    saver = Checkpointer(tmp_path, Alone(), background=False)
    for step in (1, 2):
        assert saver.save(step, Numbers(step, SIZES), {}) is None
    return tmp_path


def resumed(root):
    """(step, whether the numbers are that step's)."""
    numbers = Numbers(9, SIZES)
    told = Checkpointer(root, Alone()).resume(numbers)
    return told.step, numbers == Numbers(told.step, SIZES)


RANK = "ranks-00000/rank-00000.json"


def rewrite(path, change, name=RANK):
    """Change a manifest, and the checksums in those above it."""
    values = json.loads((path / name).read_text())
    change(values)
    sign(path, name, json.dumps(values).encode())


def sign(path, name, content):
    """Write a file that a manifest describes, and change that one's checksum of it, up to the uppermost."""
    (path / name).write_bytes(content)
    digest, folder = hashlib.sha256(content).hexdigest(), Path(name).parent
    if name == "manifest.json":
        (path / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
        return
    above = "manifest.json" if folder == Path() or name.endswith("manifest.json") else f"{folder}/manifest.json"

    def describe(values):
        if name.endswith("holders.bin"):
            values["holders"] = digest
        else:
            values["parts"][0].update(bytes=len(content), sha256=digest)

    rewrite(path, describe, above)


def first(values):
    return values["files"][0]


def piece(values):
    return first(values)["pieces"]["0/float32.0"][0]
