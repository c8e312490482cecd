"""Counter-based random numbers: every number is a function of (seed, name, step, index), never of the grid.

A rank generates just the numbers of its own slice; whoever holds the slice, on any grid, gets the same ones.
The generator is Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11), from numpy.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import pickle
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch

_BLOCK = 4  # 64-bit words that Philox makes for one counter value


class RngKey:
    """A named stream of random numbers. `key / "name"` is the stream of a part.

    >>> key = RngKey(7, "layer")
    >>> bool((key.words(0, 6)[3:] == key.words(3, 3)).all()), bool((key.words(0, 6) == (key / "b").words(0, 6)).any())
    (True, False)
    """

    def __init__(self, seed: int, name: str = ""):
        self.seed, self.name = seed, name
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
        self._key = np.frombuffer(digest, np.uint64)

    def __truediv__(self, name: str | int) -> RngKey:
        return RngKey(self.seed, f"{self.name}.{name}" if self.name else str(name))

    def __repr__(self):
        return f"RngKey({self.seed}, {self.name!r})"

    def words(self, start: int, count: int, step: int = 0) -> np.ndarray:
        """Numbers `start` to `start + count` of the stream at `step`, as uint64."""
        skip = start % _BLOCK
        counter = np.array([start // _BLOCK, step, 0, 0], np.uint64)
        return np.random.Philox(key=self._key, counter=counter).random_raw(skip + count)[skip:]

    def uniform(self, start: int, count: int, step: int = 0) -> torch.Tensor:
        """Numbers of the open interval (0, 1), float64."""
        return torch.from_numpy(((self.words(start, count, step) >> np.uint64(11)) + 0.5) * 2.0**-53)

    def normal(self, start: int, count: int) -> torch.Tensor:
        """Numbers of the standard normal distribution, float64: the inverse of its distribution function."""
        return torch.special.ndtri(self.uniform(start, count))

    def mask(self, start: int, count: int, drop: float, step: int) -> torch.Tensor:
        """Booleans, False with probability `drop` rounded to a multiple of 2^-16."""
        first, last = start // _BLOCK, -(-(start + count) // _BLOCK)  # four 16-bit draws a word
        draws = self.words(first, last - first, step).view(np.uint16)[start - first * _BLOCK :][:count]
        return torch.from_numpy(draws >= drop_threshold(drop))

    def mask_block(self, start: int, rows: int, stride: int, count: int, drop: float, step: int) -> torch.Tensor:
        """The numbers from `start` of a `mask` whose rows lie `stride` apart: (rows, count), without drawing the rest.

        >>> key = RngKey(0, "dropout")
        >>> whole = key.mask(0, 1000 * 7, 0.5, 3).view(7, 1000)
        >>> [bool((key.mask_block(2000 + first, 5, 1000, count, 0.5, 3) == whole[2:, first : first + count]).all())
        ...  for first, count in ((0, 1000), (301, 52), (7, 900))]
        [True, True, True]
        """
        if not rows or not count:
            return torch.empty(rows, count, dtype=torch.bool, device="cpu")
        if 2 * count > stride:
            whole = self.mask(start, (rows - 1) * stride + count, drop, step)
            return whole.as_strided((rows, count), (stride, 1))
        draws = 4 * _BLOCK  # of a counter value
        counters = np.array([start // draws, step, 0, 0], np.uint64)
        generator, place = np.random.Philox(key=self._key, counter=counters), start // draws
        out = np.empty((rows, count), np.uint16)
        for row in out:
            first, last = start // draws, -(-(start + count) // draws)
            generator.advance(first - place)
            row[:] = generator.random_raw((last - first) * _BLOCK).view(np.uint16)[start - first * draws :][:count]
            place, start = last, start + stride
        return torch.from_numpy(out >= drop_threshold(drop))


def check_key(key: RngKey) -> RngKey:
    """The key itself; ValueError for what is none, such as a seed."""
    if not isinstance(key, RngKey):
        raise ValueError(f"key must be an RngKey, such as ht.RngKey(0), got {key!r}")
    return key


def drop_threshold(drop: float) -> int:
    return round(drop * 2**16)


class Slice(Protocol):
    """Of a `shard.Shard`, where it lies."""

    @property
    def global_shape(self) -> tuple[int, ...]: ...

    @property
    def slices(self) -> tuple[slice, ...]: ...


def fill_slice(out: torch.Tensor, shard: Slice, numbers: Callable, chunk: int = 2**16) -> None:
    """Fill this rank's slice with `numbers(start, count)`, a function of the row-major index in the global tensor.

    Works through whole rows of the last dim, a few at a time, so that no more than `chunk` numbers, or one row if that
    is longer, ever exist beside the slice.
    """
    *outer, last = shard.slices
    width = shard.global_shape[-1]
    rows = math.prod(part.stop - part.start for part in outer)
    flat = out.view(rows, last.stop - last.start)
    if flat.numel() == 0:
        return
    index = np.arange(1).reshape((1,) * len(outer))
    for dim, part in enumerate(outer):
        stride = math.prod(shard.global_shape[dim + 1 : -1])
        steps = np.arange(part.start, part.stop) * stride
        index = index + steps.reshape([-1 if d == dim else 1 for d in range(len(outer))])
    row_index = index.reshape(-1)
    breaks = np.flatnonzero(np.diff(row_index) != 1) + 1  # runs of consecutive rows
    for start, stop in zip([0, *breaks], [*breaks, rows]):
        step = max(1, chunk // width)
        for row in range(start, stop, step):
            end = min(row + step, stop)
            whole = numbers(int(row_index[row]) * width, (end - row) * width).view(end - row, width)
            flat[row:end] = whole[:, last].to(out.dtype)


class Permutation:
    """A shuffle of range(length) that is computed, not stored: a Feistel network with cycle walking.

    Needs no memory that grows with `length`, so that a rank can ask for the few positions it reads out of billions.
    (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.)

    >>> shuffle = Permutation(10, RngKey(0, "order"))
    >>> sorted(shuffle(np.arange(10)).tolist()) == list(range(10))
    True
    """

    ROUNDS = 6

    def __init__(self, length: int, key: RngKey):
        self.length = length
        self._half = np.uint64(max(1, -(-max(1, (length - 1).bit_length()) // 2)))
        self._low = np.uint64((1 << int(self._half)) - 1)
        self._round_keys = key.words(0, self.ROUNDS)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The element at each of `positions` (integers below `length`), int64."""
        values = np.asarray(positions).astype(np.uint64)
        assert values.size == 0 or values.max() < self.length
        values = self._encrypt(values)
        while (outside := values >= self.length).any():
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64)

    def _encrypt(self, values):
        left, right = values >> self._half, values & self._low
        for round_key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & self._low)
        return (left << self._half) | right


def _mix(words: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def generator_states() -> dict[str, int]:
    """Checksums of the states of the generators that code which is not ours draws from: torch's, on the GPU in use
    too, Python's and numpy's."""
    states: dict[str, bytes | memoryview] = {
        "torch": torch.get_rng_state().numpy().data,
        "random": pickle.dumps(random.getstate()),
        "numpy": pickle.dumps(np.random.get_state()),
    }
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state().numpy().data
    return {name: zlib.crc32(state) for name, state in states.items()}


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """torch's generators, also that of a GPU in use, are afterwards as they were."""
    in_use = torch.cuda.is_initialized() or torch.get_default_device().type == "cuda"
    with torch.random.fork_rng([torch.cuda.current_device()] if in_use else []):
        yield


@contextlib.contextmanager
def seeded(key: RngKey) -> Iterator[None]:
    """torch's generators are seeded by a key, and afterwards as they were."""
    with restored():
        torch.manual_seed(int(key.words(0, 1)[0]) >> 1)
        yield
