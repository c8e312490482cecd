"""Which text files make up a corpus, and reading them piece by piece."""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NoReturn

from hpctrain import files
from hpctrain.data.tokenizers import Tokenizer

PYTHON_SOURCE = "python-stdlib"  # the running interpreter's standard library: real text that every machine has
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TEXT_SUFFIXES = frozenset(
    ".txt .md .rst .tex .html .xml .csv .json .jsonl .toml .yaml .yml .cfg .ini .py .c .h .cc .cpp .hpp .cu .f .f90 .jl"
    " .rs .go .java .js .ts .sh .lua .tcl .pl .rb .r .m .sql .ndjson .parquet".split()
)


def text_files(sources: Sequence[str], skip: Callable[[str, str], None] = lambda place, why: None) -> list[Path]:
    """The files of a list of files, directories (searched for text suffixes, in sorted order) and `python-stdlib`.
    `skip` is called for the other files in directories.

    Raises:
        ValueError: for a path that does not exist, a directory without text files, and a path that is no list of them.
        OSError: for one that cannot be looked at.
    """
    if isinstance(sources, str | os.PathLike):  # whose letters would be taken for names, such as / for all there is
        raise ValueError(f"sources must be a list of files and directories, got {sources}; write [{str(sources)!r}]")
    if not sources:
        raise ValueError("no text given; name files, directories or python-stdlib")
    found: list[Path] = []
    for source in sources:
        if not source:
            raise ValueError("a name of text is empty; name files, directories or python-stdlib")
        path = Path(source)
        if files.is_folder(path):
            texts = []
            for p in _below(path):
                if suffix(p) not in TEXT_SUFFIXES:
                    skip(str(p), "no known suffix of text")
                elif not files.regular(p):
                    skip(str(p), "no file")
                else:
                    texts.append(p)
            if not texts:
                raise ValueError(f"{source} holds no text files (known suffixes: {' '.join(sorted(TEXT_SUFFIXES))})")
            found += texts
        elif files.regular(path):
            found.append(path)
        elif source == PYTHON_SOURCE:
            found += _standard_library()
        else:
            what = "is neither a file nor a directory" if files.status(path) else "does not exist"
            raise ValueError(f"{source} {what}; name files, directories or {PYTHON_SOURCE}")
    return found


def suffix(path: Path) -> str:
    """Of what a file holds once it is uncompressed.

    >>> suffix(Path("a.jsonl.gz")), suffix(Path("A.TXT"))
    ('.jsonl', '.txt')
    """
    outer = path.suffix.lower()
    return Path(path.stem).suffix.lower() if outer in (".gz", ".zst") else outer


def fingerprint(texts: list[Path], tokenizer: Tokenizer, how: str = "") -> str:
    """Changes with the names, sizes and times of the files, with the tokenizer, and with how else they are packed."""
    facts = (f"{path.name}:{(s := path.stat()).st_size}:{s.st_mtime_ns}" for path in texts)
    return hashlib.blake2b("\n".join([tokenizer.description, how, *facts]).encode(), digest_size=8).hexdigest()


def _below(folder: Path) -> list[Path]:
    """All files of a folder and those in it, links to others followed, sorted; a folder that cannot be listed is an
    error. One that is there by several names, as in a loop of links, is read once."""
    seen = set[tuple[int, int]]()

    def fail(error: OSError) -> NoReturn:
        raise error

    def first_time(path: Path) -> bool:
        facts = path.stat()
        known = facts.st_dev, facts.st_ino
        first = known not in seen
        seen.add(known)
        return first

    first_time(folder)
    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [name for name in sorted(folders) if first_time(Path(place, name))]
        found += [Path(place, name) for name in names]
    return sorted(found)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(root.rglob("*.py")) if not _NOT_LIBRARY & set(path.relative_to(root).parts)]


def read_text(file: IO[bytes], path: Path, piece: int = 1 << 20) -> Iterator[str]:
    """The text of UTF-8 bytes in pieces of about `piece` of them, cut after a line end where there is one.

    Raises:
        ValueError: where the file is not UTF-8, naming it and the position of the first bad byte.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    kept, offset = "", 0
    while True:
        block = file.read(piece)
        pending = len(decoder.getstate()[0])
        try:
            text = kept + decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            where = offset - pending + error.start
            raise ValueError(
                f"{path} is not UTF-8 text: byte {where} cannot be decoded ({error.reason}). "
                f"Convert it (iconv -t UTF-8) or leave it out"
            ) from error
        offset += len(block)
        if not block:
            if text:
                yield text
            return
        cut = text.rfind("\n") + 1 or len(text)
        kept = text[cut:]
        if cut:
            yield text[:cut]
