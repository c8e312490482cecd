"""Time collectives of CUDA tensors: staged through pinned host memory, and given to MPI where it is CUDA-aware.

    $MPIRUN -n 2 python -m mpi4py benchmarks/gpu_collectives.py       ranks may share a GPU; seconds on 2, minutes on 4

Prints one JSON object a line: milliseconds of the slowest rank, medians, of a tensor of so many MiB on each rank (of a
reduce-scatter its result has).
"""

import argparse
import functools
import json
import statistics
import time

import torch
from mpi4py import MPI

import hpctrain as ht
from hpctrain import comm

SIZES = (1 << 12, 1 << 20, 1 << 24, 1 << 26)  # bytes


def seconds(call):
    torch.cuda.synchronize()
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    device = comm.local_device("cuda", world)
    grid = ht.Grid(tensor=world.size)
    comm.decide_cuda_aware(grid, device)
    line, ways = grid.tensor.x, {"staged": False, "direct": True} if grid.transport.cuda_aware else {"staged": False}
    for nbytes in SIZES:
        numbers = nbytes // 4
        part, whole = (torch.ones(count, device=device) for count in (numbers, numbers * world.size))
        counts = (numbers,) * world.size
        calls = {
            "all_reduce": functools.partial(comm.all_reduce, part, line),
            "all_gather": functools.partial(comm.all_gather, part, line, counts),
            "reduce_scatter": functools.partial(comm.reduce_scatter, whole, line, counts),
        }
        for name, call in calls.items():
            found = {}
            for way, direct in ways.items():
                grid.transport.cuda_aware = direct
                found[way] = float(f"{1e3 * statistics.median(seconds(call) for _ in range(options.rounds)):.3g}")
            if world.rank == 0:
                case = f"{name}, {nbytes / (1 << 20):.3g} MiB, {world.size} ranks"
                print(json.dumps({"benchmark": "gpu_collectives", "case": case, **found, "unit": "ms"}), flush=True)


if __name__ == "__main__":
    main()
