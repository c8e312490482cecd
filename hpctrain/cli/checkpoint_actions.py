"""What `hpctrain checkpoint` does."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from hpctrain import files, models
from hpctrain.checkpoint import folder, index, reading
from hpctrain.checkpoint.manifests import NAME
from hpctrain.checkpoint.pieces import Corrupt
from hpctrain.checkpoint.verify import verify as verified

AVERAGE = "optimizer/ema"  # of the weights, in a checkpoint


def act(options: argparse.Namespace) -> int:
    """Returns 1 when something is wrong with a checkpoint."""
    if options.action != "export" and (options.output or options.weights):
        raise ValueError(f"-o and --weights are for export, got {options.action}; leave them out")
    root = Path(options.run) / "checkpoints"
    steps = folder.steps(root)
    if options.step is not None:
        steps = [step for step in steps if step == options.step]
    if not steps:
        wanted = "no checkpoint" if options.step is None else f"no checkpoint of step {options.step}"
        raise ValueError(f"there is {wanted} in {root}")
    return {"ls": ls, "verify": verify, "export": export}[options.action](root, steps, options)


def ls(root: Path, steps: list[int], options: argparse.Namespace) -> int:
    """One line a checkpoint, by what its manifest says."""
    wrong = 0
    for step in reversed(steps):
        path = folder.place(root, step)
        try:
            manifest = index.read(path).manifest
            written = (path / NAME).stat().st_mtime
        except (Corrupt, OSError) as error:
            print(f"step {step:8d}  bad: {error}")
            wrong = 1
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written))
        grid = " ".join(f"{axis}={size}" for axis, size in manifest.about.get("grid", {}).items())
        print(f"step {step:8d}  {when}  {manifest.files:5d} files  {manifest.bytes / 1e6:10.1f} MB  {grid}")
    return wrong


def verify(root: Path, steps: list[int], options: argparse.Namespace) -> int:
    """Read every byte of every checkpoint."""
    wrong = 0
    for step in reversed(steps):
        try:
            manifest = verified(folder.place(root, step)).manifest
            print(f"step {step}: {manifest.files} files, {manifest.bytes:,} bytes: as written")
        except (Corrupt, OSError) as error:
            print(f"step {step}: BAD: {error}")
            wrong = 1
    return wrong


def export(root: Path, steps: list[int], options: argparse.Namespace) -> int:
    """The newest valid checkpoint's weights, for Hugging Face transformers, with the tokenizer of the run."""
    from hpctrain.models.export import HuggingFaceWriter

    if not options.output:
        raise ValueError("export needs a folder to write to: -o DIR")
    target = Path(options.output)
    files.check_free(target)
    for step in steps:
        path = folder.place(root, step)
        try:
            node = verified(path)
            break
        except Corrupt as error:
            print(f"step {step} is not used: {error}")
    else:
        return 1
    manifest = node.manifest
    averaged = options.weights == "ema"
    if options.weights is None:
        averaged = "export" in manifest.member("config", "train", "ema_use")
    stored = reading.described(manifest)
    names = [name.removeprefix("model/") for name in stored if name.startswith("model/")]
    if averaged and not any(f"{AVERAGE}/{name}" in stored for name in names):
        raise ValueError(f"step {manifest.step} has no moving average of the weights, as train.ema_decay makes one")
    sizes, method = manifest.member("config", "model"), manifest.member("config", "data_parallel", "method")
    spec = models.get(sizes["kind"])
    shape = spec.shape(sizes)
    with files.draft(target) as draft:
        writer = HuggingFaceWriter(draft, spec, shape, manifest.member("data", "end_of_document"))
        for name in names:
            own, average = f"model/{name}", f"{AVERAGE}/{name}"
            # without one it was never trained, so that it is its average
            weight = reading.whole(node, average if averaged and average in stored else own)
            if method == "local_sgd":  # of the replicas, which have the same where it is no weight
                weight = weight.mean(0) if weight.is_floating_point() else weight[0]
            writer.add(name, weight.to(stored[own].dtype))
        tokenizer = None if writer.config is None else _tokenizer(Path(options.run))
        writer.publish(target, tokenizer)
    what = "the moving average of the weights" if averaged else "the weights"
    print(f"wrote {what} of step {step}{' and the tokenizer' * (tokenizer is not None)} to {target}/")
    return 0


def _tokenizer(run: Path) -> Any:
    """Where the run's data or its own export still have it."""
    from hpctrain.config import load_config
    from hpctrain.train.inference import tokenizer_of

    try:
        return tokenizer_of(run, load_config(run / "config.toml"))
    except (ValueError, OSError) as error:
        print(f"WARNING: no tokenizer beside the weights: {error}", file=sys.stderr)
        return None
