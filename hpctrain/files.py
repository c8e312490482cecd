"""Files whose errors are heard: whether one is there, that it is on disk, several that come at once, and HDF5 on a disk
that may be full."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

DRAFT = ".draft"


def status(path: str | os.PathLike) -> os.stat_result | None:
    """What is at a path, links followed; None where there is nothing.

    Path.exists, is_file and is_dir say no on any error from Python 3.14 on, and a file that is not to be read for the
    moment would be taken for none.

    Raises:
        OSError: where it cannot be told.
    """
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def regular(path: str | os.PathLike) -> os.stat_result | None:
    """What is at a path where it is a regular file, and None where it is not; errors as `status`."""
    found = status(path)
    return found if found and stat.S_ISREG(found.st_mode) else None


def is_folder(path: str | os.PathLike) -> bool:
    """Whether a folder is at a path; errors as `status`."""
    return (found := status(path)) is not None and stat.S_ISDIR(found.st_mode)


def in_use(path: str | os.PathLike) -> bool:
    """Whether the name is, be it by a link to nothing; errors as `status`."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def free_name(path: Path) -> Path:
    """The path, or with .1, .2, … after it the first that is not in use; errors as `status`."""
    paths = (path.with_name(path.name + end) for end in itertools.chain([""], map(".{}".format, itertools.count(1))))
    return next(path for path in paths if not in_use(path))


def read_bounded(path: str | os.PathLike, most: int) -> bytes:
    """The content of a file of at most `most` bytes; no more than that is read of any.

    Raises:
        OSError: where it cannot be read.
        ValueError: for a longer file, naming it.
    """
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} is longer than the {most} bytes that such a file may have")
    return content


def sync(path: str | os.PathLike) -> None:
    """Have a file's content, or a folder's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def draft(folder: Path) -> Iterator[Path]:
    """An empty folder within `folder` to write what `place` then puts there; at the end it goes, with what is left."""
    path = folder / DRAFT
    if status(path):  # of a process that was killed
        shutil.rmtree(path)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def check_free(folder: Path) -> None:
    """Raise ValueError for what is no folder, and for one that has more in it than the draft of a killed process."""
    if status(folder) and not (is_folder(folder) and all(path.name == DRAFT for path in folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; choose another")


def place(draft: Path, folder: Path, last: str, older: str = "") -> None:
    """The files of a draft, in their places once all are on disk. That of the name `last`, which says that all are
    there, comes after the others, and an older one goes before all that `older`, a regular expression, names."""
    found = sorted(draft.iterdir(), key=lambda path: path.name == last)
    for path in found:
        sync(path)
    (folder / last).unlink(missing_ok=True)
    for path in folder.iterdir():
        if re.fullmatch(older, path.name):
            path.unlink()
    for path in found:
        path.rename(folder / path.name)
    sync(folder)


def replace(path: Path, text: str) -> None:
    """Write a file under another name, and rename it once it is on disk: the old one or the new is there at any
    moment. Of a link, the file that it leads to; what is no regular file is written to as it is."""
    path = path.resolve()
    if status(path) and not regular(path):  # a pipe, or a terminal
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f"{path.name}.tmp")
    try:
        part.write_text(text, encoding="utf-8")
        sync(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class Disk:
    """A file for HDF5, which is never told of an error in writing it: where a file cannot be closed since the disk is
    full, HDF5 goes on with objects that are gone, and crashes. Whoever writes looks at `error` afterwards.

    Attributes: `error`, the first one, or None.
    """

    def __init__(self, raw: io.RawIOBase):
        self.raw, self.place, self.end = raw, 0, 0
        self.error: BaseException | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.end}[whence]
        return self.place

    def tell(self) -> int:
        return self.place

    def write(self, data: bytes | memoryview) -> int:
        content, done = memoryview(data).cast("B"), 0
        try:
            while not self.error and done < len(content):
                done += os.pwrite(self.raw.fileno(), content[done:], self.place + done)
        except BaseException as error:  # Ctrl-C among them
            self.error = error
        self.place += len(content)
        self.end = max(self.end, self.place)
        return len(content)

    def read(self, size: int) -> bytes:
        found = os.pread(self.raw.fileno(), size, self.place)
        self.place += size
        return found.ljust(size, b"\0")

    def truncate(self, size: int) -> int:
        try:
            self.raw.truncate(size)
        except OSError as error:
            self.error = self.error or error
        self.end = size
        return size

    def flush(self) -> None:
        """Nothing is kept back."""
