"""Part of ten_thousand.py: the grid, its table, collectives by messages, the watchdog's reports."""

import time
import tracemalloc

import mpi4py

mpi4py.rc.initialize = False  # datatypes and constants are used, no communication

from mpi4py import MPI  # noqa: E402

import hpctrain as ht  # noqa: E402


class StandIn:
    """A communicator of `size` ranks as one of them sees it, on nodes of 8; nothing is sent."""

    def __init__(self, size, rank=0, dims=None):
        self.size, self.rank, self.dims = size, rank, dims

    def Create_cart(self, dims, periods, reorder):
        return StandIn(self.size, self.rank, dims)

    @property
    def coords(self):
        places, rest = [], self.rank
        for size in reversed(self.dims):
            places.append(rest % size)
            rest //= size
        return places[::-1]

    def Sub(self, remain):
        size = rank = 1
        rank = 0
        for keep, place, dim in zip(remain, self.coords, self.dims):
            if keep:
                size, rank = size * dim, rank * dim + place
        return StandIn(size, rank)

    def Split_type(self, kind):
        assert kind == MPI.COMM_TYPE_SHARED
        return StandIn(8)

    def Free(self):
        pass

    def bcast(self, value):
        return value

    def allgather(self, value):
        return [value + rank // 8 for rank in range(self.size)] if isinstance(value, int) else [value] * self.size


def rows(ranks):
    tracemalloc.start()
    start = time.perf_counter()
    grid = ht.Grid(data=ranks // 8, tensor=(8, 1, 1), comm=StandIn(ranks))
    seconds, memory = time.perf_counter() - start, tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return [
        {"case": "building the grid", "value": round(seconds, 4), "unit": "s", "limit": 1.0},
        {"case": "memory of the grid", "value": memory, "unit": "bytes", "limit": 2_000_000},
        {"case": "describe()", "value": len(grid.describe().splitlines()), "unit": "lines", "limit": 40},
    ]
