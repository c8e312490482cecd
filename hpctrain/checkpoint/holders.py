"""Which part of a checkpoint holds what: for every tensor, the bounding rectangle of what each part has of it.

A table of int64, a row for each tensor of each part, in order:

    tensor   part   elements   start of dim 0 … start of the last   stop of dim 0 … stop of the last

Tensors and parts are numbered as the manifest beside the table lists them; a tensor with fewer dims than the one with
most has 0:1 for the others. All operations are NumPy's, on a whole table or on one tensor's rows of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from hpctrain.checkpoint.pieces import Corrupt, File, Tensors

TENSOR, PART, ELEMENTS, FIXED = 0, 1, 2, 3  # columns; the bounds begin at FIXED


class Holders:
    """Attributes: `rows`, the table; `numbers`, of the tensors by name."""

    def __init__(self, tensors: Tensors, rows: np.ndarray):
        self.rows = rows
        self.numbers = {name: number for number, name in enumerate(tensors)}
        self._first = rows[:, TENSOR].searchsorted(np.arange(len(tensors) + 1))

    def find(self, name: str, bounds: np.ndarray) -> np.ndarray:
        """Parts that may have some of these rectangles (number, dim, start and stop) of a tensor."""
        number = self.numbers.get(name)
        if number is None:
            return np.empty(0, np.int64)
        rows = self.rows[self._first[number] : self._first[number + 1]]
        dims, most = bounds.shape[1], most_dims(rows)
        starts, stops = rows[:, FIXED : FIXED + dims], rows[:, FIXED + most : FIXED + most + dims]
        meet = np.zeros(len(rows), bool)
        for rectangle in bounds:
            meet |= ((starts < rectangle[:, 1]) & (rectangle[:, 0] < stops)).all(1)
        return rows[meet, PART]

    def elements(self) -> list[int]:
        """Of each tensor, how many all parts have together."""
        columns = self.rows[:, ELEMENTS]
        high, low = (np.zeros(len(self.numbers), np.int64) for _ in range(2))  # sums of what may be lies overflow
        np.add.at(high, self.rows[:, TENSOR], columns >> 31)
        np.add.at(low, self.rows[:, TENSOR], columns & (1 << 31) - 1)
        return [(upper << 31) + lower for upper, lower in zip(high.tolist(), low.tolist())]

    def hull(self) -> np.ndarray:
        """The rows of all parts taken as one, number 0."""
        rows, most = self.rows, most_dims(self.rows)
        if not len(rows):
            return rows
        first = np.flatnonzero(np.diff(rows[:, TENSOR], prepend=-1))
        hull = rows[first]
        hull[:, PART] = 0
        hull[:, ELEMENTS] = np.add.reduceat(rows[:, ELEMENTS], first)
        hull[:, FIXED : FIXED + most] = np.minimum.reduceat(rows[:, FIXED : FIXED + most], first)
        hull[:, FIXED + most :] = np.maximum.reduceat(rows[:, FIXED + most :], first)
        return hull

    def bytes(self) -> bytes:
        return self.rows.astype("<i8").tobytes()


def most_dims(rows: np.ndarray) -> int:
    return (rows.shape[1] - FIXED) // 2


def columns(tensors: Tensors) -> int:
    return FIXED + 2 * max((len(shape) for _, shape in tensors.values()), default=0)


def of_files(tensors: Tensors, files: Iterable[File]) -> np.ndarray:
    """The rows of one rank, as part 0."""
    bounds: dict[str, list] = {}
    for file in files:
        for name, pieces in file.pieces.items():
            bounds.setdefault(name, []).extend(piece.bounds for piece in pieces)
    rows = np.zeros((len(bounds), columns(tensors)), np.int64)
    most = most_dims(rows)
    rows[:, FIXED + most :] = 1
    numbered = [(number, bounds[name]) for number, name in enumerate(tensors) if name in bounds]
    for row, (number, rectangles) in zip(rows, numbered):
        row[TENSOR] = number
        row[ELEMENTS] = sum(math.prod(stop - start for start, stop in rectangle) for rectangle in rectangles)
        for dim, spans in enumerate(zip(*rectangles)):
            row[FIXED + dim], row[FIXED + most + dim] = min(s for s, _ in spans), max(s for _, s in spans)
    return rows


def merged(parts: list[tuple[Tensors, np.ndarray]]) -> tuple[Tensors, Holders]:
    """The tables of parts, each with its own list of tensors, in one.

    Raises:
        ValueError: when two parts do not agree on a tensor's type or shape.
    """
    tensors: Tensors = {}
    for described, _ in parts:
        for name, value in described.items():
            if tensors.setdefault(name, value) != value:
                raise ValueError(f"{name} is {tensors[name]} on one rank, {value} on another")
    numbers = {name: number for number, name in enumerate(tensors)}
    width = columns(tensors)
    most = (width - FIXED) // 2
    table = np.zeros((sum(len(rows) for _, rows in parts), width), np.int64)
    table[:, FIXED + most :] = 1
    place = 0
    for part, (described, rows) in enumerate(parts):
        into, dims = table[place : place + len(rows)], most_dims(rows)
        renumbered = np.fromiter((numbers[name] for name in described), np.int64, len(described))
        into[:, TENSOR] = renumbered[rows[:, TENSOR]]
        into[:, PART] = part
        into[:, ELEMENTS] = rows[:, ELEMENTS]
        into[:, FIXED : FIXED + dims] = rows[:, FIXED : FIXED + dims]
        into[:, FIXED + most : FIXED + most + dims] = rows[:, FIXED + dims :]
        place += len(rows)
    return tensors, Holders(tensors, table[table[:, TENSOR].argsort(kind="stable")])


def parse(content: bytes, tensors: Tensors, parts: int) -> Holders:
    """The table of a manifest that lists these tensors and so many parts.

    Raises:
        Corrupt: for numbers that are not of these.
    """
    width = columns(tensors)
    if len(content) % (8 * width):
        raise Corrupt(f"{len(content)} bytes are no rows of {width} numbers")
    rows = np.frombuffer(content, "<i8").reshape(-1, width)
    if not len(rows):
        return Holders(tensors, rows)
    most = most_dims(rows)
    if (rows[:, :FIXED] < 0).any() or rows[:, TENSOR].max() >= len(tensors) or rows[:, PART].max() >= parts:
        raise Corrupt("a row is of no tensor or part")
    if (np.diff(rows[:, TENSOR] * parts + rows[:, PART]) <= 0).any():
        raise Corrupt("the rows are not in order")
    sizes = np.array([(*shape, *[1] * (most - len(shape))) for _, shape in tensors.values()], np.int64)
    starts, stops = rows[:, FIXED : FIXED + most], rows[:, FIXED + most :]
    if ((starts < 0) | (starts >= stops) | (stops > sizes[rows[:, TENSOR]])).any():
        raise Corrupt("a row has a rectangle outside of its tensor")
    return Holders(tensors, rows)
