"""`hpctrain checkpoint ls|verify|export RUN`: look at the checkpoints of a run, without MPI."""

from __future__ import annotations

import time
from pathlib import Path

from hpctrain import files
from hpctrain.train.checkpoint import folder, index, load
from hpctrain.train.checkpoint.manifest import NAME, Manifest
from hpctrain.train.checkpoint.pieces import Corrupt
from hpctrain.train.checkpoint.verify import verify as verified


def run(options) -> int:
    """Returns the exit status: 1 when something is wrong with a checkpoint.

    Raises:
        ValueError: for a run without checkpoints, or a folder in the way.
    """
    root = Path(options.run) / "checkpoints"
    steps = folder.steps(root)
    if options.step is not None:
        steps = [step for step in steps if step == options.step]
    if not steps:
        wanted = "no checkpoint" if options.step is None else f"no checkpoint of step {options.step}"
        raise ValueError(f"there is {wanted} in {root}")
    return {"ls": ls, "verify": verify, "export": export}[options.action](root, steps, options)


def ls(root: Path, steps: list[int], options) -> int:
    """One line a checkpoint, by what its manifest says."""
    wrong = 0
    for step in reversed(steps):
        path = folder.place(root, step)
        try:
            told = index.read(path).manifest
            written = (path / NAME).stat().st_mtime
        except (Corrupt, OSError) as error:
            print(f"step {step:8d}  bad: {error}")
            wrong = 1
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written))
        grid = " ".join(f"{axis}={size}" for axis, size in told.about.get("grid", {}).items())
        print(f"step {step:8d}  {when}  {told.files:5d} files  {told.bytes / 1e6:10.1f} MB  {grid}")
    return wrong


def verify(root: Path, steps: list[int], options) -> int:
    """Read every byte of every checkpoint."""
    wrong = 0
    for step in reversed(steps):
        try:
            told = verified(folder.place(root, step)).manifest
            print(f"step {step}: {told.files} files, {told.bytes:,} bytes: as written")
        except (Corrupt, OSError) as error:
            print(f"step {step}: BAD: {error}")
            wrong = 1
    return wrong


def export(root: Path, steps: list[int], options) -> int:
    """The newest valid checkpoint's weights, for Hugging Face transformers."""
    from hpctrain.models.export import HuggingFaceWriter

    if not options.output:
        raise ValueError("export needs a folder to write to: -o DIR")
    target = Path(options.output)
    if files.status(target) and any(target.iterdir()):
        raise ValueError(f"{target} exists and is not empty; choose another folder")
    for step in steps:
        path = folder.place(root, step)
        try:
            node = verified(path)
            break
        except Corrupt as error:
            print(f"step {step} is not used: {error}")
    else:
        return 1
    told = node.manifest
    shape, end = gpt2_shape(told)
    writer = HuggingFaceWriter(target, shape, end)
    for name in told.tensors:
        if name.startswith("model/"):
            weight = load.whole(node, name)
            if told.about["config"]["replicas"]["method"] == "local_sgd":
                weight = weight.mean(0)  # of the replicas
            writer.add(name.removeprefix("model/"), weight)
    writer.close()
    print(f"wrote {target}/ from step {step}")
    return 0


def gpt2_shape(told: Manifest):
    """The sizes that the checkpoint's configuration says, and the token that ends a document."""
    from hpctrain.models.gpt2 import GPT2Shape

    m = told.about["config"]["model"]
    shape = GPT2Shape(m["layers"], m["width"], m["heads"], m["context"], m["vocabulary"], m["dropout"], m["tied"])
    return shape, told.about["data"]["end_of_document"]
