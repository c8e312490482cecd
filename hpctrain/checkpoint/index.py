"""The tree of manifests of a checkpoint: each is written after those below it, and read by whoever needs it alone.

A rank has a manifest of the files that it wrote, a group of ranks one of its ranks, the checkpoint one of the groups;
each has the SHA-256 of those below and a table of what they hold. With P ranks, T tensors and groups of 100, a rank
writes and sends what it has itself, the first of a group 100 ranks' bounds of at most T tensors, rank 0 those of P/100
groups. A rank that loads reads the checkpoint's manifest, and the groups' and the ranks' whose bounds meet its own.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpctrain import files
from hpctrain.checkpoint import checks, holders, manifests, pieces
from hpctrain.checkpoint.holders import Holders
from hpctrain.checkpoint.manifests import HOLDERS, NAME, SUM, Manifest, ManifestPart
from hpctrain.checkpoint.pieces import LARGEST, Corrupt, File, RankManifest, Tensors


class Node(NamedTuple):
    """A manifest of others, and its folder."""

    folder: Path
    manifest: Manifest
    holders: Holders


@dataclass
class Summary:
    """What the manifest above says of a part: itself (None where it has no files), its tensors, the bounds of what it
    has of them, as rows of part 0, and its scalars."""

    part: ManifestPart | None
    tensors: Tensors
    rows: np.ndarray
    scalars: dict


# Writing: all is on disk before a function returns ------------------------------------------------------------------


def write_rank(folder: Path, step: int, rank: int, tensors: Tensors, scalars: dict, written: list[File]) -> Summary:
    """The manifest of a rank, beside its files in `folder`.

    Raises:
        ValueError: for what could not be read again.
    """
    part = None
    if written:
        manifest = RankManifest(step, rank, tensors, written)
        text = manifest.text()
        pieces.parse(text)
        part = _write(folder / manifests.rank_name(rank), text.encode(), len(written), manifest.bytes)
        files.sync(folder)
    return Summary(part, tensors, holders.of_files(tensors, written), scalars)


def write_group(folder: Path, step: int, ranks: list[Summary]) -> Summary:
    """The manifest of a group, from its ranks in order. Errors as `write_rank`."""
    parts, tensors, table, scalars = _merged(ranks)
    part = None
    if parts:
        manifest = Manifest(step, tensors, scalars, parts, _write(folder / HOLDERS, table.bytes()).sha256)
        text = manifest.text()
        _parse_table(table.bytes(), manifests.parse(text, manifests.RANK))
        part = _write(folder / NAME, text.encode(), manifest.files, manifest.bytes)
        part.name = f"{folder.name}/{NAME}"
        files.sync(folder)
    return Summary(part, tensors, table.hull(), scalars)


def write(folder: Path, step: int, groups: list[Summary], about: dict) -> Manifest:
    """The manifest of the checkpoint, from all groups in order. Errors as `write_rank`, and where not every element of
    every tensor was written once."""
    parts, tensors, table, scalars = _merged(groups)
    manifest = Manifest(step, tensors, scalars, parts, _write(folder / HOLDERS, table.bytes()).sha256, about)
    text = manifest.text()
    check_cover(manifests.parse(text, manifests.RANKS), _parse_table(table.bytes(), manifest))
    part = _write(folder / NAME, text.encode())
    _write(folder / SUM, checksum(part.sha256).encode())
    files.sync(folder)
    return manifest


def _merged(summaries: list[Summary]):
    summaries = sorted(summaries, key=lambda summary: summary.part is None)  # parts are numbered from 0
    tensors, table = holders.merged([(summary.tensors, summary.rows) for summary in summaries])
    scalars = {name: value for summary in summaries for name, value in summary.scalars.items()}
    return [summary.part for summary in summaries if summary.part], tensors, table, scalars


def _write(path: Path, content: bytes, count: int = 0, stored: int = 0) -> ManifestPart:
    if len(content) > LARGEST:
        raise ValueError(f"{path} would have {len(content)} bytes, more than the {LARGEST} that are read again")
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return ManifestPart(path.name, len(content), hashlib.sha256(content).hexdigest(), count, stored)


def checksum(sha256: str) -> str:
    """What `sha256sum -c` reads."""
    return f"{sha256}  {NAME}\n"


# Reading ------------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Node:
    """The manifest of a checkpoint.

    Raises:
        Corrupt: when it is missing, does not have the SHA-256 beside it, does not make sense, or is of another step.
        OSError: when it cannot be read, whatever it holds.
    """
    path = folder / NAME
    content = checks.read_plain(path, LARGEST)
    if checks.read_plain(folder / SUM, 1000) != checksum(hashlib.sha256(content).hexdigest()).encode():
        raise Corrupt(f"{path} does not have the checksum in {folder / SUM}: one of them was changed")
    node = _node(folder, content, manifests.RANKS)
    with _named(path):
        if folder.name != manifests.folder_name(node.manifest.step):
            raise Corrupt(f"it is of step {node.manifest.step}")
        check_cover(node.manifest, node.holders)
    return node


def read_group(node: Node, number: int) -> Node:
    """A part of a checkpoint's manifest. Errors as `read`."""
    part = node.manifest.parts[number]
    folder = node.folder / Path(part.name).parent
    if not stat.S_ISDIR(checks.found(folder).st_mode):
        raise Corrupt(f"{folder} is not a folder")
    group = _node(folder, _signed(node.folder / part.name, part.sha256, part.bytes), manifests.RANK)
    with _named(node.folder / part.name):
        _check_part(part, group.manifest, node)
    return group


def read_rank(group: Node, number: int) -> RankManifest:
    """A part of a group's manifest. Errors as `read`."""
    part = group.manifest.parts[number]
    path = group.folder / part.name
    content = _signed(path, part.sha256, part.bytes)
    with _named(path):
        manifest = pieces.parse(_text(content))
        _check_part(part, manifest, group)
        if part.name != manifests.rank_name(manifest.rank):
            raise Corrupt(f"it is of rank {manifest.rank}")
    return manifest


def _check_part(part: ManifestPart, manifest: Manifest | RankManifest, above: Node) -> None:
    count = manifest.files if isinstance(manifest, Manifest) else len(manifest.files)
    if (manifest.step, count, manifest.bytes) != (above.manifest.step, part.files, part.stored):
        raise Corrupt(
            f"step {manifest.step}, {count} files and {manifest.bytes} bytes are not what {above.folder} says"
        )
    for name, described in manifest.tensors.items():
        if above.manifest.tensors.get(name) != described:
            raise Corrupt(f"{name} is {described}, which is not what {above.folder} says")


def _node(folder: Path, content: bytes, parts: str) -> Node:
    with _named(folder / NAME):
        manifest = manifests.parse(_text(content), parts)
    table = _signed(folder / HOLDERS, manifest.holders)
    with _named(folder / HOLDERS):
        return Node(folder, manifest, _parse_table(table, manifest))


def _parse_table(table: bytes, manifest: Manifest) -> Holders:
    return holders.parse(table, manifest.tensors, len(manifest.parts))


def _text(content: bytes) -> str:
    with pieces.refused():
        return content.decode()


def _signed(path: Path, sha256: str, size: int | None = None) -> bytes:
    content = checks.read_plain(path, LARGEST if size is None else min(size, LARGEST))
    if hashlib.sha256(content).hexdigest() != sha256:
        raise Corrupt(f"{path} does not have the SHA-256 that the manifest above it says: one of them was changed")
    return content


class _named:
    """What is Corrupt in here is so in this file."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self):
        pass

    def __exit__(self, kind, error, _):
        if kind is not None and issubclass(kind, Corrupt):
            raise kind(f"{self.path}: {error}") from error


def check_cover(manifest: Manifest, table: Holders) -> None:
    """Raise Corrupt unless the parts have as many elements of each tensor as it has."""
    for (name, (_, shape)), count in zip(manifest.tensors.items(), table.elements()):
        if count != (size := int(np.prod(shape, dtype=object))):
            raise Corrupt(f"the files hold {count} of the {size} elements of {name}")


def stored(node: Node, some: slice | None = None):
    """(folder, manifest of a rank) of all that wrote, and its files whose number, counted over all, is among `some`."""
    some = some or slice(0, node.manifest.files)
    first = 0
    for number, part in enumerate(node.manifest.parts):
        if _meets(first, part.files, some):
            group, place = read_group(node, number), first
            for index, of_rank in enumerate(group.manifest.parts):
                if _meets(place, of_rank.files, some):
                    rank = read_rank(group, index)
                    yield group.folder, rank.files[max(0, some.start - place) : some.stop - place]
                place += of_rank.files
        first += part.files


def _meets(first: int, count: int, some: slice) -> bool:
    return first < some.stop and some.start < first + count
