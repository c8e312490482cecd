"""The manifest of a checkpoint: what is in which file. JSON, believed only after every part has been checked."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

FORMAT, VERSION = "hpctrain checkpoint", 3
NAME, SUM = "manifest.json", "manifest.sha256"
LARGEST = 1 << 30  # bytes of a manifest; more is refused unread
BLOCK = 1 << 20  # bytes of numbers with a CRC-32 each: sums of 1 TB are 12 MB of manifest

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


class Corrupt(ValueError):
    """A checkpoint that must not be used; the message names the file and says what is wrong with it."""


@dataclass
class Piece:
    """A rectangle of a tensor, (start, stop) a dim: its numbers are bytes `start` to `stop` of its file, by rows and
    little-endian, and each BLOCK of them has a CRC-32."""

    bounds: tuple[tuple[int, int], ...]
    start: int
    stop: int
    crc32: list[int]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.bounds)


@dataclass
class File:
    """One file: name, size, SHA-256, the pieces that it holds of each tensor, and the CRC-32 of all other bytes."""

    name: str
    bytes: int
    sha256: str
    crc32: int
    pieces: dict[str, list[Piece]]

    def numbers(self) -> list[tuple[int, int]]:
        """Where the pieces lie: (start, stop) in bytes, in order."""
        return sorted((piece.start, piece.stop) for pieces in self.pieces.values() for piece in pieces)


@dataclass
class Manifest:
    """Attributes: `tensors`, dtype and global shape of each; `scalars`, dtype and value of tensors without dims;
    `files`; and `about`: grid, data position, random state, configuration, versions and whatever else the job keeps."""

    step: int
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    scalars: dict[str, tuple[str, float | int | bool]]
    files: list[File]
    about: dict = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION

    def text(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        Corrupt: when it is missing, does not have the SHA-256 beside it, does not make sense, or is of another step.
    """
    path = folder / NAME
    for part in (path, folder / SUM):
        if not part.is_file():
            raise Corrupt(f"{part} is missing")
    if path.stat().st_size > LARGEST:
        raise Corrupt(f"{path} has {path.stat().st_size} bytes, more than any manifest")
    content, told = path.read_bytes(), (folder / SUM).read_bytes()
    if told != checksum(content).encode():
        raise Corrupt(f"{path} does not have the checksum in {folder / SUM}: one of them was changed")
    try:
        made = parse(content.decode())
    except Corrupt as error:
        raise Corrupt(f"{path}: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{path} is not a manifest: {error}") from error
    if folder.name != folder_name(made.step):
        raise Corrupt(f"{path} is of step {made.step}")
    return made


def folder_name(step: int) -> str:
    return f"step-{step}"


def checksum(content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()}  {NAME}\n"


def parse(text: str) -> Manifest:
    """The manifest in `text`, every number and name in it checked before anybody computes or allocates by it."""
    values = json.loads(text)
    if values.pop("format") != FORMAT:
        raise Corrupt("this is no checkpoint of hpctrain")
    if (version := values.pop("version")) != VERSION:
        raise Corrupt(f"format version {version} is not {VERSION}")
    files = [File(**file) for file in values.pop("files")]
    manifest = Manifest(files=files, **values)
    _natural(manifest.step, "step")
    manifest.tensors = {name: _tensor(name, *told) for name, told in manifest.tensors.items()}
    manifest.scalars = {name: _scalar(name, *told) for name, told in manifest.scalars.items()}
    if len({file.name for file in files}) != len(files):
        raise Corrupt("a file is named twice")
    for file in files:
        _check_file(file, manifest.tensors)
    _check_cover(manifest)
    return manifest


def file_name(rank: int, number: int) -> str:
    return f"rank-{rank:05d}-{number}.h5" if number else f"rank-{rank:05d}.h5"


def _check_file(file: File, tensors) -> None:
    if not (isinstance(file.name, str) and re.fullmatch(r"rank-\d{5,}(-\d+)?\.h5", file.name)):
        raise Corrupt(f"{file.name!r} is not a file name of a checkpoint")
    _natural(file.bytes, file.name)
    if not re.fullmatch(r"[0-9a-f]{64}", file.sha256):
        raise Corrupt(f"{file.name} has no SHA-256")
    _natural(file.crc32, file.name)
    for name, pieces in file.pieces.items():
        dtype, shape = tensors[name]
        file.pieces[name] = [Piece(**piece) for piece in pieces]
        for piece in file.pieces[name]:
            _check_piece(piece, f"{name} in {file.name}", shape, DTYPES[dtype].itemsize)
    place = 0
    for start, stop in [*file.numbers(), (file.bytes, file.bytes)]:
        if start < place:
            raise Corrupt(f"two pieces in {file.name} overlap, or one lies outside it")
        place = stop


def _check_piece(piece: Piece, what: str, shape, itemsize: int) -> None:
    piece.bounds = tuple((start, stop) for start, stop in piece.bounds)
    if len(piece.bounds) != len(shape):
        raise Corrupt(f"{what}: a piece has {len(piece.bounds)} dims of {len(shape)}")
    for (start, stop), size in zip(piece.bounds, shape):
        _natural(start, what), _natural(stop, what)
        if not start < stop <= size:
            raise Corrupt(f"{what}: a piece is {start}:{stop} of a dim of size {size}")
    _natural(piece.start, what), _natural(piece.stop, what)
    size = math.prod(piece.shape) * itemsize
    if piece.stop - piece.start != size:
        raise Corrupt(f"{what}: {piece.stop - piece.start} bytes are to hold {size}")
    if len(piece.crc32) != -(-size // BLOCK):
        raise Corrupt(f"{what}: {len(piece.crc32)} checksums of {size} bytes")
    for checksum in piece.crc32:
        _natural(checksum, what)


def _check_cover(manifest: Manifest) -> None:
    """Every element of every tensor is in one file, once."""
    parts: dict[str, list] = {name: [] for name in manifest.tensors}
    for file in manifest.files:
        for name, pieces in file.pieces.items():
            parts[name] += [piece.bounds for piece in pieces]
    for name, pieces in parts.items():
        _, shape = manifest.tensors[name]
        held = sum(math.prod(stop - start for start, stop in piece) for piece in pieces)
        if held != math.prod(shape):
            raise Corrupt(f"the files hold {held} of the {math.prod(shape)} elements of {name}")
        if _any_meet(np.array(pieces, dtype=np.int64).reshape(len(pieces), len(shape), 2)):
            raise Corrupt(f"two pieces of {name} overlap")


def _any_meet(bounds: np.ndarray) -> bool:
    """Whether two of the rectangles (number, dim, start and stop) share an element. Their memory is all it takes: they
    are ordered along the dim that has most starts, and each is held against those that begin before it ends."""
    along = max(range(bounds.shape[1]), key=lambda dim: len(np.unique(bounds[:, dim, 0])))
    bounds = bounds[bounds[:, along, 0].argsort()]
    after = bounds[:, along, 0].searchsorted(bounds[:, along, 1])
    return any(
        ((one[:, 0] < others[..., 1]) & (others[..., 0] < one[:, 1])).all(1).any()
        for one, others in ((bounds[n], bounds[n + 1 : after[n]]) for n in range(len(bounds)))
    )


def _tensor(name: str, dtype: str, shape) -> tuple[str, tuple[int, ...]]:
    _check_name(name, dtype)
    for size in shape:
        _natural(size, name)
    if not shape or len(shape) > 32:
        raise Corrupt(f"{name} has {len(shape)} dims")
    return dtype, tuple(shape)


def _scalar(name: str, dtype: str, value) -> tuple[str, float | int | bool]:
    _check_name(name, dtype)
    if not isinstance(value, (bool, int, float)):
        raise Corrupt(f"{name} must be a number, is {value!r}")
    try:
        held = torch.tensor(value, dtype=DTYPES[dtype]).item()
    except (RuntimeError, OverflowError) as error:
        raise Corrupt(f"{name} is {value!r}, which {dtype} cannot hold: {error}") from error
    if held != value and not (math.isnan(value) and math.isnan(held)):
        raise Corrupt(f"{name} is {value!r}, of which {dtype} holds {held!r}")
    return dtype, value


def _check_name(name: str, dtype: str) -> None:
    if not re.fullmatch(r"[\w./\-]+", name) or ".." in name or name.startswith("/"):
        raise Corrupt(f"{name!r} is not the name of a tensor")
    if dtype not in DTYPES:
        raise Corrupt(f"{name} has the unknown type {dtype!r}")


def _natural(value, what: str) -> None:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise Corrupt(f"{what}: {value!r} is not a size")


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and its checksum to `folder`, on disk before this returns."""
    content = manifest.text().encode()
    for name, part in ((NAME, content), (SUM, checksum(content).encode())):
        with (folder / name).open("xb") as file:
            file.write(part)
            file.flush()
            os.fsync(file.fileno())
