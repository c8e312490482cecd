"""Whether a file of shards is as it was written.

HDF5 checks every chunk of numbers by a checksum of its own whenever it is read. All other bytes of the file have a
CRC-32 in the manifest, which is checked before HDF5 sees them: so loading reads the numbers once. The SHA-256 of the
whole file, which takes ten times as long, is for `hpctrain checkpoint verify` and for `sha256sum`.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import h5py

from hpctrain.train.checkpoint.manifest import Corrupt, File

BLOCK = 16 << 20  # bytes hashed at a time: between two, other threads may hold Python's lock


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    sha, room = hashlib.sha256(), memoryview(bytearray(min(BLOCK, max(1, path.stat().st_size))))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(room):
            sha.update(room[:count])
    return sha.hexdigest()


def chunks(path: Path, datasets: Iterable[str]) -> list[tuple[int, int]]:
    """Where the chunks of these datasets lie in the file: (start, stop) in bytes, in order, neighbours as one."""
    places: list[tuple[int, int]] = []

    def note(chunk):
        places.append((chunk.byte_offset, chunk.byte_offset + chunk.size))

    with h5py.File(path, "r") as file:
        for name in datasets:
            dataset = file[name].id
            if hasattr(dataset, "chunk_iter"):
                dataset.chunk_iter(note)
            else:  # an older HDF5, which looks through all chunks each time
                for number in range(dataset.get_num_chunks()):
                    note(dataset.get_chunk_info(number))
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(places):
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


def crc32(path: Path, size: int, chunks: list[tuple[int, int]]) -> int:
    """CRC-32 of all bytes of a file of this size but those of its chunks."""
    crc, place = 0, 0
    with path.open("rb", buffering=0) as file:
        for start, stop in [*chunks, (size, size)]:
            while place < start:
                block = os.pread(file.fileno(), min(BLOCK, start - place), place)
                if not block:
                    raise Corrupt(f"{path} ends at byte {place} of {size}")
                crc, place = zlib.crc32(block, crc), place + len(block)
            place = stop
    return crc


def check(path: Path, told: File) -> None:
    """Raise Corrupt unless the file has the size that the manifest says and, but for its chunks, the bytes."""
    _check_size(path, told)
    if _of(crc32, path, told.bytes, told.chunks) != told.crc32:
        raise Corrupt(f"{path} does not have the checksum in the manifest: it is corrupt or was changed")


def check_digest(path: Path, told: File) -> None:
    """Raise Corrupt unless the file has the size and the SHA-256 that the manifest says."""
    _check_size(path, told)
    if _of(digest, path) != told.sha256:
        raise Corrupt(f"{path} does not have the SHA-256 in the manifest: it is corrupt or was changed")


def _of(checksum, path, *arguments):
    try:
        return checksum(path, *arguments)
    except OSError as error:
        raise Corrupt(f"{path} cannot be read: {error}") from error


def _check_size(path: Path, told: File) -> None:
    found = size(path)
    if found != told.bytes:
        raise Corrupt(f"{path} has {found} bytes instead of {told.bytes}: it is truncated or was changed")


def size(path: Path) -> int:
    """Of a plain file."""
    try:
        if not path.is_file() or path.is_symlink():
            raise Corrupt(f"{path} is missing")
        return path.stat().st_size
    except OSError as error:
        raise Corrupt(f"{path} cannot be read: {error.strerror}") from error
