"""Windows of shared memory that are used one after another and grow as needed: the scratch memory of a workspace."""

from __future__ import annotations

import mmap

import torch

from hpctrain.comm.windows import Window
from hpctrain.grid import Axis


class WindowsInTurn:
    """`count` windows of an axis, none of which is made before its first turn. All ranks ask for the same sizes.

    The barrier in a call that takes a window says that everybody is done with what the call before it returned, so that
    of two windows the older one is free. Of a single window the next call waits until it has been released by all.
    """

    def __init__(self, axis: Axis, count: int):
        self.axis = axis
        self._windows: list[Window | None] = [None] * count
        self._turn = 0

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def last(self) -> Window:
        """That of the last call, which there was."""
        window = self._windows[self._turn]
        assert window is not None
        return window

    def next(self, nbytes: int) -> Window:
        """The window whose turn it is, with as many bytes a rank."""
        self._turn = (self._turn + 1) % len(self._windows)
        return self.grown(nbytes)

    def grown(self, nbytes: int) -> Window:
        """That of the last call with as many bytes a rank.

        Where it must grow the older one is freed: everybody is done with it. It grows by a quarter at least,
        so that sizes that creep up make few windows.
        """
        window = self._windows[self._turn]
        if window is not None and len(self._windows) == 1:
            window.wait_released()
        if window is None or len(window.parts[0]) < nbytes:
            if window is not None:
                nbytes = max(nbytes, 5 * len(window.parts[0]) // 4)
                self._windows[self._turn] = None
                self.axis.transport.resources.remove(window)
                window.free()
            pages = -(-nbytes // mmap.PAGESIZE) or 1
            window = self._windows[self._turn] = Window(self.axis, pages * mmap.PAGESIZE)
        return window

    def free(self) -> None:
        """Give back all of them; the next calls make new ones. Collective."""
        for place, window in enumerate(self._windows):
            if window is not None:
                self._windows[place] = None
                self.axis.transport.resources.remove(window)
                window.free()

    def next_whole(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next window's memory as one flat tensor for all ranks, of which each has reserved its share."""
        nbytes = numel * dtype.itemsize
        return self.next(-(-nbytes // self.axis.size)).whole[:nbytes].view(dtype)
