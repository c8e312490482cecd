"""Read tokens from HDF5 shards: just the ranges asked for, each checked."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from hpctrain import files
from hpctrain.data import format, hdf5
from hpctrain.data.chunks import AVAILABLE as CHUNKS_AVAILABLE
from hpctrain.data.chunks import Chunks, Scratch
from hpctrain.data.hdf5 import reading
from hpctrain.data.index import Index, read_index
from hpctrain.data.tokenizers import Tokenizer, tokenizer_from_description

if TYPE_CHECKING:
    from mpi4py import MPI

OPEN = 32  # shards that a process has open at a time; a system may allow it 1,024 files of all kinds


class ShardedTokens:
    """The tokens of a packed corpus, as one long sequence.

    Args:
        path: the index written by `pack`.
        comm: an mpi4py communicator of all that read it, which makes the construction collective: rank 0 reads the
            index for all, and each rank looks after a part of the shards. Shards are opened by each rank alone, when it
            first reads from them; with the `mpio` driver where h5py is built with MPI.

    Attributes: `tokens` (how many), `vocabulary`, `end_of_document`, `masked` (whether some tokens count in no loss;
    these are read with the vocabulary added), `tokenizer_digest`, and
    `driver`: "chunks" (each chunk's checksum is
    checked when it is first read), or "mpio" or, with an older HDF5, "sec2" (at every read).

    Raises:
        ValueError: when the index or a shard is missing, unreadable, truncated, from another packing, fails its
            checksum or holds what it should not; the message names the file. At construction, on all ranks.
    """

    def __init__(self, path: str | os.PathLike, comm: MPI.Intracomm | None = None):
        self.path = Path(path)
        rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
        shared: tuple[Index, str] | None = None
        with _together(comm):
            if rank == 0:
                index = self._read_index()
                # the tokenizer may be large and is seldom asked for
                shared = dataclasses.replace(index, tokenizer=""), _digest(index)
        if comm is not None:
            shared = comm.bcast(shared)
        assert shared is not None
        index, digest = shared
        self._path = functools.cache(lambda number: self.path.parent / index.name(number))
        with _together(comm):
            for number in range(rank, len(index.tokens), ranks):
                self._check_size(index, number)
        self._index = index
        self.vocabulary, self.end_of_document, self.masked = index.vocabulary, index.end_of_document, index.masked
        self.tokenizer_digest = digest
        self._ends = np.cumsum(index.tokens).tolist()
        self.tokens = self._ends[-1]
        alone = "chunks" if CHUNKS_AVAILABLE else "sec2"
        self.driver = "mpio" if comm is not None and h5py.get_config().mpi else alone
        self._chunks: dict[int, Chunks] = {}
        self._files: _Recent = (
            _Recent(self._descriptor, os.close) if self.driver == "chunks" else _Recent(self._shard, h5py.File.close)
        )

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """That the text was packed with."""
        index = self._read_index()
        if _digest(index) != self.tokenizer_digest:
            raise ValueError(f"{self.path} was packed anew, by another tokenizer, since it was first read")
        return tokenizer_from_description(index.tokenizer)

    def read(self, start: int, count: int, out: np.ndarray | None = None) -> np.ndarray:
        """Tokens `start` to `start + count`, int64; in `out`, where that is given."""
        if not 0 <= start <= start + count <= self.tokens:
            raise IndexError(f"tokens {start} to {start + count} of {self.tokens}")
        out = np.empty(count, np.int64) if out is None else out
        filled = 0
        for number, at, part in self._parts(start, count):
            into = out[filled : filled + part]
            # errors of opening a shard name it already
            chunks, file = self._chunked(number) if self.driver == "chunks" else None, self._files[number]
            with reading(self._path(number)):
                if chunks:
                    chunks.read(file, at, into)
                else:
                    into[:] = file["tokens"][at : at + part]
                    if (largest := int(into.max())) >= self._index.stored:
                        raise OSError(f"it holds {largest}, and all must be below {self._index.stored}")
            filled += part
        return out

    def will_need(self, start: int, count: int) -> None:
        """Have the system read tokens in the background, which are to be read soon."""
        if self.driver == "chunks":
            for number, at, part in self._parts(start, count):
                chunks, file = self._chunked(number), self._files[number]
                with reading(self._path(number)):
                    chunks.will_need(file, at, part)

    def digest(self, comm: MPI.Intracomm | None = None, places: int = 16, count: int = 256) -> str:
        """SHA-256 of a few tokens from all over the corpus: tells whether it is the same. Collective over `comm`, whose
        ranks read a part each, where that is given."""
        starts = np.linspace(0, max(0, self.tokens - count), places, dtype=np.int64).tolist()
        rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
        with _together(comm):
            mine = {place: self.read(starts[place], min(count, self.tokens)) for place in range(rank, places, ranks)}
        if comm is not None:
            parts = comm.gather(mine) or []
            mine = {place: tokens for part in parts for place, tokens in part.items()}
        sums = hashlib.sha256(str(self.tokens).encode())
        for _, tokens in sorted(mine.items()):
            sums.update(tokens.tobytes())
        return sums.hexdigest() if comm is None else comm.bcast(sums.hexdigest())

    def close(self) -> None:
        self._files.close()

    def _parts(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(shard, first token there, how many) for each shard that holds some of the tokens."""
        while count:
            number = bisect.bisect_right(self._ends, start)
            part = min(count, self._ends[number] - start)
            yield number, start - (self._ends[number - 1] if number else 0), part
            start, count = start + part, count - part

    def _read_index(self) -> Index:
        index = read_index(self.path)
        tokenizer = tokenizer_from_description(index.tokenizer, f"the tokenizer in {self.path}")
        found = tokenizer.vocabulary, tokenizer.end_of_document
        if found != (index.vocabulary, index.end_of_document):
            raise ValueError(
                f"{self.path} tells of ids below {index.vocabulary} and an end of documents {index.end_of_document}, "
                f"its tokenizer has {found[0]} and {found[1]}; pack again"
            )
        return index

    @functools.cached_property
    def _scratch(self) -> Scratch:
        return Scratch(format.CHUNK, self._index.dtype)

    def _chunked(self, number: int) -> Chunks:
        chunks = self._chunks.get(number)
        if chunks is None:
            with self._shard(number) as file, reading(self._path(number)):
                chunks = self._chunks[number] = Chunks(file["tokens"], self._scratch, self._index.stored)
        return chunks

    def _shard(self, number: int) -> h5py.File:
        """Open a shard by HDF5, and check that it is the one that the index tells of."""
        path, index = self._path(number), self._index
        self._check_size(index, number)
        how: dict[str, Any] = {}
        if self.driver == "mpio":
            from mpi4py import MPI

            how = {"driver": "mpio", "comm": MPI.COMM_SELF}  # ranks read different shards at different times
        # Chunks are read whole for their checksum; a cache of a few MiB keeps those of sequential reads.
        file = hdf5.opened(path, rdcc_nbytes=4 << 20, **how)
        try:
            with reading(path):
                found = hdf5.attribute(file, "packing", str), hdf5.attribute(file, "number", int)
            if found != (index.packing, number):
                raise ValueError(f"{path} belongs to another packing than its index {self.path}; pack again")
            with reading(path):
                tokens = hdf5.dataset(file, "tokens", index.dtype, int(index.bytes[number]))
                if tokens.chunks != (format.CHUNK,):
                    raise OSError(f"its chunks are of {tokens.chunks[0]} tokens, not {format.CHUNK}")
            if len(tokens) != index.tokens[number]:
                raise ValueError(
                    f"{path} holds {len(tokens)} tokens, its index {self.path} says {index.tokens[number]}; pack again"
                )
        except BaseException:
            file.close()
            raise
        return file

    def _descriptor(self, number: int) -> int:
        with reading(self._path(number)):
            return os.open(self._path(number), os.O_RDONLY)

    def _check_size(self, index: Index, number: int) -> None:
        path, expected = self._path(number), int(index.bytes[number])
        with reading(path):
            there = files.regular(path)
        if not there:
            raise ValueError(f"shard {path} of {self.path} is missing; restore it, or pack the text again")
        if there.st_size != expected:
            raise ValueError(
                f"shard {path} has {there.st_size} bytes instead of {expected}: it is truncated or was changed"
            )


class _Recent:
    """The shards used last, by number; others are opened when asked for, in their place."""

    def __init__(self, open: Callable, close: Callable):
        self._open, self._close = open, close
        self._files: OrderedDict[int, Any] = OrderedDict()

    def __getitem__(self, number: int) -> Any:
        if number in self._files:
            self._files.move_to_end(number)
        else:
            while len(self._files) >= OPEN:
                self._close(self._files.popitem(last=False)[1])
            self._files[number] = self._open(number)
        return self._files[number]

    def close(self) -> None:
        while self._files:
            self._close(self._files.popitem()[1])


def _digest(index: Index) -> str:
    """Of its tokenizer's description."""
    return hashlib.sha256(index.tokenizer.encode()).hexdigest()


def _together(comm: MPI.Intracomm | None) -> contextlib.AbstractContextManager[None]:
    if comm is None:
        return contextlib.nullcontext()
    from hpctrain.comm.agree import together  # packing and planning do without MPI

    return together(comm)
