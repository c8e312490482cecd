"""Part of ten_thousand.py: the grid and its table, messages of collectives of small blocks, the watchdog's reports."""

import math
import time
import tracemalloc

import mpi4py

mpi4py.rc.initialize = False  # datatypes and constants are used, no communication

import torch  # noqa: E402
from mpi4py import MPI  # noqa: E402

import hpctrain as ht  # noqa: E402
from hpctrain import comm  # noqa: E402


class Done:
    """A request that is complete."""

    def Test(self):
        return True


class StandIn:
    """A communicator of `size` ranks as one of them sees it, on nodes of 8; nothing is sent."""

    def __init__(self, size, rank=0, dims=None):
        self.size, self.rank, self.dims, self.messages = size, rank, dims, 0

    made = 0

    def Dup(self):
        StandIn.made += 1
        return StandIn(self.size, self.rank)

    def Create_cart(self, dims, periods, reorder):
        StandIn.made += 1
        return StandIn(self.size, self.rank, dims)

    @property
    def coords(self):
        places, rest = [], self.rank
        for size in reversed(self.dims):
            places.append(rest % size)
            rest //= size
        return places[::-1]

    def Sub(self, remain):
        StandIn.made += 1
        size, rank = 1, 0
        for keep, place, dim in zip(remain, self.coords, self.dims):
            if keep:
                size, rank = size * dim, rank * dim + place
        return StandIn(size, rank)

    def Split(self, color, key):
        """As if all ranks had the same color, the most that there can be."""
        StandIn.made += 1
        return StandIn(self.size, self.rank)

    def Split_type(self, kind):
        assert kind == MPI.COMM_TYPE_SHARED
        StandIn.made += 1
        return StandIn(8)

    def Free(self):
        StandIn.made -= 1

    @classmethod
    def Create_keyval(cls):
        return 0

    def Get_attr(self, keyval):
        return None

    def Set_attr(self, keyval, value):
        pass

    def Isend(self, message, rank, tag):
        self.messages += 1
        return Done()

    def Irecv(self, message, rank, tag):
        return Done()

    def bcast(self, value):
        return value

    def allgather(self, value):
        return [value + rank // 8 for rank in range(self.size)] if isinstance(value, int) else [value] * self.size


MPI.COMM_SELF = StandIn(1)


def rows(ranks):
    torch.set_num_threads(1)  # as a rank of a job
    tracemalloc.start()
    start = time.perf_counter()
    StandIn.made = 0
    grid = ht.Grid(data=ranks // 8, tensor=(8, 1, 1), comm=StandIn(ranks))
    seconds, communicators, memory = time.perf_counter() - start, StandIn.made, tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    flat, bucket = ht.Grid(data=ranks, comm=StandIn(ranks)).data, torch.zeros(1 << 20)
    counts = [len(bucket) // ranks + (rank < len(bucket) % ranks) for rank in range(ranks)]
    collectives = {
        "reduce-scatter of 4 MiB": lambda: comm.reduce_scatter_start(bucket, flat, counts).wait(),
        "all-gather of 4 MiB": lambda: comm.all_gather_start(bucket[: counts[0]], flat, counts).wait(),
        "all-to-all of 64 bytes a pair": lambda: comm.all_to_all(torch.zeros(ranks, 16), flat),
    }
    watch = comm.Watchdog(grid, 600.0)
    in_full = len(watch.report(0.0, 600.0, grid.world, "all_reduce", None))
    grid.rank = 1
    said = 16 * in_full + (ranks - 16) * len(watch.report(0.0, 600.0, grid.world, "all_reduce", None))
    return [
        {"case": "building the grid", "value": round(seconds, 4), "unit": "s", "limit": 1.0},
        {"case": "memory of the grid", "value": memory, "unit": "bytes", "limit": 2_000_000},
        {"case": "communicators of the grid", "value": communicators, "unit": "communicators", "limit": 16},
        {"case": "describe()", "value": len(grid.describe().splitlines()), "unit": "lines", "limit": 40},
        {"case": "reports of all ranks, all stuck", "value": said, "unit": "bytes", "limit": 1000 * ranks},
        *(row for case, call in collectives.items() for row in sent(flat, case, call)),
    ]


def sent(axis, case, call):
    """The messages of one collective and the time of its bookkeeping, sums and copies. Rank 0 has fewest of the blocks
    that go round the end, in two messages: the limit is that of all ranks."""
    axis.comm.messages, start = 0, time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return [
        {"case": case, "value": axis.comm.messages, "unit": "messages", "limit": 2 * math.ceil(math.log2(axis.size))},
        {"case": f"{case}, in Python", "value": round(seconds, 4), "unit": "s", "limit": None},
    ]
