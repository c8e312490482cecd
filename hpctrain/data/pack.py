"""Pack text into HDF5 token shards. Nothing looks complete before it is."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import h5py
import numpy as np

from hpctrain import files
from hpctrain.data import format
from hpctrain.data.corpus import fingerprint, suffix, text_files
from hpctrain.data.documents import RECORDS, Fields, Piece, Skip, documents
from hpctrain.data.encoding import encoded
from hpctrain.data.index import Index, read_index, shard_name, token_dtype, write_index
from hpctrain.data.tokenizers import ByteTokenizer, Tokenizer

SHARD_TOKENS = 2**28
LARGE = 16 << 20  # bytes, below which other processes would take longer to start than to encode


def pack(
    sources: list[str],
    output: str | os.PathLike,
    tokenizer: Tokenizer | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int, int], None] = lambda done, total: None,
    replace: bool = True,
    *,
    fields: Fields | None = None,
    processes: int = 1,
    validation: float = 0.0,
    validation_sources: Sequence[str] = (),
    skip: Skip = lambda place, why: None,
) -> dict[str, int]:
    """Write the text of `sources` as token shards, with their index at `output`.

    Args:
        sources: files (text in UTF-8, JSON Lines, Parquet; plain, or compressed as .gz or .zst), directories, or
            "python-stdlib".
        output: the index, DATA.h5; shards are written beside it. An older packing there stays valid until this one
            is complete, and is then removed.
        tokenizer: of `data.tokenizers`; bytes by default.
        shard_tokens: tokens of a shard at most.
        progress: called before each piece of text, and at the end, with the bytes of the files that are finished and of
            all files; an exception it raises ends the packing.
        replace: whether to take the place of a packing that is there when this one is complete.
        fields: of JSON Lines (.jsonl, .ndjson, .json) and Parquet. Without them a JSON Lines file is one text.
        processes: that encode; 0: one a core for more than LARGE bytes, but one alone where tokens are bytes. What is
            written does not depend on it.
        validation: part of the documents, evenly spread, that is packed apart, as `validation_output(output)`.
        validation_sources: files and directories that are packed there instead.
        skip: called for each file and record that is not packed, with the reason.

    Returns:
        {"files", "documents", "tokens", "shards"}, and where documents are packed apart "validation documents" and
        "validation tokens".

    Raises:
        ValueError: for a missing source, one without text, or one that cannot be read as its name says; for `fields`
            where no source is of JSON Lines or Parquet.
        FileExistsError: where another packing was complete first and is not to be replaced. This one is removed.
    """
    tokenizer, fields = tokenizer or ByteTokenizer(), fields or Fields()
    output = checked_output(output)
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens must be at least 1, got {shard_tokens}")
    if processes < 0:
        raise ValueError(f"processes must be at least 1, or 0 for one a core, got {processes}")
    if not 0 <= validation < 1 or validation and validation_sources:
        raise ValueError(f"a part of the documents for validation must be below 1, without others, got {validation}")
    texts, apart = text_files(sources, skip), text_files(validation_sources, skip) if validation_sources else []
    if fields.text and not any(suffix(path) in RECORDS for path in texts + apart):
        raise ValueError(
            f"fields ({', '.join(filter(None, (fields.text, fields.prompt)))}) are read from JSON Lines and Parquet "
            f"files, but no file of {', '.join([*sources, *validation_sources])} ends in {', '.join(sorted(RECORDS))}; "
            "rename the file after what it holds, or give no fields"
        )
    _make_folder(output.parent)
    outputs = [output, validation_output(output)] if validation or apart else [output]
    older = [shard for each in outputs for shard in _shards_of(each)]
    total = _size(texts + apart)
    if not processes:  # bytes take longer to be sent than to be encoded
        several = total > LARGE and not isinstance(tokenizer, ByteTokenizer)
        processes = len(os.sched_getaffinity(0)) if several else 1
    how = f"{fields}{validation}{len(apart)}" if fields != Fields() or validation or apart else ""
    sources_are = fingerprint(texts + apart, tokenizer, how)
    with contextlib.ExitStack() as stack:
        begun = [_Writer(each, tokenizer, shard_tokens, sources_are, bool(fields.prompt)) for each in outputs]
        writers = [stack.enter_context(writer) for writer in begun]
        done = 0
        named = {Path(source) for source in (*sources, *validation_sources)}
        for paths, chosen in ((texts, _spread(writers, validation)), (apart, itertools.repeat(writers[-1]))):
            _write(encoded(_pieces(paths, named, fields, skip, progress, done, total), tokenizer, processes), chosen)
            done += _size(paths)
        if not replace and any(files.status(each) for each in outputs):
            raise FileExistsError(f"{output} exists")
        *of_validation, counts = [writer.commit(replace) for writer in writers[::-1]]  # the training data last
    for shard in older:  # the new index is on disk by now
        shard.unlink(missing_ok=True)
    others = {f"validation {what}": of_validation[0][what] for what in ("documents", "tokens")} if of_validation else {}
    return {"files": len(texts), **counts, **others}


def checked_output(output: str | os.PathLike) -> Path:
    """Raises ValueError where its name is not one of HDF5."""
    if Path(output).suffix != ".h5":
        raise ValueError(f"the output must end in .h5, got {str(output)!r}")
    return Path(output)


def validation_output(output: Path) -> Path:
    """Where the documents for validation are packed."""
    return output.with_name(f"{output.stem}-validation.h5")


def _size(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _pieces(paths, named, fields, skip, progress, done, total) -> Iterator[Piece]:
    for path in paths:
        for piece in documents(path, fields, skip, path in named):
            progress(done, total)
            yield piece
        done += _size([path])
    progress(done, total)


def _spread(writers: list[_Writer], part: float) -> Iterator[_Writer]:
    """The writer of each document: of any n documents that follow each other n × part, rounded, are for validation."""
    for number in itertools.count():
        yield writers[-1 if int((number + 1) * part) > int(number * part) else 0]


def _write(encoded: Iterator[tuple[Piece, np.ndarray]], chosen: Iterator[_Writer]) -> None:
    """Each document by the writer that is chosen for it."""
    for piece, ids in encoded:
        if piece.begins:
            writer = next(chosen)
            writer.start_document()
        writer.append(ids, piece.counts)
        if piece.ends:
            writer.append(np.array([writer.tokenizer.end_of_document]))


class _Writer:
    """Appends tokens to a row of shards; files are called *.part until they are whole."""

    def __init__(self, output: Path, tokenizer: Tokenizer, shard_tokens: int, sources: str, masked: bool = False):
        if not 0 <= tokenizer.end_of_document < tokenizer.vocabulary <= 2**32 >> masked:
            raise ValueError(
                f"the tokenizer's vocabulary must be above its end_of_document = {tokenizer.end_of_document}, and at "
                f"most 2^{32 - masked}, got {tokenizer.vocabulary}"
            )
        self.masked = masked
        self.output, self.tokenizer, self.limit, self.sources = output, tokenizer, shard_tokens, sources
        self.packing = secrets.token_hex(4)
        self.dtype = token_dtype(tokenizer.vocabulary * (1 + masked))
        self.shards: list[tuple[int, int]] = []  # tokens and bytes of each
        self.documents = 0
        self.written: list[Path] = []  # by all their names
        self.file: _NewFile | None = None
        self.buffer = np.empty(64 * format.CHUNK, self.dtype)
        self.filled = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed:
            if self.file:
                self.file.close()
            for path in self.written:
                with contextlib.suppress(OSError):  # what it failed of is to be told
                    path.unlink(missing_ok=True)

    def start_document(self) -> None:
        self._shard()
        self.starts.append(self.length + self.filled)
        self.documents += 1

    def append(self, ids: np.ndarray, counts: bool = True) -> None:
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.tokenizer.vocabulary:
            raise ValueError(
                f"the tokenizer made the ids {ids.min()} to {ids.max()}, which must lie below its vocabulary = "
                f"{self.tokenizer.vocabulary}"
            )
        if not counts:
            ids = ids.astype(np.int64) + self.tokenizer.vocabulary
        while len(ids):
            self._shard()
            space = min(len(self.buffer) - self.filled, self.limit - self.length - self.filled)
            part, ids = ids[:space], ids[space:]
            self.buffer[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            if self.filled == len(self.buffer) or self.length + self.filled == self.limit:
                self._flush()
                if self.length == self.limit:
                    self._close()

    def commit(self, replace: bool) -> dict[str, int]:
        if not self.documents:
            raise ValueError(f"there are no documents for {self.output}: all were skipped, or the part is too small")
        if self.file:
            self._close()
        tokenizer, (tokens, sizes) = self.tokenizer, np.array(self.shards, np.int64).T
        index = Index(
            self.output.stem, self.packing, self.sources, tokenizer.vocabulary, tokenizer.end_of_document,
            self.documents, self.masked, tokenizer.description, tokens, sizes,
        )  # fmt: skip
        part = self.output.with_name(f"{self.output.stem}-{self.packing}-index.h5.part")  # another may be packing too
        with self._new(part) as file:
            write_index(file.hdf5, index)
        files.sync(self.output.parent)  # the shards' names, before anything tells of them
        (_publish if replace else _publish_first)(part, self.output)
        self.written = []  # the data are complete, whatever fails from here on
        files.sync(self.output.parent)
        return {"documents": self.documents, "tokens": int(tokens.sum()), "shards": len(self.shards)}

    def _shard(self) -> _NewFile:
        """The open shard, or else the next."""
        if self.file:
            return self.file
        self.name = shard_name(self.output.stem, self.packing, len(self.shards))
        self.file = self._new(self._part())
        self.file.hdf5.attrs.update(packing=np.bytes_(self.packing), number=len(self.shards))
        self.data = self.file.hdf5.create_dataset(
            "tokens", (0,), self.dtype, maxshape=(None,), chunks=(format.CHUNK,), fletcher32=True
        )
        self.length = 0
        self.starts: list[int] = []
        return self.file

    def _new(self, path: Path) -> _NewFile:
        self.written.append(path)
        return _NewFile(path)

    def _flush(self) -> None:
        self.data.resize((self.length + self.filled,))
        self.data[self.length :] = self.buffer[: self.filled]
        self.length += self.filled
        self.filled = 0
        self._shard().check()

    def _close(self) -> None:
        file = self._shard()
        self._flush()
        starts = np.array(self.starts, "<i8")
        chunks = (max(1, min(len(starts), format.CHUNK)),)
        file.hdf5.create_dataset("documents", data=starts, maxshape=(None,), chunks=chunks, fletcher32=True)
        file.close()
        file.check()
        self.file = None
        final = self.output.parent / self.name
        self.written.append(final)
        _publish(self._part(), final)
        self.shards.append((self.length, final.stat().st_size))

    def _part(self) -> Path:
        return self.output.parent / (self.name + ".part")


class _NewFile:
    """A new HDF5 file, `hdf5`; `check` raises the first error of writing it."""

    def __init__(self, path: Path):
        self._raw = path.open("xb+", buffering=0)
        self._disk = files.Disk(self._raw)
        self.hdf5 = h5py.File(self._disk, "w", libver=format.LIBVER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self.close()
        if not failed:
            self.check()

    def close(self) -> None:
        self.hdf5.close()
        self._raw.close()

    def check(self) -> None:
        if self._disk.error:
            raise self._disk.error


def _publish(part: Path, final: Path) -> None:
    """Give a file that is whole its final name, once its content is on disk."""
    files.sync(part)
    part.replace(final)


def _publish_first(part: Path, final: Path) -> None:
    """As `_publish`, but FileExistsError where another was given the name."""
    files.sync(part)
    try:
        os.link(part, final)
    except OSError as error:
        if not files.status(final):  # a file system without links
            part.replace(final)
            return
        if not part.samefile(final):  # NFS may repeat a link of which it lost the answer
            raise FileExistsError(f"{final} exists") from error
    part.unlink()


def _make_folder(folder: Path) -> None:
    """With those above it, so that their names survive a power cut too."""
    if not files.status(folder):
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        files.sync(folder.parent)


def _shards_of(index: Path) -> list[Path]:
    """Shards of the packing that an index describes; none where it cannot be read, or others than `pack` writes beside
    an index of this name: they may be another's."""
    with contextlib.suppress(ValueError):
        found = read_index(index)
        if found.stem == index.stem:
            return [index.parent / found.name(number) for number in range(len(found.tokens))]
    return []
