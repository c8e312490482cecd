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
        # Of 16-bit words float64 holds these sums exactly, and BLAS takes them. Room is made once: new pages cost more.
        words = self._bytes // 2
        self._weights = np.stack([np.ones(words), np.arange(words, 0, -1.0)])
        self._words = np.empty(words)
        self._room = np.empty((TOGETHER, self._bytes + 4), np.uint8)
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
        for chunk in np.flatnonzero(~self._checked[first : first + len(stored)]).tolist():
            if self._fletcher32(content[chunk]) != int.from_bytes(stored[chunk, self._bytes :].tobytes(), "little"):
                raise OSError(f"chunk {first + chunk} fails its checksum")
            self._checked[first + chunk] = True
        return content.view(self.dtype)

    def _fletcher32(self, content: np.ndarray) -> int:
        """HDF5's checksum of a chunk: sums of big-endian 16-bit words modulo 65535, where 0 is written 65535 unless all
        is 0. Multiplying by 256 modulo 65535 swaps a word's bytes, so the sums may be taken of little-endian words."""
        np.copyto(self._words, content.view("<u2"))
        one, two = (
            (int(total) * 256 - 1) % 65535 + 1 if total else 0 for total in (self._weights @ self._words).tolist()
        )
        return two << 16 | one
