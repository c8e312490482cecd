"""Whether a file of shards is as it was written.

Every block of numbers and all other bytes of a file have a CRC-32 in the manifest: loading checks a block as it reads
it, and the rest before. The SHA-256 of the whole file, which takes thirty times as long where the processor has no
instructions for it, is for `hpctrain checkpoint verify` and for `sha256sum`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from hpctrain.checkpoint.pieces import BLOCK, Corrupt, File

try:
    from isal.isal_zlib import crc32  # the same sums, by vectors: 10 GB/s a core instead of 3
except ImportError:  # there is none for this processor
    from zlib import crc32

HASHED = 16 << 20  # bytes at a time: between two, other threads may hold Python's lock
CACHED = 256 << 10  # bytes read at a time, which the processor's cache still holds when they are summed


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    sha, buffer = hashlib.sha256(), memoryview(bytearray(min(HASHED, max(1, size(path)))))
    with open_plain(path) as file:
        while count := file.readinto(buffer):
            sha.update(buffer[:count])
    return sha.hexdigest()


def sums(numbers: memoryview) -> list[int]:
    """CRC-32 of each block."""
    return [crc32(numbers[start : start + BLOCK]) for start in range(0, len(numbers), BLOCK)]


def read(path: Path, file: int, place: int, buffer: memoryview, crc: int = 0) -> int:
    """Fill `buffer` with an open file's bytes from `place` on. Returns their CRC-32, `crc` being that of those before.

    Raises:
        Corrupt: where the file ends.
    """
    done = 0
    while done < len(buffer):
        part = buffer[done : done + CACHED]
        count = os.preadv(file, [part], place + done)
        if not count:
            raise Corrupt(f"{path} ends at byte {place + done}: it is truncated")
        crc = crc32(part[:count], crc)
        done += count
    return crc


def rest(path: Path, size: int, numbers: list[tuple[int, int]]) -> int:
    """CRC-32 of all bytes of a file of this size but those of its numbers."""
    crc, place, buffer = 0, 0, memoryview(bytearray(CACHED))
    with open_plain(path) as file:
        for start, stop in [*numbers, (size, size)]:
            for part in range(place, start, CACHED):
                crc = read(path, file.fileno(), part, buffer[: start - part], crc)
            place = stop
    return crc


def check(path: Path, recorded: File) -> None:
    """Raise Corrupt unless the file has the size that the manifest says and, but for its numbers, the bytes."""
    _check_size(path, recorded)
    if rest(path, recorded.bytes, recorded.numbers()) != recorded.crc32:
        raise Corrupt(f"{path} does not have the checksum in the manifest: it is corrupt or was changed")


def check_digest(path: Path, recorded: File) -> None:
    """Raise Corrupt unless the file has the size and the SHA-256 that the manifest says."""
    _check_size(path, recorded)
    if digest(path) != recorded.sha256:
        raise Corrupt(f"{path} does not have the SHA-256 in the manifest: it is corrupt or was changed")


def _check_size(path: Path, recorded: File) -> None:
    found = size(path)
    if found != recorded.bytes:
        raise Corrupt(f"{path} has {found} bytes instead of {recorded.bytes}: it is truncated or was changed")


def size(path: Path) -> int:
    """Of a plain file. What else keeps a file from being read, such as permissions, does not make it corrupt."""
    if not stat.S_ISREG((status := found(path)).st_mode):
        raise Corrupt(f"{path} is missing: what is there is no plain file")
    return status.st_size


def found(path: Path) -> os.stat_result:
    """What is at a path itself, no link being followed. Raises Corrupt where there is nothing, OSError where that
    cannot be told."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise Corrupt(f"{path} is missing") from None


def open_plain(path: Path):
    """A plain file, opened for reading; never a link, a device or a pipe. Errors as `found`."""
    size(path)
    return open(path, "rb", buffering=0, opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW | os.O_NONBLOCK))


def read_plain(path: Path, most: int) -> bytes:
    """All of a plain file that has at most so many bytes. Errors as `found`."""
    if (expected := size(path)) > most:
        raise Corrupt(f"{path} has {expected} bytes, more than {most}")
    content = memoryview(bytearray(expected))
    with open_plain(path) as file:
        read(path, file.fileno(), 0, content)
    return bytes(content)
