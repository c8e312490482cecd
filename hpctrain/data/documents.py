"""The documents of inputs: plain text, JSON Lines and Parquet, compressed or not, as pieces of text in their order."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from hpctrain.data.corpus import read_text, suffix

ROWS = 256  # of a table that are in memory at once: more take longer, and of long texts gigabytes
RECORDS = frozenset({".jsonl", ".ndjson", ".json", ".parquet"})  # suffixes of files that may hold records of fields

Skip = Callable[[str, str], None]  # called for what is not packed: where it is, and why


@dataclass(frozen=True)
class Fields:
    """Which fields of a JSON line or columns of a Parquet table are a document.

    Attributes:
        text: the whole of it; or, with a `prompt` before it, what is to be learnt.
        prompt: tokens of it count in no loss; "" for none.
    """

    text: str = ""
    prompt: str = ""

    def __post_init__(self):
        if self.prompt and not self.text:
            raise ValueError(f"a prompt field ({self.prompt}) needs the field of the completion beside it")


@dataclass(frozen=True)
class Piece:
    """Text of a document: its first piece `begins` it, its last `ends` it; `counts` says whether it is to be learnt."""

    text: str
    begins: bool
    ends: bool
    counts: bool = True


def documents(path: Path, fields: Fields, skip: Skip, named: bool = True) -> Iterator[Piece]:
    """The documents of one file: one, or where `fields` are given and it is of RECORDS, one a record. A .json file that
    is not JSON Lines, as a configuration beside them, is skipped where it was not `named` but found in a folder.

    Raises:
        ValueError: for a file that is not what its name says, or that nothing here can read, naming it.
        OSError: for one that cannot be read.
    """
    kind = suffix(path)
    if kind == ".parquet":
        if not fields.text:
            raise ValueError(f"{path} is a table; say by --field which column has the text")
        yield from _records(_parquet(path, fields), fields, f"of {path}", skip)
    elif kind in RECORDS and fields.text:
        with opened(path) as file:
            records = _json_lines(file, path)
            if kind == ".json":
                records = _if_objects(records, path, skip, named)
            yield from _records(records, fields, f"of {path}", skip)
    else:
        before = None
        with opened(path) as file:
            for text in read_text(file, path):
                if before is not None:
                    yield Piece(before[0], before[1], False)
                before = text, before is None
        text, begins = before or ("", True)
        yield Piece(text, begins, True)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, uncompressed; raises ValueError for damaged ones."""
    outer = path.suffix.lower()
    with path.open("rb") as raw:
        if outer == ".gz":
            try:
                with gzip.open(raw) as file:
                    yield cast(IO[bytes], file)  # it is one in all but its class
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{path} is not whole gzip: {error}") from error
        elif outer == ".zst":
            try:
                import zstandard
            except ImportError as error:
                raise ValueError(f"{path} needs the zstandard package: pip install zstandard") from error
            try:
                yield io.BufferedReader(_Zstandard(raw), 1 << 20)
            except (EOFError, zstandard.ZstdError) as error:
                raise ValueError(f"{path} is not whole Zstandard: {error}") from error
        else:
            yield raw


class _Zstandard(io.RawIOBase):
    """What frames of Zstandard hold, one after the other. The library's own reader takes an end in the middle of a
    frame for that of the file."""

    def __init__(self, raw: IO[bytes]):
        self._raw = raw
        self._frame: Any = None
        self._compressed, self._found = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        import zstandard

        while not self._found:
            if not self._compressed and not (compressed := self._raw.read(1 << 14)):
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            compressed, self._compressed = self._compressed or compressed, b""
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._found = memoryview(self._frame.decompress(compressed))
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._found))
        buffer[:count], self._found = self._found[:count], self._found[count:]
        return count


def _records(records: Iterator[tuple[str, dict]], fields: Fields, where: str, skip: Skip) -> Iterator[Piece]:
    wanted = [fields.prompt, fields.text] if fields.prompt else [fields.text]
    for place, record in records:
        problem = next((said for said in (_problem(record, name) for name in wanted) if said), None)
        if problem:
            skip(f"{place} {where}", problem)
        elif fields.prompt:
            yield Piece(record[fields.prompt], True, False, counts=False)
            yield Piece(record[fields.text], False, True)
        else:
            yield Piece(record[fields.text], True, True)


def _problem(record, name: str) -> str:
    if not isinstance(record, dict):
        return "no object"
    if name not in record:
        return f"no field {name}"
    if not isinstance(record[name], str):
        return f"field {name} is no text"
    if not record[name]:
        return f"field {name} is empty"
    try:
        record[name].encode()
    except UnicodeEncodeError:  # JSON may name one by its number
        return f"field {name} has half a surrogate pair, which is no character"
    return ""


def _json_lines(file: IO[bytes], path: Path) -> Iterator[tuple[str, dict]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of {path} is not JSON, as each line of it must be: {error}") from error


def _if_objects(records, path: Path, skip: Skip, named: bool) -> Iterator[tuple[str, dict]]:
    """The records of a .json file, where the first is an object."""
    try:
        first = next(records, None)
        if first and not isinstance(first[1], dict):
            raise ValueError(f"{first[0]} of {path} is no object, as each line of it must be")
    except ValueError as error:
        if named:
            raise ValueError(f"{error}; jq -c '.[]' turns an array into lines") from error
        skip(str(path), "no JSON Lines")
        return
    if first:
        yield first
        yield from records


def _parquet(path: Path, fields: Fields) -> Iterator[tuple[str, dict]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path} needs the pyarrow package: pip install pyarrow") from error
    columns = [fields.prompt, fields.text] if fields.prompt else [fields.text]
    try:
        table = pyarrow.parquet.ParquetFile(path)
        if missing := [name for name in columns if name not in table.schema_arrow.names]:
            raise ValueError(f"{path} has no column {missing[0]}, but {', '.join(table.schema_arrow.names)}")
        number = 0
        for batch in table.iter_batches(ROWS, columns=columns):
            for record in batch.to_pylist():
                number += 1
                yield f"row {number}", record
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a whole Parquet file: {error}") from error
