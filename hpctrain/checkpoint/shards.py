"""One file of shards: an HDF5 dataset for each rectangle, whose numbers lie in one place.

Reading goes past HDF5, to the place that the manifest tells: what a damaged file could make of the HDF5 library never
matters, and numbers go straight to where they are needed.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import torch

from hpctrain.checkpoint import checks
from hpctrain.checkpoint.pieces import BLOCK, Bounds, Corrupt, File, StoredPiece, file_name
from hpctrain.files import Disk, sync
from hpctrain.shard_entries import Entry

LIBVER = ("v110", "v110")  # whose metadata have checksums, for who reads the files by HDF5
FILE_BYTES = 64 << 20  # about the size at which a rank begins another file, so that it can be hashed beside the first
FILES = 4  # of a rank, about; so that a folder has some hundred at most
BESIDE = 4  # threads
# what NumPy does not know, and bool, in unsigned integers of as many bytes
_UNKNOWN = {
    torch.bfloat16: torch.uint16, torch.bool: torch.uint8, torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}  # fmt: skip
ROWS = 16 * BLOCK  # bytes read at a time where just some columns are needed


def write(folder: Path, rank: int, entries: list[Entry]) -> list[File]:
    """Write a rank's entries, which are in host memory, to new files; they are on disk before this returns.

    While one is written, those before it are hashed and synced.
    """
    with ThreadPoolExecutor(BESIDE) as beside:
        sealed = []
        for number, group in enumerate(_groups(entries)):
            path = folder / file_name(rank, number)
            pieces = _write(path, group)
            sealed.append((path, pieces, beside.submit(checks.digest, path), beside.submit(_sync, path)))
        return [_described(path, pieces, sha.result(), synced.result()) for path, pieces, sha, synced in sealed]


def _described(path, pieces, sha256, size):
    file = File(path.name, size, sha256, 0, pieces)
    file.crc32 = checks.rest(path, size, file.numbers())
    return file


def _groups(entries: list[Entry]):
    """Entries of about FILE_BYTES, or of a part of all in FILES."""
    group: list[Entry] = []
    size = 0
    most = max(FILE_BYTES, sum(entry.tensor.nbytes for entry in entries) // FILES)
    for entry in entries:
        if group and size + entry.tensor.nbytes > most:
            yield group
            group, size = [], 0
        group.append(entry)
        size += entry.tensor.nbytes
    if group:
        yield group


def _write(path: Path, entries: list[Entry]) -> dict[str, list[StoredPiece]]:
    pieces: dict[str, list[StoredPiece]] = {}
    with path.open("xb+", buffering=0) as raw:
        disk = Disk(raw)
        with h5py.File(disk, "w", libver=LIBVER) as file:
            for entry in entries:
                bounds = tuple((part.start, part.stop) for part in entry.shard.slices)
                shape = entry.shard.shape
                values = bits(entry.tensor).reshape(shape)
                dataset = file.create_dataset(
                    dataset_name(entry.name, bounds), shape, values.dtype, track_times=False, fill_time="never"
                )
                dataset.write_direct(values)
                start, sums = dataset.id.get_offset(), checks.sums(_bytes(values))
                pieces.setdefault(entry.name, []).append(StoredPiece(bounds, start, start + values.nbytes, sums))
        if disk.error:
            raise disk.error
    return pieces


def _sync(path: Path) -> int:
    """The file's size, once it is on disk."""
    sync(path)
    return path.stat().st_size


class Reader:
    """An open file of shards, of which bytes at places that a manifest tells are read.

    All methods raise Corrupt, naming the file, where it does not hold what it should.

    Attributes: `bytes`, how many were read.
    """

    def __init__(self, path: Path):
        self.path, self.bytes = path, 0
        self.file = checks.open_plain(path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def read(self, piece: StoredPiece, dtype: torch.dtype, part: tuple[slice, ...], out: torch.Tensor) -> None:
        """Fill `out` with `part` of a piece, counted from its corner."""
        self._read(piece, 0, piece.shape, dtype, part, out.detach())

    def _read(self, piece, place, shape, dtype, part, out):
        """The same of what begins at byte `place` of the piece and has this shape."""
        rows, *columns = part
        row = math.prod(shape[1:]) * dtype.itemsize
        whole = out.shape[1:] == shape[1:]
        if whole and out.is_cpu and out.is_contiguous() and out.dtype == dtype:
            self._fill(piece, place + rows.start * row, _bytes(bits(out)))
        elif columns and row > BLOCK:
            for number in range(rows.start, rows.stop):
                self._read(piece, place + number * row, shape[1:], dtype, columns, out[number - rows.start])
        else:
            step = ROWS // row
            for first in range(rows.start, rows.stop, step):
                buffer = torch.empty(min(step, rows.stop - first), *shape[1:], dtype=dtype)
                self._fill(piece, place + first * row, _bytes(bits(buffer)))
                out[first - rows.start :][: len(buffer)] = buffer[:, *columns]

    def check(self, piece: StoredPiece) -> None:
        """Read all of a piece, for its checksums alone."""
        for number in range(len(piece.crc32)):
            self._block(piece, number)

    def _fill(self, piece: StoredPiece, start: int, buffer: memoryview) -> None:
        """Bytes of a piece from `start` on; blocks that are needed in part are read whole, since checked whole."""
        stop = start + len(buffer)
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            low, high = number * BLOCK, min((number + 1) * BLOCK, piece.stop - piece.start)
            if start <= low and high <= stop:
                self._block(piece, number, buffer[low - start : high - start])
            else:
                first, last = max(low, start), min(high, stop)
                buffer[first - start : last - start] = self._block(piece, number)[first - low : last - low]

    def _block(self, piece: StoredPiece, number: int, buffer: memoryview | None = None) -> memoryview:
        """One block of a piece, in `buffer` or in new memory."""
        place = piece.start + number * BLOCK
        buffer = buffer if buffer is not None else memoryview(bytearray(min(BLOCK, piece.stop - place)))
        self.bytes += len(buffer)
        if checks.read(self.path, self.file.fileno(), place, buffer) != piece.crc32[number]:
            raise Corrupt(f"{self.path} is corrupt: bytes {place} to {place + len(buffer)} do not have their checksum")
        return buffer


def check_contents(path: Path, recorded: File) -> None:
    """Read all that the manifest says is there. Raises Corrupt."""
    with Reader(path) as reader:
        for pieces in recorded.pieces.values():
            for piece in pieces:
                reader.check(piece)


def _bytes(values: np.ndarray) -> memoryview:
    """Memory of a contiguous array."""
    return values.reshape(-1).view(np.uint8).data


def dataset_name(name: str, bounds: Bounds) -> str:
    """Parameter and slice, such as model/wte.weight[0:128,0:64]."""
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in bounds)}]"


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A host tensor's memory as what a file holds."""
    return tensor.contiguous().view(_UNKNOWN.get(tensor.dtype, tensor.dtype)).numpy()
