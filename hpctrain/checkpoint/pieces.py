"""What one rank has written: the manifest of its files of shards. JSON, believed only once every part is checked."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.shard_entries import Entry

FORMAT, VERSION = "hpctrain checkpoint", 5
LARGEST = 256 << 20  # bytes of any file that describes others: a longer one is neither written nor read
BLOCK = 1 << 20  # bytes of numbers with a CRC-32 each: sums of 1 TB are 12 MB


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip

Bounds = tuple[tuple[int, int], ...]  # start and stop of each dim
Tensors = dict[str, tuple[str, tuple[int, ...]]]  # dtype and global shape, by name


class Corrupt(ValueError):
    """A checkpoint that must not be used; the message names the file and says what is wrong with it."""


class OtherVersion(Corrupt):
    """A manifest of another version of the format."""


@dataclass
class StoredPiece:
    """A rectangle of a tensor, (start, stop) a dim: its numbers are bytes `start` to `stop` of its file, by rows and
    little-endian, and each BLOCK of them has a CRC-32."""

    bounds: Bounds
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
    pieces: dict[str, list[StoredPiece]]

    def numbers(self) -> list[tuple[int, int]]:
        """Where the pieces lie: (start, stop) in bytes, in order."""
        return sorted((piece.start, piece.stop) for pieces in self.pieces.values() for piece in pieces)


@dataclass
class RankManifest:
    """What a rank wrote. Attributes: `tensors`, dtype and global shape of those of which its files hold pieces."""

    step: int
    rank: int
    tensors: Tensors
    files: list[File]
    format: str = FORMAT
    version: int = VERSION

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def text(self) -> str:
        return json.dumps(self, default=vars) + "\n"


def file_name(rank: int, number: int) -> str:
    return f"rank-{rank:05d}-{number}.h5" if number else f"rank-{rank:05d}.h5"


def parse(text: str) -> RankManifest:
    """The manifest in `text`, every number and name in it checked before anybody computes or allocates by it.

    Raises:
        Corrupt: for what no rank writes.
    """
    with refused():
        values = json.loads(text)
        check_version(values)
        files = [_file(**file) for file in values.pop("files")]
        manifest = RankManifest(files=files, **values)
        natural(manifest.step, "step")
        natural(manifest.rank, "rank")
        manifest.tensors = {name: check_tensor(name, *described) for name, described in manifest.tensors.items()}
        for number, file in enumerate(files):
            if file.name != file_name(manifest.rank, number):
                raise Corrupt(f"file {number} of rank {manifest.rank} is not named {file.name!r}")
            _check_file(file, manifest.tensors)
    return manifest


@contextlib.contextmanager
def refused():
    """Whatever goes wrong in here is wrong with what is parsed: raises Corrupt."""
    try:
        yield
    except Corrupt:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Corrupt(f"not a manifest: {type(error).__name__}: {error}") from error


def _file(pieces: dict[str, list[dict]], **others: Any) -> File:
    return File(**others, pieces={name: [StoredPiece(**piece) for piece in of] for name, of in pieces.items()})


def check_version(values: dict) -> None:
    if values.pop("format") != FORMAT:
        raise Corrupt("this is no checkpoint of hpctrain")
    if (version := values.pop("version")) != VERSION:
        raise OtherVersion(f"format version {version} is not {VERSION}, the one that this hpctrain reads")


def _check_file(file: File, tensors: Tensors) -> None:
    natural(file.bytes, file.name)
    check_sha256(file.sha256, file.name)
    natural(file.crc32, file.name)
    for name, pieces in file.pieces.items():
        dtype, shape = tensors[name]
        for piece in pieces:
            _check_piece(piece, f"{name} in {file.name}", shape, DTYPES[dtype].itemsize)
    place = 0
    for start, stop in [*file.numbers(), (file.bytes, file.bytes)]:
        if start < place:
            raise Corrupt(f"two pieces in {file.name} overlap, or one lies outside it")
        place = stop


def _check_piece(piece: StoredPiece, what: str, shape, itemsize: int) -> None:
    piece.bounds = tuple((start, stop) for start, stop in piece.bounds)
    if len(piece.bounds) != len(shape):
        raise Corrupt(f"{what}: a piece has {len(piece.bounds)} dims of {len(shape)}")
    for (start, stop), size in zip(piece.bounds, shape):
        natural(start, what)
        natural(stop, what)
        if not start < stop <= size:
            raise Corrupt(f"{what}: a piece is {start}:{stop} of a dim of size {size}")
    natural(piece.start, what)
    natural(piece.stop, what)
    size = math.prod(piece.shape) * itemsize
    if piece.stop - piece.start != size:
        raise Corrupt(f"{what}: {piece.stop - piece.start} bytes are to hold {size}")
    if len(piece.crc32) != -(-size // BLOCK):
        raise Corrupt(f"{what}: {len(piece.crc32)} checksums of {size} bytes")
    for checksum in piece.crc32:
        natural(checksum, what)


def check_tensor(name: str, dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    check_name(name, dtype)
    for size in shape:
        natural(size, name)
    if not shape or len(shape) > 32:
        raise Corrupt(f"{name} has {len(shape)} dims")
    return dtype, tuple(shape)


def check_name(name: str, dtype: str) -> None:
    if not (name and name.isprintable()) or ".." in name or name.startswith("/"):
        raise Corrupt(f"{name!r} is not the name of a tensor")
    if dtype not in DTYPES:
        raise Corrupt(f"{name} has the unknown type {dtype!r}")


def check_entry(entry: Entry) -> None:
    """Raises ValueError for what a checkpoint cannot hold."""
    dtype = dtype_name(entry.tensor.dtype)
    check_name(entry.name, dtype)
    if entry.tensor.is_complex() and not entry.shard.global_shape:
        raise ValueError(f"{entry.name} is a {dtype} without dims; keep it with one dim, as by reshape(1)")


def check_sha256(digest: str, what: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise Corrupt(f"{what} has no SHA-256")


def natural(value: object, what: str) -> None:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise Corrupt(f"{what}: {value!r} is not a size")
