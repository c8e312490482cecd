"""Chunks of a checksummed dataset, read past HDF5: HDF5 reads and checks a whole chunk for every sample in it."""

from __future__ import annotations

import os

import h5py
import numpy as np

TOGETHER = 8  # chunks read at once by a long read: 256 KiB, so that all that is made of them stays in the cache


# HDF5 tells in one go where all chunks lie from 1.12.3 and 1.14 on; asked one by one, it looks through all each time.
AVAILABLE = hasattr(h5py.h5d.DatasetID, "chunk_iter")


class Chunks:
    """The numbers of a one-dimensional dataset in fixed chunks, of which each has a Fletcher checksum and nothing else
    done to it. A chunk is read whole and checked when it is first asked for; later only the part asked for is read.

    Raises:
        OSError: for a dataset that is stored otherwise.
    """

    def __init__(self, path: str | os.PathLike, dataset: h5py.Dataset):
        (self.size,), self.dtype = dataset.chunks, dataset.dtype
        self._bytes = self.size * self.dtype.itemsize
        self._places = np.full(-(-len(dataset) // self.size), -1, np.int64)

        def note(chunk):
            if chunk.size == self._bytes + 4 and chunk.filter_mask == 0:
                self._places[chunk.chunk_offset[0] // self.size] = chunk.byte_offset

        dataset.id.chunk_iter(note)
        if (self._places < 0).any():
            raise OSError("chunks are missing, or stored with other filters than a checksum")
        self._checked = np.zeros(len(self._places), bool)
        # room is made once: new pages cost more than what is done with them
        self._room = np.empty((TOGETHER, self._bytes + 4), np.uint8)
        self._sums = _Sums(self._bytes // 2)
        self._file = os.open(path, os.O_RDONLY)

    def read(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with the numbers from `start` on.

        Raises:
            OSError: when a chunk fails its checksum, or cannot be read.
        """
        filled = 0
        while filled < len(out):
            chunk, inside = divmod(start + filled, self.size)
            count = min(len(out) - filled, self.size - inside)
            if count == self.size:
                whole = self._whole(chunk, (len(out) - filled) // self.size)
                count = whole.size
                out[filled : filled + count].reshape(whole.shape)[:] = whole
            elif self._checked[chunk]:
                place = int(self._places[chunk]) + inside * self.dtype.itemsize
                part = os.pread(self._file, count * self.dtype.itemsize, place)
                if len(part) != count * self.dtype.itemsize:
                    raise OSError(f"the file ends within chunk {chunk}")
                out[filled : filled + count] = np.frombuffer(part, self.dtype)
            else:
                out[filled : filled + count] = self._whole(chunk, 1)[0, inside : inside + count]
            filled += count

    def will_need(self, start: int, count: int) -> None:
        """Have the system read these numbers in the background."""
        for chunk in range(start // self.size, (start + count - 1) // self.size + 1):
            os.posix_fadvise(self._file, int(self._places[chunk]), self._bytes + 4, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        os.close(self._file)

    def _whole(self, first: int, most: int) -> np.ndarray:
        """(chunks, size): chunk `first`, and up to `most` - 1 more that follow it in the file; until the next call."""
        step, place = self._bytes + 4, int(self._places[first])
        places = self._places[first : first + min(most, TOGETHER)]
        strays = np.flatnonzero(places != place + step * np.arange(len(places)))
        stored = self._room[: strays[0] if len(strays) else len(places)]
        if os.preadv(self._file, [stored], place) != stored.nbytes:
            raise OSError(f"the file ends within chunk {first} or soon after it")
        content = stored[:, : self._bytes]
        if not self._checked[first : first + len(stored)].all():
            told = stored[:, self._bytes :].copy().view("<u4")[:, 0].tolist()
            for number, (found, wanted) in enumerate(zip(self._sums(content.view("<u2")), told)):
                if found != wanted:
                    raise OSError(f"chunk {first + number} fails its checksum")
            self._checked[first : first + len(stored)] = True
        return content.view(self.dtype)


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
