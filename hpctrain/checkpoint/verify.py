"""Whether a checkpoint is as it was written, to the last byte."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from hpctrain.checkpoint import checks, holders, index, shards
from hpctrain.checkpoint.folder import LATEST
from hpctrain.checkpoint.index import Node
from hpctrain.checkpoint.manifests import HOLDERS, NAME, SUM
from hpctrain.checkpoint.pieces import Corrupt, File, Tensors
from hpctrain.checkpoint.reading import any_meet


def verify(path: str | os.PathLike) -> Node:
    """Check everything: manifests, sizes, SHA-256, every CRC-32, that each element is there once, and nothing else.

    For any one process: it uses no MPI. Memory: a manifest of a rank, the table of a group, and 16 bytes a dim of every
    piece of the checkpoint.

    Raises:
        Corrupt: naming the file that is wrong.
    """
    path = Path(path)
    if path.name == LATEST and path.is_symlink():
        path = path.parent / os.readlink(path)
    node = index.read(path)
    known = {NAME, SUM, HOLDERS}
    bounds: dict[str, list[np.ndarray]] = {name: [] for name in node.manifest.tensors}
    groups = []
    for number in range(len(node.manifest.parts)):
        group = index.read_group(node, number)
        known.add(group.folder.name)
        names, tables = {NAME, HOLDERS}, []
        for of_rank, part in enumerate(group.manifest.parts):
            rank = index.read_rank(group, of_rank)
            names |= {part.name, *(file.name for file in rank.files)}
            tables.append((rank.tensors, holders.of_files(rank.tensors, rank.files)))
            for file in rank.files:
                _verify_file(group.folder / file.name, file)
                for name, pieces in file.pieces.items():
                    bounds[name].append(np.array([piece.bounds for piece in pieces], np.int64))
        _check_table(group, tables)
        _check_names(group.folder, names)
        groups.append((group.manifest.tensors, group.holders.hull()))
    _check_table(node, groups)
    _check_names(path, known)
    for name, found in bounds.items():
        if found and any_meet(np.concatenate(found)):
            raise Corrupt(f"{path / NAME}: two pieces of {name} overlap")
    return node


def _verify_file(path: Path, file: File) -> None:
    checks.check_digest(path, file)
    checks.check(path, file)
    shards.check_contents(path, file)


def _check_table(node: Node, parts: list[tuple[Tensors, np.ndarray]]) -> None:
    """The table says what the parts have."""
    with_all = [(node.manifest.tensors, node.holders.rows[:0]), *parts]
    rows = holders.merged(with_all)[1].rows
    rows[:, holders.PART] -= 1
    if not np.array_equal(rows, node.holders.rows):
        raise Corrupt(f"{node.folder / HOLDERS} does not say what the parts of the checkpoint hold")


def _check_names(folder: Path, known: set[str]) -> None:
    for name in sorted(os.listdir(folder)):
        if name not in known and not name.startswith(".nfs"):  # of a file deleted while it was open
            raise Corrupt(f"{folder / name} is not named in the manifest")
