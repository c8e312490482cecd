"""The folder of checkpoints: which are there, and how one comes and goes without a moment at which none is whole."""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
from pathlib import Path

from hpctrain.train.checkpoint import checks, manifest, shards
from hpctrain.train.checkpoint.manifest import Corrupt, Manifest

LATEST = "latest"

log = logging.getLogger("hpctrain")


def place(root: Path, step: int) -> Path:
    return root / manifest.folder_name(step)


def unfinished(root: Path, step: int) -> Path:
    return root / f"step-{step}.tmp"


def steps(root: Path) -> list[int]:
    """Steps of which there is a complete checkpoint, valid or not, the newest first."""
    if not root.is_dir():
        return []
    found = (re.fullmatch(r"step-(0|[1-9]\d*)", path.name) for path in root.iterdir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def start(root: Path, step: int) -> None:
    """Make the folder in which the checkpoint of a step is written.

    Raises:
        FileExistsError: when the step has a checkpoint; it is never overwritten.
    """
    if place(root, step).exists():
        raise FileExistsError(f"{place(root, step)} exists already")
    path = unfinished(root, step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def publish(root: Path, made: Manifest) -> Path:
    """Turn the written files into the checkpoint: manifest, rename, `latest`. Each is on disk before the next."""
    path, final = unfinished(root, made.step), place(root, made.step)
    manifest.write(path, made)
    sync(path)
    if final.exists():
        raise FileExistsError(f"{final} exists already")
    path.rename(final)
    try:
        sync(root)
        point(root, made.step)
    except OSError as error:  # the checkpoint is complete, and found without a link to it
        log.warning("WARNING: %s does not point to %s: %s", root / LATEST, final.name, error)
    return final


def point(root: Path, step: int) -> None:
    """Let `latest` be this step's checkpoint."""
    link = root / f"{LATEST}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(place(root, step).name)
    link.rename(root / LATEST)
    sync(root)


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints; the caller has verified the newest."""
    for step in steps(root)[keep:]:
        # under a name that nobody reads, as it is taken apart file by file
        path = place(root, step).rename(unfinished(root, step))
        shutil.rmtree(path)


def bad(root: Path) -> list[str]:
    """Names of the checkpoints that were set aside."""
    return sorted(path.name for path in root.glob("step-*.bad*")) if root.is_dir() else []


def clean(root: Path) -> None:
    """Remove what killed jobs left unfinished."""
    if root.is_dir():
        for path in root.glob("step-*.tmp"):
            shutil.rmtree(path)
        (root / f"{LATEST}.tmp").unlink(missing_ok=True)


def set_aside(root: Path, step: int) -> Path:
    """Rename a checkpoint that must not be used, to make room for another of that step."""
    names = (root / f"step-{step}.bad{n}" for n in itertools.chain([""], map(".{}".format, itertools.count(1))))
    aside = place(root, step).rename(next(path for path in names if not path.exists()))
    if left := steps(root):
        point(root, left[0])
    else:
        (root / LATEST).unlink(missing_ok=True)
    return aside


def verify(path: Path) -> Manifest:
    """Check everything: the manifest, sizes, SHA-256, every CRC-32, and that nothing else is there.

    Raises:
        Corrupt: naming the file that is wrong.
    """
    told = manifest.read(path)
    for file in told.files:
        checks.check_digest(path / file.name, file)
        checks.check(path / file.name, file)
        shards.check_contents(path / file.name, file)
    known = {manifest.NAME, manifest.SUM, *(file.name for file in told.files)}
    for found in sorted(path.iterdir()):
        if found.name not in known:
            raise Corrupt(f"{found} is not named in the manifest")
    return told


def sync(path: Path) -> None:
    """The entries of a folder, on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
