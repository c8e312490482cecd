"""One measurement: some training steps of one configuration on the ranks of this MPI job.

`hpctrain scale` starts it:   mpirun -n N python -m mpi4py -m hpctrain.scale.measure OUT.json STEPS CONFIG.toml ...
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpctrain import cores, gemm
from hpctrain.comm import together
from hpctrain.config import load_config
from hpctrain.launch import abort, check_launcher, complain, end
from hpctrain.resident import most_resident
from hpctrain.scale import work
from hpctrain.scale.busy import Stopwatch, lacking
from hpctrain.train.dtypes import DTYPES
from hpctrain.train.loop import train_step
from hpctrain.train.session import Session, build

if TYPE_CHECKING:
    from mpi4py import MPI

WARM_UP = 3  # steps


def main() -> int:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    out, steps, path, *overrides = sys.argv[1:]
    try:
        check_launcher(world.size)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        try:
            with together(world):
                config = load_config(path, overrides)
            session = build(config, world)
        except (ValueError, OSError) as error:
            return end(world, complain(error, world.rank))
        result = measure(session, world, int(steps))
        with together(world):
            if world.rank == 0:
                Path(out).write_text(json.dumps(result))
    except BaseException:
        abort(world)
    return 0


def measure(session: Session, world: MPI.Intracomm, steps: int) -> dict:
    """What a step takes, by parts, in seconds, bytes and memory; the same on every rank.

    Time is cut into reading, communication of each axis, the waiting of pipeline stages for their neighbours
    ("bubble"), and computing, which is the rest; means over ranks and steps. `step_seconds` is the median over the
    steps of the slowest rank's.
    """
    from mpi4py import MPI

    peak = gemm_rate(world, session)
    for _ in range(WARM_UP):
        train_step(session)
    taken, stopwatch = [], Stopwatch()
    for _ in range(steps):
        world.Barrier()
        record = train_step(session)
        assert record is not None  # a study has no checkpoint to go back to
        taken.append(record)
    used = stopwatch.used()
    rank, known = session.grid.pipeline.rank, work.has_formula(session.config)
    mine = {
        "taken": [(record["seconds"], record["time"]) for record in taken],
        "received": taken[-1]["bytes_received"],
        "formula": work.received(session.config, rank) if known else None,
        "bound": work.bound(session.config, rank) if known else None,
        "memory": most_memory(session.device),
        "memory_outside": memory_outside(session.device),
        "place": (socket.gethostname(), cores.identities(os.sched_getaffinity(0)), cores.find().quota),
        "used": used,
    }
    everybody = world.allgather(mine)
    seconds = [max(other["taken"][step][0] for other in everybody) for step in range(steps)]
    parts = [part for other in everybody for _, part in other["taken"]]
    most = max(everybody, key=lambda other: sum(other["received"].values()))
    median = statistics.median(seconds)
    config = session.config
    return {
        "step_seconds": median,
        "tokens_per_second": config.train.batch * config.model.context / median,
        "flops": work.flops(config),
        "peak_flops_per_second": peak,
        "mfu": work.flops(config) / median / peak,
        "seconds": {name: statistics.fmean(part[name] for part in parts) for name in parts[0]},
        "bytes_received": most["received"],
        "bytes_formula": most["formula"],
        "bytes_bound": most["bound"],
        "memory": max(other["memory"] for other in everybody),
        "memory_outside": max(other["memory_outside"] for other in everybody),
        "oversubscribed": oversubscribed([other["place"] for other in everybody], torch.get_num_threads()),
        "cores_lacking": cores_lacking(everybody, torch.get_num_threads()),
        "hosts": sorted({other["place"][0] for other in everybody}),
        "processor": cores.processor(),
        "mpi": MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 "),
        "threads": torch.get_num_threads(),
    }


def most_memory(device: torch.device) -> int:
    """Bytes that this rank has had at most: of the device's memory, with what the allocator keeps, or the host's."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else most_resident()


def memory_outside(device: torch.device) -> int:
    """Bytes of the device's memory that somebody has besides this rank's allocator: where nobody shares the device, the
    driver's context, libraries, and NCCL's buffers."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def gemm_rate(world: MPI.Intracomm, session: Session, size: int = 1024, seconds: float = 0.3) -> float:
    """Floating-point operations a second of all ranks in matrix products at the same time: the peak there is here."""
    a = torch.ones(size, size, dtype=DTYPES[session.config.precision.compute], device=session.device)
    out = gemm.mm(a, a)
    world.Barrier()
    rates, start = [], time.perf_counter()
    while time.perf_counter() < start + seconds:
        begin = time.perf_counter()
        gemm.mm(a, a, out)
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
        rates.append(2 * size**3 / (time.perf_counter() - begin))
    return world.allreduce(statistics.median(rates))


def oversubscribed(places: list[tuple[str, list, float | None]], threads: int) -> bool:
    """Whether the threads of some host's ranks outnumber the cores that they may keep busy.

    Args:
        places: of each rank, its host, the core of each hardware thread that it may run on, and the CPU quota.

    >>> two_ranks = [("a", ["core 0", "core 1"], None)] * 2
    >>> [oversubscribed(two_ranks, threads) for threads in (1, 2)]
    [False, True]
    >>> oversubscribed([("a", ["core 0"], None)] * 2 + [("b", ["core 0", "core 1"], None)], 1)
    True
    >>> oversubscribed([("a", [f"core {n}" for n in range(8)], 3.5)] * 4, 1)
    True
    """
    hosts = [[place for place in places if place[0] == host] for host in {host for host, _, _ in places}]
    return any(len(here) * threads > _cores(here) for here in hosts)


def cores_lacking(everybody: list[dict], threads: int) -> float:
    """Of the host on which the ranks had to share most with others."""
    hosts = {rank["place"][0] for rank in everybody}
    by_host = [[rank for rank in everybody if rank["place"][0] == host] for host in hosts]
    return max(
        lacking([rank["used"] for rank in ranks], _cores([rank["place"] for rank in ranks]), threads)
        for ranks in by_host
    )


def _cores(here: list[tuple[str, list, float | None]]) -> int:
    """Cores of a host that its ranks, given by their places, may keep busy."""
    named = set().union(*(named for _, named, _ in here))
    return cores.Cores([len(named)], 0, here[0][2]).count


if __name__ == "__main__":
    sys.exit(main())
