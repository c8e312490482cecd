"""Which sample comes when: a function of the seed alone."""

from __future__ import annotations

import functools

import numpy as np

from hpctrain.randomness import Permutation, RngKey


class SampleOrder:
    """An endless sequence of samples: every epoch a new shuffle of all of them.

    Args:
        samples: how many there are.
        key: names the order. Epoch e is shuffled by `key / e`.

    >>> order = SampleOrder(3, RngKey(0, "train"))
    >>> sorted(order[0:3].tolist()), sorted(order[3:6].tolist())
    ([0, 1, 2], [0, 1, 2])
    """

    def __init__(self, samples: int, key: RngKey):
        if samples < 1:
            raise ValueError("no samples to put in order")
        self.samples, self.key = samples, key
        self._epoch = functools.lru_cache(maxsize=2)(lambda epoch: Permutation(samples, key / epoch))

    def __getitem__(self, positions: slice) -> np.ndarray:
        """Samples at positions `start` to `stop` of the sequence."""
        return self.at(np.arange(positions.start, positions.stop))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Samples at these positions."""
        epochs, places = np.divmod(positions, self.samples)
        out = np.empty(len(positions), np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            out[chosen] = self._epoch(int(epoch))(places[chosen])
        return out
