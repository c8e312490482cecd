"""Read tokens from HDF5 shards: just the ranges asked for, each checked."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from pathlib import Path

import h5py
import numpy as np

from hpctrain.data import format
from hpctrain.data.chunks import AVAILABLE as CHUNKS_AVAILABLE
from hpctrain.data.chunks import Chunks
from hpctrain.data.tokenizers import tokenizer_from_description


class ShardedTokens:
    """The tokens of a packed corpus, as one long sequence.

    Args:
        path: the index written by `pack`.
        comm: an mpi4py communicator. Where h5py is built with MPI, the shards are opened on it with the `mpio` driver,
            which makes the construction collective; otherwise each process reads by itself.

    Attributes: `tokens` (how many), `vocabulary`, `end_of_document`, `tokenizer`, and `driver`: "chunks"
    (each chunk's checksum is checked when it is first read), or "mpio" or, with an older HDF5, "sec2" (at every read).

    Raises:
        ValueError: when the index or a shard is missing, unreadable, truncated, from another packing or fails its
            checksum; the message names the file.
    """

    def __init__(self, path: str | os.PathLike, comm=None):
        self.path = Path(path)
        alone = "chunks" if CHUNKS_AVAILABLE else "sec2"
        self.driver = "mpio" if comm is not None and h5py.get_config().mpi else alone
        self._open = {"driver": "mpio", "comm": comm} if self.driver == "mpio" else {}
        with self._file(self.path) as index, _reading(self.path):
            if index.attrs.get("format") != format.FORMAT:
                raise ValueError(f"{path} is not an index of packed tokens; make one with `hpctrain pack`")
            if (version := index.attrs["version"]) != format.VERSION:
                raise ValueError(f"{path} has format version {version}, not {format.VERSION}; pack again")
            self._packing = index.attrs["packing"]
            self.vocabulary = int(index.attrs["vocabulary"])
            self.end_of_document = int(index.attrs["end_of_document"])
            self.tokens = int(index.attrs["tokens"])
            rows = index["shards"][:]
            self.tokenizer = tokenizer_from_description(index["tokenizer"][:].tobytes().decode())
        self._paths = [self.path.parent / row["name"].decode() for row in rows]
        self._ends = list(itertools.accumulate(int(row["tokens"]) for row in rows))
        for shard, row in zip(self._paths, rows):
            self._check_size(shard, int(row["bytes"]))
        self._files: dict[int, h5py.File] = {}
        self._chunks: dict[int, Chunks] = {}
        if self.driver == "mpio":  # opening is collective: all ranks open all, now
            for number in range(len(self._paths)):
                self._shard(number)

    def read(self, start: int, count: int, out: np.ndarray | None = None) -> np.ndarray:
        """Tokens `start` to `start + count`, int64; in `out`, where that is given."""
        if not 0 <= start <= start + count <= self.tokens:
            raise IndexError(f"tokens {start} to {start + count} of {self.tokens}")
        out = np.empty(count, np.int64) if out is None else out
        filled = 0
        for number, at, part in self._parts(start, count):
            with _reading(self._paths[number]):
                if self.driver == "chunks":
                    self._chunked(number).read(at, out[filled : filled + part])
                else:
                    out[filled : filled + part] = self._shard(number)["tokens"][at : at + part]
            filled += part
        return out

    def will_need(self, start: int, count: int) -> None:
        """Have the system read tokens in the background, which are to be read soon."""
        if self.driver == "chunks":
            for number, at, part in self._parts(start, count):
                with _reading(self._paths[number]):
                    self._chunked(number).will_need(at, part)

    def digest(self, places: int = 16, count: int = 256) -> str:
        """SHA-256 of a few tokens from all over the corpus: tells whether it is the same."""
        sums = hashlib.sha256(str(self.tokens).encode())
        for start in np.linspace(0, max(0, self.tokens - count), places, dtype=np.int64).tolist():
            sums.update(self.read(start, min(count, self.tokens)).tobytes())
        return sums.hexdigest()

    def close(self) -> None:
        for file in (*self._files.values(), *self._chunks.values()):
            file.close()
        self._files.clear()
        self._chunks.clear()

    def _parts(self, start: int, count: int):
        """(shard, first token there, how many) for each shard that holds some of the tokens."""
        while count:
            number = bisect.bisect_right(self._ends, start)
            part = min(count, self._ends[number] - start)
            yield number, start - (self._ends[number - 1] if number else 0), part
            start, count = start + part, count - part

    def _chunked(self, number: int) -> Chunks:
        chunks = self._chunks.get(number)
        if chunks is None:
            chunks = self._chunks[number] = Chunks(self._paths[number], self._shard(number)["tokens"])
            self._files.pop(number).close()  # chunks have a file of their own; a process may open about 1000
        return chunks

    def _shard(self, number: int) -> h5py.File:
        file = self._files.get(number)
        if file is None:
            path = self._paths[number]
            file = self._files[number] = self._file(path)
            with _reading(path):
                if (file.attrs["packing"], file.attrs["number"]) != (self._packing, number):
                    raise ValueError(f"{path} belongs to another packing than its index {self.path}; pack again")
                held = len(file["tokens"])
            expected = self._ends[number] - (self._ends[number - 1] if number else 0)
            if held != expected:
                raise ValueError(f"{path} holds {held} tokens, its index {self.path} says {expected}; pack again")
        return file

    def _file(self, path: Path) -> h5py.File:
        if not path.is_file():
            raise ValueError(f"{path} does not exist; restore it, or pack the text again with `hpctrain pack`")
        try:
            # Chunks are read whole for their checksum; a cache of a few MiB keeps those of sequential reads.
            return h5py.File(path, "r", rdcc_nbytes=4 << 20, **self._open)
        except OSError as error:
            said = "cannot be read" if error.errno else "cannot be opened as HDF5, it may be truncated or corrupt"
            raise ValueError(f"{path} {said}: {error}") from error

    def _check_size(self, path: Path, expected: int) -> None:
        if not path.is_file():
            raise ValueError(f"shard {path} of {self.path} is missing; restore it, or pack the text again")
        size = path.stat().st_size
        if size != expected:
            raise ValueError(f"shard {path} has {size} bytes instead of {expected}: it is truncated or was changed")


class _reading:
    """Turns h5py's errors into one that names the file."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if isinstance(error, (OSError, KeyError, RuntimeError)):
            # the system's errors, such as too many open files, have a number
            said = "cannot be read" if getattr(error, "errno", None) else "is corrupt"
            raise ValueError(f"{self.path} {said}: {error}") from error
