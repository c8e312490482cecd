"""HDF5 files that nobody vouches for: what they declare is checked before it is followed, or memory taken for it.

A dataset may stand for another file (a link, external storage, a virtual dataset), declare 271 TiB in 6 KiB, or ask
for a filter to be loaded. Those that are read here lie in this file, in chunks that have a checksum and are all there.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

import h5py
import numpy as np

from hpctrain import files

ATTRIBUTE = 4096  # bytes of an attribute at most


class reading:
    """Turns the errors of reading a file into a ValueError that names it."""

    def __init__(self, path: str | os.PathLike):
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # h5py answers a strange file with any of these
        if isinstance(error, (OSError, LookupError, RuntimeError, TypeError, ValueError, OverflowError)):
            # the system's errors, such as too many open files, have a number
            said = "cannot be read" if getattr(error, "errno", None) else "is corrupt"
            raise ValueError(f"{self.path} {said}: {error}") from error


def opened(path: Path, **how: Any) -> h5py.File:
    """A file to be read; `how` goes to h5py.

    Raises:
        ValueError: where there is none, or it is not HDF5, naming it.
    """
    with reading(path):
        regular = files.regular(path)
    if not regular:
        wrong = "is no file" if path.exists() else "does not exist"
        raise ValueError(f"{path} {wrong}; restore it, or pack the text again with `hpctrain pack`")
    try:
        return h5py.File(path, "r", **how)
    except OSError as error:
        said = "cannot be read" if error.errno else "cannot be opened as HDF5, it may be truncated or corrupt"
        raise ValueError(f"{path} {said}: {error}") from error


@overload
def attribute(file: h5py.File, name: str, kind: type[int]) -> int: ...
@overload
def attribute(file: h5py.File, name: str, kind: type[str]) -> str: ...
def attribute(file: h5py.File, name: str, kind: type) -> int | str:
    """One integer, or one text of a fixed length, of the root's attributes.

    HDF5 crashes on crafted texts of variable length, which are not even looked at.

    Raises:
        OSError: for one that is missing or something else; within `reading`, a ValueError.
    """
    if not h5py.h5a.exists(file.id, name.encode()):
        raise OSError(f"it has no attribute {name}")
    stored = h5py.h5a.open(file.id, name.encode())
    if stored.shape != () or stored.get_storage_size() > ATTRIBUTE:
        raise OSError(f"its attribute {name} is not one value")
    if stored.dtype.kind not in {int: "iu", str: "S"}[kind]:
        raise OSError(f"its attribute {name} is of type {stored.dtype}, not {kind.__name__}")
    value = file.attrs[name]
    return value.decode() if kind is str else int(value)


def dataset(file: h5py.File, name: str, dtype: np.dtype, size: int) -> h5py.Dataset:
    """A dataset of one dimension in a file of `size` bytes. What is read of it takes no more memory than is stored.

    Raises:
        OSError: for one that is missing or stored otherwise; within `reading`, a ValueError.
    """
    if not file.id.links.exists(name.encode()):
        raise OSError(f"it has no dataset {name}")
    if file.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
        raise OSError(f"{name} is a link to another place, which is not followed")
    found = file[name]
    if not isinstance(found, h5py.Dataset):
        raise OSError(f"{name} is no dataset")
    stored = found.id.get_create_plist()
    filters = [stored.get_filter(n)[0] for n in range(stored.get_nfilters())]
    if stored.get_layout() != h5py.h5d.CHUNKED or filters != [h5py.h5z.FILTER_FLETCHER32]:
        raise OSError(f"{name} is not stored in chunks that have a checksum, and nothing else")
    if found.dtype != dtype or len(found.shape) != 1:
        raise OSError(f"{name} holds {found.dtype} in {len(found.shape)} dims, not {dtype} in one")
    if found.id.get_type() != h5py.h5t.py_create(dtype):  # fewer bits than the bytes have, which NumPy does not know
        raise OSError(f"{name} holds numbers of {found.id.get_type().get_precision()} bits, not {dtype}")
    ((length,), (chunk,)) = found.shape, found.chunks
    wanted = -(-length // chunk) * (chunk * dtype.itemsize + 4)
    # what it declares first: HDF5 goes through all chunks to add up what is stored
    if wanted > size or wanted != found.id.get_storage_size():
        raise OSError(f"{name} declares {length} numbers, which the file does not hold")
    return found
