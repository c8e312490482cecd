"""Start from a folder in Hugging Face's format: each rank reads just what its slices are made of."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain import files
from hpctrain.models.huggingface import Format, Source
from hpctrain.models.spec import ModelSpec
from hpctrain.parameter import shard_of
from hpctrain.shard import Shard

CHUNK = 4 << 20  # elements read at a time
LARGEST_JSON = 64 << 20  # bytes of config.json and of an index; that of a model of 100,000 tensors has 10 MB
_FLOATS = ("F64", "F32", "F16", "BF16")


def load(spec: ModelSpec, model: torch.nn.Module, folder: Path) -> None:
    """Fill this rank's parameters of a model of this spec; needs no communication.

    Raises:
        ValueError: when the folder cannot be read, or holds a model of other sizes; all differences are listed.
    """
    format = spec.huggingface
    shape: Any = model.shape
    if format.config(shape, None) is None:
        raise ValueError(
            f"model.init = {folder}: model.kind = {spec.kind} has no config.json of Hugging Face's to start from"
        )
    check_config(format, shape, folder)
    with _Safetensors(folder, format.prefix) as tensors, torch.no_grad():
        if unknown := sorted(name for name in tensors.names() if not format.known.fullmatch(name)):
            raise ValueError(
                f"model.init = {folder} holds {len(unknown)} tensors that the model has no place for, first"
                f" {unknown[0]}; it takes a plain {spec.kind}"
            )
        for name, p in model.named_parameters():
            name = getattr(p, "same_as", name)
            _fill(p, shard_of(p), format.source(name, shape), tensors)
            if name == "wte.weight" and shape.tied:
                _check_tied(p, format.source("head.weight", shape), tensors)


def check_config(format: Format, shape: Any, folder: Path) -> None:
    """Raise ValueError unless the folder holds a model of this shape."""
    try:
        settings = read_settings(folder / "config.json")
    except ValueError as error:
        raise ValueError(f"model.init = {folder} holds no readable config.json: {error}") from error
    if wrong := format.differences(settings, shape):
        raise ValueError(f"model.init = {folder} is another model than the section [model] says: {'; '.join(wrong)}")


def _check_tied(p: torch.nn.Parameter, head: Source, tensors: _Safetensors) -> None:
    """A folder may hold the tied projection onto the vocabulary too, but no other one than the embedding `p`."""
    if tensors.names().isdisjoint(head.names):
        return
    theirs = torch.empty_like(p)
    _fill(theirs, shard_of(p), head, tensors)
    if not torch.equal(theirs, p):
        raise ValueError(
            f"{head.names[0]} in {tensors.folder} is not the embedding, although config.json ties them; remove it, or"
            " set tie_word_embeddings = false there and model.tied = false"
        )


def _fill(p: torch.Tensor, shard: Shard, source: Source, tensors: _Safetensors) -> None:
    """Read the slices of this rank."""
    *rows, last = shard.slices  # of experts, those of one after the other
    rows, columns = (rows, [last]) if rows else ([last], [])
    lengths = shard.global_shape[: len(rows)]
    numbers = np.arange(math.prod(lengths)).reshape(lengths)[tuple(rows)].reshape(-1)
    whole = (math.prod(lengths), *shard.global_shape[len(rows) :])
    ours, first = p.view(shard.shape).flatten(0, len(rows) - 1), 0
    heights = source.rows or (whole[0],)
    transposed = source.transposed and len(whole) == 2
    theirs = numbers if source.order is None else source.order[numbers]
    for name, height in zip(source.names, heights, strict=True):
        stored = tensors.get(name)
        shape = (height, *whole[1:])
        if transposed:
            shape = shape[::-1]
        if tuple(stored.get_shape()) != shape:
            raise ValueError(f"{name} in {tensors.folder} has the shape {tuple(stored.get_shape())}, not {shape}")
        if p.numel():
            here = np.flatnonzero((theirs >= first) & (theirs < first + height))
            read = _read_columns if transposed else _read_rows
            read(ours, here, theirs[here] - first, stored, columns)
        first += height


def _read_rows(ours: torch.Tensor, here: np.ndarray, theirs: np.ndarray, stored, columns: list[slice]) -> None:
    """ours[here] = stored[theirs], read by runs of rows that follow one another in the file."""
    ends = np.flatnonzero(np.diff(theirs) != 1) + 1
    for into, run in zip(np.split(here, ends), np.split(theirs, ends)) if len(here) else ():
        part = stored[int(run[0]) : int(run[-1]) + 1]
        ours[_index(into)] = (part[:, columns[0]] if columns else part).to(ours)


def _read_columns(ours: torch.Tensor, here: np.ndarray, theirs: np.ndarray, stored, columns: list[slice]) -> None:
    """ours[here] = stored.T[theirs], read by some of its rows, which are columns of ours, at a time."""
    if not len(here):
        return
    step = max(1, CHUNK // stored.get_shape()[1])
    (features,) = columns
    into, taken = _index(here), _index(theirs)
    for start in range(features.start, features.stop, step):
        stop = min(start + step, features.stop)
        ours[into, start - features.start : stop - features.start] = stored[start:stop][:, taken].t().to(ours)


def _index(numbers: np.ndarray) -> slice | torch.Tensor:
    """A slice where ascending numbers are equally far apart, which needs no copy."""
    steps = np.diff(numbers)
    if (steps == steps[:1]).all() and (steps > 0).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1, int(steps[0]) if len(steps) else 1)
    return torch.from_numpy(numbers)


class _Safetensors:
    """The tensors of a folder, in one file or in several with an index; read by slices."""

    def __init__(self, folder: Path, prefix: str):
        self.folder, self.prefix = folder, prefix
        index = folder / "model.safetensors.index.json"
        self.where = None
        if files.status(index):
            self.where = read_settings(index).get("weight_map")
            if not isinstance(self.where, dict):
                raise ValueError(f"{index} has no weight_map")
            for name, file in self.where.items():
                if not (isinstance(file, str) and re.fullmatch(r"[^/\0]+\.safetensors", file)):
                    raise ValueError(f"{index} tells of no plain name of a file beside it for {name}: {file!r:.100}")

    def __enter__(self):
        self.stack, self.open = contextlib.ExitStack(), {}
        return self

    def __exit__(self, *_):
        self.stack.close()

    def names(self) -> set[str]:
        return self._file("model.safetensors")[1] if self.where is None else set(self.where)

    def get(self, name: str):
        # a model without the projection onto the vocabulary names its parts without the prefix
        for known in (name, name.removeprefix(self.prefix)):
            file = "model.safetensors" if self.where is None else self.where.get(known)
            if file:
                opened, names = self._file(file)
                if known in names:
                    found = opened.get_slice(known)
                    if found.get_dtype() not in _FLOATS:
                        raise ValueError(f"{known} in {self.folder / file} holds {found.get_dtype()}, no floats")
                    return found
        raise ValueError(f"{self.folder} does not hold {name}")

    def _file(self, name: str):
        """The open file of that name, and the names of its tensors."""
        from safetensors import SafetensorError, safe_open

        if name not in self.open:
            path = self.folder / name
            try:
                if not files.regular(path):
                    raise ValueError(f"{path} is missing")
                opened = self.stack.enter_context(safe_open(path, "pt"))  # checks sizes, counts and offsets
                self.open[name] = opened, set(opened.keys())
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
        return self.open[name]


def read_settings(path: Path) -> dict:
    """Raises ValueError, naming the file, for what cannot be read or is no object."""
    try:
        settings = json.loads(files.read_bounded(path, LARGEST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds no JSON object")
    return settings
