"""The folder of checkpoints: which are there, and how one comes and goes without a moment at which none is whole."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from hpctrain import files
from hpctrain.checkpoint import manifests

LATEST = "latest"

log = logging.getLogger("hpctrain")


def place(root: Path, step: int) -> Path:
    return root / manifests.folder_name(step)


def unfinished(root: Path, step: int) -> Path:
    return root / f"step-{step}.tmp"


def steps(root: Path) -> list[int]:
    """Steps of which there is a complete checkpoint, valid or not, the newest first.

    Raises:
        OSError: where the folder cannot be listed, which is not to be taken for none.
    """
    found = (re.fullmatch(r"step-(0|[1-9][0-9]*)", name) for name in _names(root))
    return sorted((int(match[1]) for match in found if match), reverse=True)


def bad(root: Path) -> list[str]:
    """Names of the checkpoints that were set aside."""
    return sorted(name for name in _names(root) if re.match(r"step-.*\.bad", name))


def _names(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except FileNotFoundError:
        return []


def start(root: Path, step: int) -> None:
    """Make the folder in which the checkpoint of a step is written.

    Raises:
        FileExistsError: when the step has a checkpoint, as none is ever overwritten; and when a later one has, from
            which `resume` would go on.
    """
    if files.in_use(place(root, step)):
        raise FileExistsError(f"{place(root, step)} exists already")
    if (newest := next(iter(steps(root)), step)) > step:
        raise FileExistsError(f"{place(root, newest)} is of a later step: remove it, or save in another folder")
    make(root)
    path = unfinished(root, step)
    if files.in_use(path) and not discard(path):
        path.rename(files.free_name(path))
    path.mkdir()


def make(path: Path) -> None:
    """Make a folder and those above it, their names on disk."""
    if not files.is_folder(path):
        make(path.parent)
        path.mkdir(exist_ok=True)
        files.sync(path.parent)


def publish(root: Path, step: int) -> Path:
    """Turn what was written, and is on disk, into the checkpoint: rename, `latest`. Each is on disk before the next."""
    path, final = unfinished(root, step), place(root, step)
    if files.in_use(final):
        raise FileExistsError(f"{final} exists already")
    path.rename(final)
    try:
        files.sync(root)
        point(root, step)
    except OSError as error:  # the checkpoint is complete, and found without a link to it
        log.warning("WARNING: %s does not point to %s: %s", root / LATEST, final.name, error)
    return final


def point(root: Path, step: int) -> None:
    """Let `latest` be this step's checkpoint."""
    link = root / f"{LATEST}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(place(root, step).name)
    link.rename(root / LATEST)
    files.sync(root)


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints; the caller has verified the newest."""
    for step in steps(root)[keep:]:
        # under a name that nobody reads, as it is taken apart file by file
        discard(place(root, step).rename(files.free_name(unfinished(root, step))))


def clean(root: Path) -> None:
    """Remove what killed jobs left unfinished, as far as it can be."""
    for name in _names(root):
        if re.fullmatch(r"step-[0-9]+\.tmp(\.[0-9]+)?", name):
            discard(root / name)
    (root / f"{LATEST}.tmp").unlink(missing_ok=True)


def discard(path: Path) -> bool:
    """Delete a folder that nobody reads, and say so where that fails: a file that a process somewhere has open stays in
    a folder of NFS, as .nfs and a number."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        log.warning("WARNING: %s stays: %s", path, error)
        return False
    return True


def set_aside(root: Path, step: int) -> Path:
    """Rename a checkpoint that must not be used, to make room for another of that step."""
    aside = place(root, step).rename(files.free_name(root / f"step-{step}.bad"))
    if left := steps(root):
        point(root, left[0])
    else:
        (root / LATEST).unlink(missing_ok=True)
    return aside
