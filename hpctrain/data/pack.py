"""Pack text into HDF5 token shards. Nothing looks complete before it is."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from hpctrain.data import format
from hpctrain.data.corpus import read_text, text_files
from hpctrain.data.tokenizers import ByteTokenizer

SHARD_TOKENS = 2**28


def pack(
    sources: list[str],
    output: str | os.PathLike,
    tokenizer=None,
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int, int], None] = lambda done, total: None,
    replace: bool = True,
) -> dict[str, int]:
    """Write the text of `sources` as token shards, with their index at `output`.

    Args:
        sources: text files (UTF-8), directories, or "python-stdlib".
        output: the index, DATA.h5; shards are written beside it. An older packing there stays valid until this one
            is complete, and is then removed.
        tokenizer: of `data.tokenizers`; bytes by default.
        shard_tokens: tokens of a shard at most.
        progress: called with the bytes read so far and in all.
        replace: whether to take the place of a packing that is there when this one is complete.

    Returns:
        {"files", "documents", "tokens", "shards"}.

    Raises:
        ValueError: for a missing source, one without text, or one that is not UTF-8.
        FileExistsError: where another packing was complete first and is not to be replaced. This one is removed.
    """
    tokenizer = tokenizer or ByteTokenizer()
    output = Path(output)
    if output.suffix != ".h5":
        raise ValueError(f"the output must end in .h5, got {output}")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens must be at least 1, got {shard_tokens}")
    files = text_files(sources)
    output.parent.mkdir(parents=True, exist_ok=True)
    older = _shards_of(output)
    total, done = sum(file.stat().st_size for file in files), 0
    with _Writer(output, tokenizer, shard_tokens) as writer:
        for file in files:
            writer.start_document()
            for text in read_text(file):
                writer.append(tokenizer.encode(text))
            writer.append(np.array([tokenizer.end_of_document]))
            done += file.stat().st_size
            progress(done, total)
        if not replace and output.exists():
            raise FileExistsError(f"{output} exists")
        counts = writer.commit()
    for shard in older:
        shard.unlink(missing_ok=True)
    return {"files": len(files), **counts}


class _Writer:
    """Appends tokens to a row of shards; files are called *.part until they are whole."""

    def __init__(self, output: Path, tokenizer, shard_tokens: int):
        self.output, self.tokenizer, self.limit = output, tokenizer, shard_tokens
        self.packing = secrets.token_hex(4)
        self.dtype = np.dtype("<u2") if tokenizer.vocabulary <= 2**16 else np.dtype("<u4")
        self.rows = []  # of the index
        self.tokens = self.documents = 0
        self.file = None
        self.buffer = np.empty(64 * format.CHUNK, self.dtype)
        self.filled = 0

    def __enter__(self):
        return self

    def __exit__(self, failed, *_):
        if failed:
            if self.file:
                self.file.close()
            for path in self.output.parent.glob(f"{self.output.stem}-{self.packing}-*"):
                path.unlink()

    def start_document(self):
        self._shard()
        self.starts.append(self.length + self.filled)
        self.documents += 1

    def append(self, ids: np.ndarray):
        while len(ids):
            self._shard()
            room = min(len(self.buffer) - self.filled, self.limit - self.length - self.filled)
            part, ids = ids[:room], ids[room:]
            self.buffer[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            if self.filled == len(self.buffer) or self.length + self.filled == self.limit:
                self._flush()
                if self.length == self.limit:
                    self._close()

    def commit(self) -> dict[str, int]:
        if self.file:
            self._close()
        part = self.output.with_name(f"{self.output.stem}-{self.packing}-index.h5.part")  # another may be packing too
        with h5py.File(part, "w", libver=format.LIBVER) as index:
            index.attrs.update(
                format=format.FORMAT,
                version=format.VERSION,
                packing=self.packing,
                vocabulary=self.tokenizer.vocabulary,
                end_of_document=self.tokenizer.end_of_document,
                tokens=self.tokens,
                documents=self.documents,
            )
            text = np.frombuffer(self.tokenizer.description.encode(), np.uint8)  # an attribute holds 64 KiB at most
            index.create_dataset("tokenizer", data=text, chunks=text.shape, fletcher32=True)
            rows = np.array(self.rows, format.INDEX_ROW)
            index.create_dataset("shards", data=rows, chunks=rows.shape, fletcher32=True)
        _publish(part, self.output)
        return {"documents": self.documents, "tokens": self.tokens, "shards": len(self.rows)}

    def _shard(self):
        """Open the next shard unless one is open."""
        if self.file:
            return
        self.name = f"{self.output.stem}-{self.packing}-{len(self.rows):05d}.h5"
        self.file = h5py.File(self._part(), "w", libver=format.LIBVER)
        self.file.attrs.update(packing=self.packing, number=len(self.rows))
        self.data = self.file.create_dataset(
            "tokens", (0,), self.dtype, maxshape=(None,), chunks=(format.CHUNK,), fletcher32=True
        )
        self.length, self.starts = 0, []

    def _flush(self):
        self.data.resize((self.length + self.filled,))
        self.data[self.length :] = self.buffer[: self.filled]
        self.length += self.filled
        self.filled = 0

    def _close(self):
        self._flush()
        starts = np.array(self.starts, "<i8")
        chunks = (max(1, min(len(starts), format.CHUNK)),)
        self.file.create_dataset("documents", data=starts, maxshape=(None,), chunks=chunks, fletcher32=True)
        self.file.close()
        self.file = None
        self.tokens += self.length
        final = self.output.parent / self.name
        _publish(self._part(), final)
        self.rows.append((self.name.encode(), self.length, final.stat().st_size))

    def _part(self) -> Path:
        return self.output.parent / (self.name + ".part")


def _publish(part: Path, final: Path) -> None:
    """Rename a file that is whole to its final name, and make both survive a power cut."""
    for path in (part, part.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    part.replace(final)


def _shards_of(index: Path) -> list[Path]:
    """Shards of the packing that an index describes; none where it cannot be read."""
    with contextlib.suppress(OSError, KeyError), h5py.File(index) as file:
        return [index.parent / row["name"].decode() for row in file["shards"][:]]
    return []
