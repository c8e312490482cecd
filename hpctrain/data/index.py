"""The index of a packing, written and read: every number and name in it is checked before it is used."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from hpctrain.data import format, hdf5

LARGEST = 256 << 20  # bytes: a million shards and the largest tokenizers take less
_NAME = re.compile(r"(?P<stem>[^/\0]+)-(?P<packing>[0-9a-f]{8})-(?P<number>[0-9]{5,})\.h5")
_LARGEST_SUM = 2**62


@dataclass(frozen=True)
class Index:
    """What an index tells. `tokens` and `bytes` (int64) are those of every shard, `sources` a `corpus.fingerprint`."""

    stem: str
    packing: str
    sources: str
    vocabulary: int
    end_of_document: int
    documents: int
    masked: bool
    tokenizer: str
    tokens: np.ndarray
    bytes: np.ndarray

    def name(self, number: int) -> str:
        """Of a shard."""
        return shard_name(self.stem, self.packing, number)

    @property
    def dtype(self) -> np.dtype:
        """Of the tokens in the shards."""
        return token_dtype(self.stored)

    @property
    def stored(self) -> int:
        """What all numbers in the shards are below."""
        return self.vocabulary * (1 + self.masked)


def shard_name(stem: str, packing: str, number: int) -> str:
    return f"{stem}-{packing}-{number:05d}.h5"


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest type that holds all numbers below `vocabulary`."""
    return np.dtype("<u2") if vocabulary <= 2**16 else np.dtype("<u4")


def write_index(file: h5py.File, index: Index) -> None:
    """Fill a new file.

    Raises:
        ValueError: where it would be too large to be read.
    """
    rows = np.empty(len(index.tokens), format.INDEX_ROW)
    rows["name"] = [index.name(number).encode() for number in range(len(rows))]
    rows["tokens"], rows["bytes"] = index.tokens, index.bytes
    text = np.frombuffer(index.tokenizer.encode(), np.uint8)  # an attribute holds 64 KiB at most
    if rows.nbytes + text.nbytes > LARGEST - (1 << 20):
        raise ValueError(
            f"{len(rows)} shards and a tokenizer of {text.nbytes} bytes make an index of more than the {LARGEST} bytes "
            "that are read; use larger shards (--shard-tokens)"
        )
    file.attrs.update(
        format=np.bytes_(format.FORMAT),
        version=format.VERSION,
        packing=np.bytes_(index.packing),
        sources=np.bytes_(index.sources),
        vocabulary=index.vocabulary,
        end_of_document=index.end_of_document,
        masked=int(index.masked),
        tokens=int(index.tokens.sum()),
        documents=index.documents,
    )
    for name, data in (("tokenizer", text), ("shards", rows)):
        file.create_dataset(name, data=data, chunks=data.shape, fletcher32=True)


def read_index(path: Path) -> Index:
    """
    Raises:
        ValueError: for a file that is missing, unreadable, no index, or not one that `write_index` would have written;
            the message names it.
    """
    with hdf5.opened(path) as file:
        with hdf5.reading(path):
            marked = all(h5py.h5a.exists(file.id, name) for name in (b"format", b"version"))
            version = hdf5.attribute(file, "version", int) if marked else None
            # other versions may write their name otherwise
            ours = marked and (version != format.VERSION or hdf5.attribute(file, "format", str) == format.FORMAT)
        if not ours:
            raise ValueError(f"{path} is not an index of packed tokens; make one with `hpctrain pack`")
        if version != format.VERSION:
            raise ValueError(f"{path} has format version {version}, not {format.VERSION}; pack again")
        with hdf5.reading(path):
            return _checked(file, path.stat().st_size)


def _checked(file: h5py.File, size: int) -> Index:
    """All of a file that is an index of this version. Raises OSError where something in it cannot be so."""
    if size > LARGEST:
        raise OSError(f"it has {size} bytes, more than the {LARGEST} of any index")
    packing, sources = hdf5.attribute(file, "packing", str), hdf5.attribute(file, "sources", str)
    names = ("vocabulary", "end_of_document", "masked", "documents", "tokens")
    vocabulary, end, masked, documents, total = (hdf5.attribute(file, name, int) for name in names)
    if not (0 <= end < vocabulary <= 2**32 >> (masked == 1) and masked in (0, 1) and 0 <= documents <= total):
        raise OSError(
            f"vocabulary {vocabulary}, end_of_document {end}, masked {masked}, {documents} documents, {total} tokens"
        )
    rows = hdf5.dataset(file, "shards", format.INDEX_ROW, size)[:]
    text = hdf5.dataset(file, "tokenizer", np.dtype("u1"), size)[:].tobytes().decode()
    stems = set()
    for number, row in enumerate(rows):
        name = _NAME.fullmatch(row["name"].decode())
        if not name or row["name"].decode() != shard_name(name["stem"], packing, number):
            raise OSError(f"shard {number} of packing {packing[:20]!r} is called {row['name']!r}")
        stems.add(name["stem"])
    tokens, sizes = rows["tokens"].tolist(), rows["bytes"].tolist()
    if len(stems) != 1 or min(tokens) < 1 or sum(tokens) != total or sum(sizes) > _LARGEST_SUM:
        raise OSError("its shards do not make up its tokens")
    numbers = np.array(tokens, np.int64), np.array(sizes, np.int64)
    index = Index(stems.pop(), packing, sources, vocabulary, end, documents, bool(masked), text, *numbers)
    if any(stored < count * index.dtype.itemsize for stored, count in zip(sizes, tokens)):
        raise OSError("a shard declares more tokens than its file can hold")
    return index
