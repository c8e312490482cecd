"""Chunks of a checksummed dataset, read past HDF5: HDF5 reads and checks a whole chunk for every sample in it."""

from __future__ import annotations

import bisect
import os

import h5py
import numpy as np

TOGETHER = 8  # chunks read at once by a long read: 256 KiB, so that all that is made of them stays in the cache


# HDF5 tells in one go where all chunks lie from 1.12.3 and 1.14 on; asked one by one, it looks through all each time.
AVAILABLE = hasattr(h5py.h5d.DatasetID, "chunk_iter")


class Scratch:
    """Memory for reading chunks of `size` numbers of `dtype`; valid until the next read. It is made once, for all
    files: new pages cost more than what is done with them."""

    def __init__(self, size: int, dtype: np.dtype):
        self.stored = np.empty((TOGETHER, size * dtype.itemsize + 4), np.uint8)
        self.sums = _Sums(size * dtype.itemsize // 2)


class Chunks:
    """The numbers of a one-dimensional dataset in fixed chunks, of which each has a Fletcher checksum and nothing else
    done to it. A chunk is read whole and checked when it is first asked for; later only the part asked for is read.

    It keeps about a kilobyte for each of the few rows in which the chunks lie, a bit for each chunk, and no open file.

    Args:
        dataset: of an open file; not needed later.
        scratch: for chunks of this size and type.
        below: what all numbers must be below.

    Raises:
        OSError: for a dataset that is stored otherwise.
    """

    def __init__(self, dataset: h5py.Dataset, scratch: Scratch, below: int):
        (self.size,), self.dtype, self.below = dataset.chunks, dataset.dtype, below
        self._bytes = self.size * self.dtype.itemsize
        self._scratch = scratch
        places = np.full(-(-len(dataset) // self.size), -1, np.int64)

        def note(chunk):
            if chunk.size == self._bytes + 4 and chunk.filter_mask == 0:
                places[chunk.chunk_offset[0] // self.size] = chunk.byte_offset

        dataset.id.chunk_iter(note)
        if (places < 0).any():
            raise OSError("chunks are missing, or stored with other filters than a checksum")
        # rows of chunks that follow each other in the file: number and place of the first
        self._firsts = [0, *(1 + np.flatnonzero(np.diff(places) != self._bytes + 4)).tolist()]
        self._places = places[self._firsts].tolist()
        self._firsts.append(len(places))
        self._checked = 0  # one bit a chunk

    def read(self, file: int, start: int, out: np.ndarray) -> None:
        """Fill `out` with the numbers from `start` on; `file` is a descriptor of the dataset's file.

        Raises:
            OSError: when a chunk fails its checksum, holds too large a number, or cannot be read.
        """
        filled = 0
        while filled < len(out):
            chunk, inside = divmod(start + filled, self.size)
            count = min(len(out) - filled, self.size - inside)
            if count == self.size:
                whole = self._whole(file, chunk, (len(out) - filled) // self.size)
                count = whole.size
                out[filled : filled + count].reshape(whole.shape)[:] = whole
            elif self._checked >> chunk & 1:
                place = self._place(chunk)[0] + inside * self.dtype.itemsize
                part = os.pread(file, count * self.dtype.itemsize, place)
                if len(part) != count * self.dtype.itemsize:
                    raise OSError(f"the file ends within chunk {chunk}")
                out[filled : filled + count] = np.frombuffer(part, self.dtype)
            else:
                out[filled : filled + count] = self._whole(file, chunk, 1)[0, inside : inside + count]
            filled += count

    def will_need(self, file: int, start: int, count: int) -> None:
        """Have the system read these numbers in the background."""
        for chunk in range(start // self.size, (start + count - 1) // self.size + 1):
            os.posix_fadvise(file, self._place(chunk)[0], self._bytes + 4, os.POSIX_FADV_WILLNEED)

    def _place(self, chunk: int) -> tuple[int, int]:
        """Where a chunk lies in the file, and how many from it on follow each other there."""
        row = bisect.bisect_right(self._firsts, chunk) - 1
        return self._places[row] + (chunk - self._firsts[row]) * (self._bytes + 4), self._firsts[row + 1] - chunk

    def _whole(self, file: int, first: int, most: int) -> np.ndarray:
        """(chunks, size): chunk `first`, and up to `most` - 1 more that follow it in the file; until the next call."""
        place, follow = self._place(first)
        stored = self._scratch.stored[: min(most, follow, TOGETHER)]
        if os.preadv(file, [stored.data], place) != stored.nbytes:
            raise OSError(f"the file ends within chunk {first} or soon after it")
        numbers = stored[:, : self._bytes].view(self.dtype)
        new = ((1 << len(stored)) - 1) << first
        if self._checked & new != new:
            recorded = stored[:, self._bytes :].copy().view("<u4")[:, 0].tolist()
            for number, (found, wanted) in enumerate(
                zip(self._scratch.sums(stored[:, : self._bytes].view("<u2")), recorded)
            ):
                if found != wanted:
                    raise OSError(f"chunk {first + number} fails its checksum")
            if (largest := int(numbers.max())) >= self.below:
                raise OSError(f"it holds {largest}, and all must be below {self.below}")
            self._checked |= new
        return numbers


class _Sums:
    """HDF5's Fletcher checksums of chunks of `count` 16-bit words w: the sums of w[i] and of (count - i) w[i], of
    big-endian words modulo 65535, where 0 is written 65535 unless all is 0.

    With the words in rows of WIDTH both follow from the sums of rows and of columns. BLAS takes those, in floats that
    hold them exactly. Multiplying by 256 modulo 65535 swaps a word's bytes, so words may be little-endian.
    """

    WIDTH = 256

    def __init__(self, count: int):
        rows = -(-count // self.WIDTH)
        exact = np.float32 if max(rows, self.WIDTH) * 65535 < 1 << 24 else np.float64
        self._count, self._words = count, np.zeros((TOGETHER, rows, self.WIDTH), exact)
        self._of_row, self._of_column = np.ones(self.WIDTH, exact), np.ones(rows, exact)
        self._of_rows = np.stack([np.ones(rows), count - self.WIDTH * np.arange(rows, dtype=np.float64)], 1)
        self._of_columns = np.arange(self.WIDTH, dtype=np.float64)

    def __call__(self, chunks: np.ndarray) -> list[int]:
        """The checksums of (chunks, count) words."""
        words = self._words[: len(chunks)]
        words.reshape(len(chunks), -1)[:, : self._count] = chunks
        rows = (words.reshape(-1, self.WIDTH) @ self._of_row).reshape(len(chunks), -1)
        totals = rows.astype(np.float64) @ self._of_rows
        columns = (self._of_column @ words).astype(np.float64) @ self._of_columns
        return [
            _swapped(int(two - less)) << 16 | _swapped(int(one))
            for (one, two), less in zip(totals.tolist(), columns.tolist())
        ]


def _swapped(total: int) -> int:
    return (total * 256 - 1) % 65535 + 1 if total else 0
