"""Measure this machine: matrix products, memory, messages, HDF5; for planning and `hpctrain scale --vary auto`.

    $MPIRUN -n 2 python -m mpi4py benchmarks/machine.py                     writes machine.toml; 20 seconds
    $MPIRUN -n 8 python -m mpi4py benchmarks/machine.py -o frontier.toml    eight ranks at once

All ranks work at the same time, as they do in training, one BLAS thread each unless OMP_NUM_THREADS says otherwise; a
rate is that of the median rank. Medians of repeated calls. Messages go between ranks 0 and 1 while the others are idle;
with one rank there are none, and [mpi] is left out.
"""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch
from mpi4py import MPI

from hpctrain import Grid, comm
from hpctrain.data import format

SIZES = [2**k for k in range(3, 25)]  # bytes of a message


def rate(work, amount, calls=20):
    """Median of amount / seconds of calls of `work`, over the calls of a rank and then over the ranks."""
    work()
    MPI.COMM_WORLD.Barrier()
    rates = []
    for _ in range(calls):  # as many on every rank, as some communicate
        begin = time.perf_counter()
        work()
        rates.append(amount / (time.perf_counter() - begin))
    return statistics.median(MPI.COMM_WORLD.allgather(statistics.median(rates)))


def gemm(size, dtype):
    a, out = torch.ones(size, size, dtype=dtype), torch.empty(size, size, dtype=dtype)
    return rate(lambda: torch.mm(a, a, out=out), 2 * size**3 / 1e9)


def memory(nbytes=64 * 2**20):
    """GiB a second read and written by a copy that no cache holds."""
    source = torch.ones(nbytes // 4)
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), 2 * nbytes / 2**30)


def messages(grid):
    """{bytes: microseconds of a message one way}, by the half of a round trip; rank 0 tells."""
    axis, found = grid.tensor.x, {}
    for nbytes in SIZES:
        tensor, times = torch.zeros(nbytes, dtype=torch.uint8), []
        for _ in range(max(5, min(200, 2**24 // nbytes))):
            start = time.perf_counter()
            if axis.rank == 0:
                comm.send(tensor, axis, 1)
                comm.recv(tensor, axis, 1)
            elif axis.rank == 1:
                comm.recv(tensor, axis, 0)
                comm.send(tensor, axis, 0)
            times.append((time.perf_counter() - start) / 2)
        found[nbytes] = statistics.median(times) * 1e6
        axis.comm.Barrier()
    return found


def all_reduce(grid, nbytes=16 * 2**20):
    """GiB a second of the tensor that is summed over all ranks."""
    tensor = torch.zeros(nbytes // 4)
    return rate(lambda: comm.all_reduce(tensor, grid.tensor.x), nbytes / 2**30)


def hdf5(folder, tokens=2**24):
    """GiB a second read from a checksummed file in the page cache, in one sweep by each rank."""
    path = Path(folder) / f"{MPI.COMM_WORLD.rank}.h5"
    with h5py.File(path, "w", libver=format.LIBVER) as file:
        data = np.arange(tokens, dtype="<u2")
        file.create_dataset("tokens", data=data, chunks=(format.CHUNK,), fletcher32=True)
    with h5py.File(path) as file:
        return rate(lambda: file["tokens"][:], 2 * tokens / 2**30)


def measure():
    world = MPI.COMM_WORLD
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    grid = Grid(tensor=world.size)
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "machine": {
                "hosts": sorted(set(world.allgather(socket.gethostname()))),
                "ranks": world.size,
                "cores": len(os.sched_getaffinity(0)),
                "threads": torch.get_num_threads(),
                "mpi": MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 "),
                "torch": torch.__version__,
            },
            "gemm": {
                "gflops_per_rank": gemm(1024, torch.float32),
                "gflops_per_rank_fp64": gemm(1024, torch.float64),
                "gflops_per_rank_256": gemm(256, torch.float32),
            },
            "memory": {"copy_gib_per_second": memory()},
            "hdf5": {"read_gib_per_second": hdf5(folder)},
        }
    if world.size > 1:
        times = messages(grid)
        found["mpi"] = {
            "latency_us": times[SIZES[0]],
            "bandwidth_gib_per_second": max(nbytes / 2**30 / (us / 1e6) for nbytes, us in times.items()),
            "all_reduce_16_mib_gib_per_second": all_reduce(grid),
            "message_bytes": list(times),
            "message_us": [round(us, 2) for us in times.values()],
        }
    return found


def toml(tables):
    """Tables of numbers, texts and lists."""

    def value(what):
        return json.dumps(round(what, 4) if isinstance(what, float) else what)

    parts = (
        [f"[{name}]", *(f"{key} = {value(what)}" for key, what in table.items())] for name, table in tables.items()
    )
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("machine.toml"))
    output = parser.parse_args().output
    found = measure()
    if MPI.COMM_WORLD.rank == 0:
        output.write_text(f"# python benchmarks/machine.py, {time.strftime('%Y-%m-%d')}\n" + toml(found))
        print(output.read_text(), end="")


if __name__ == "__main__":
    main()
