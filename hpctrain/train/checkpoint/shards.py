"""One file of shards: an HDF5 dataset for each rectangle, in chunks with a checksum each."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import torch

from hpctrain.state import Entry
from hpctrain.train.checkpoint import checks
from hpctrain.train.checkpoint.manifest import DTYPES, Corrupt, File, file_name

CHUNK = 256 * 1024  # bytes: a chunk stays in the processor's cache between its copy, its checksum and its write
LIBVER = ("v110", "v110")  # metadata have checksums as well
FILE_BYTES = 64 << 20  # about the size at which a rank begins another file, so that it can be hashed beside the first
BESIDE = 4  # threads


def write(folder: Path, rank: int, entries: Iterable[Entry]) -> list[File]:
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
    chunks = checks.chunks(path, [dataset_name(name, bounds) for name, parts in pieces.items() for bounds in parts])
    return File(path.name, size, sha256, checks.crc32(path, size, chunks), chunks, pieces)


def _groups(entries):
    """Entries of about FILE_BYTES; at least one group, which may be empty."""
    group, size = [], 0
    for entry in entries:
        if group and size + entry.tensor.nbytes > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(entry)
        size += entry.tensor.nbytes
    yield group


def _write(path: Path, entries: list[Entry]) -> dict[str, list]:
    pieces: dict[str, list] = {}
    with path.open("xb+", buffering=0) as raw:
        disk = _Disk(raw)
        with h5py.File(disk, "w", libver=LIBVER) as file:
            for entry in entries:
                bounds = tuple((part.start, part.stop) for part in entry.shard.slices)
                shape = entry.shard.shape
                values = bits(entry.tensor).reshape(shape)
                dataset = file.create_dataset(
                    dataset_name(entry.name, bounds), shape, values.dtype, chunks=chunks(shape, values.itemsize),
                    fletcher32=True, track_times=False, fill_time="never",
                )  # fmt: skip
                dataset.write_direct(values)
                pieces.setdefault(entry.name, []).append(bounds)
        if disk.error:
            raise disk.error
    return pieces


def _sync(path: Path) -> int:
    """The file's size, once it is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


class _Disk:
    """A file for HDF5, which is never told of an error in writing it: where a file cannot be closed since the disk is
    full, HDF5 goes on with objects that are gone, and crashes.

    Attributes: `error`, the first one, or None.
    """

    def __init__(self, raw):
        self.raw, self.error, self.place, self.end = raw, None, 0, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.end}[whence]
        return self.place

    def tell(self) -> int:
        return self.place

    def write(self, data) -> int:
        data, done = memoryview(data).cast("B"), 0
        try:
            while not self.error and done < len(data):
                done += os.pwrite(self.raw.fileno(), data[done:], self.place + done)
        except OSError as error:
            self.error = error
        self.place += len(data)
        self.end = max(self.end, self.place)
        return len(data)

    def read(self, size: int) -> bytes:
        found = os.pread(self.raw.fileno(), size, self.place)
        self.place += size
        return found.ljust(size, b"\0")

    def truncate(self, size: int) -> int:
        try:
            self.raw.truncate(size)
        except OSError as error:
            self.error = self.error or error
        self.end = size
        return size

    def flush(self) -> None:
        """Nothing is kept back."""


def check_contents(path: Path, told: File, tensors: dict) -> None:
    """Read all that the manifest says is there through HDF5's own checksums. Raises Corrupt."""
    with Reader(path) as reader:
        for name, pieces in told.pieces.items():
            for bounds in pieces:
                shape = [stop - start for start, stop in bounds]
                room = torch.empty(shape, dtype=DTYPES[tensors[name][0]])
                reader.read(name, bounds, room.dtype, tuple(map(slice, shape)), room)


class Reader:
    """An open file of shards. Nothing but plain datasets of the expected shape and type is read.

    Raises:
        Corrupt: naming the file, when it cannot be opened or does not hold what it should.
    """

    def __init__(self, path: Path):
        self.path = path
        checks.size(path)
        try:
            # a cache that holds the chunks of one row of them, as each is decoded whole
            self.file = h5py.File(path, "r", rdcc_nbytes=16 << 20)
        except OSError as error:
            raise Corrupt(f"{path} cannot be opened as HDF5, it may be truncated or corrupt: {error}") from error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def read(self, name: str, bounds, dtype: torch.dtype, part: tuple[slice, ...], out: torch.Tensor) -> None:
        """Fill `out` with `part` of the rectangle `bounds` of a tensor, counted from the rectangle's corner."""
        shape, wanted = tuple(stop - start for start, stop in bounds), storage(dtype)
        where = dataset_name(name, bounds)
        try:
            # a link to another file, or a dataset whose data lie in one, could show anything
            link = self.file.get(where, getlink=True)
            dataset = self.file[where] if isinstance(link, h5py.HardLink) else None
            plain = isinstance(dataset, h5py.Dataset) and not dataset.is_virtual and not dataset.external
            if not plain or dataset.shape != shape or dataset.dtype != wanted or not dataset.fletcher32:
                raise Corrupt(f"{self.path} does not hold {where} of shape {shape} as {dtype} with checksums")
            count = math.prod(-(-size // chunk) for size, chunk in zip(shape, dataset.chunks))
            if dataset.id.get_num_chunks() != count:  # HDF5 would give zeros
                raise Corrupt(f"{self.path} lacks parts of {where}")
            room = out.detach()
            if not (room.is_cpu and room.is_contiguous() and room.dtype == dtype):
                room = torch.empty(out.shape, dtype=dtype)
            dataset.read_direct(bits(room), part)
        except (OSError, KeyError, RuntimeError) as error:
            raise Corrupt(f"{self.path} is corrupt at {where}: {error}") from error
        if room.data_ptr() != out.data_ptr():
            out.copy_(room)


def dataset_name(name: str, bounds) -> str:
    """Parameter and slice, such as model/wte.weight[0:128,0:64]."""
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in bounds)}]"


def chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Rows of all dims, as many as CHUNK bytes hold.

    >>> chunks((1000, 256), 4), chunks((3, 1 << 20), 4), chunks((5,), 8)
    ((256, 256), (1, 65536), (5,))
    """
    room = CHUNK // itemsize
    out = []
    for size in reversed(shape):
        held = max(1, min(size, room))
        out.insert(0, held)
        room //= held
    return tuple(out)


def storage(dtype: torch.dtype) -> np.dtype:
    """What a file holds for a torch dtype: the same bits, little-endian."""
    other = {torch.bfloat16: "<u2", torch.bool: "|u1"}
    return np.dtype(other.get(dtype) or torch.empty((), dtype=dtype).numpy().dtype.newbyteorder("<"))


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A host tensor's memory as what a file holds."""
    other = {torch.bfloat16: torch.uint16, torch.bool: torch.uint8}
    return tensor.contiguous().view(other.get(tensor.dtype, tensor.dtype)).numpy()
