"""Seconds of training steps of several models, one after another, where every rank of this MPI job trains its own.

`hpctrain machine` starts it:   mpirun -n N python -m mpi4py -m hpctrain.scale.at_once OUT.json STEPS JOBS.json

Nothing is exchanged, so that only what the ranks of a node share, cores, caches and memory, makes them slower than one
alone. Of a CPU it is CPU seconds, times the ranks of a core, as `hpctrain.plan.measure` counts them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from hpctrain.comm.buffers import operation
from hpctrain.config import load_config
from hpctrain.grid import Grid
from hpctrain.launch import abort, check_launcher
from hpctrain.plan.computing import of_a_core
from hpctrain.train.loop import train_step
from hpctrain.train.session import build

WARM_UP = 3  # steps


def main() -> int:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    out, steps, jobs = sys.argv[1:]
    try:
        check_launcher(world.size)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        with Grid(world.size, comm=world) as grid:
            share = of_a_core(grid)
        found = []
        for number, overrides in enumerate(json.loads(Path(jobs).read_text())):
            folder = Path(out).parent / f"{world.rank}-of-{world.size}"
            own = [f"data.path={folder / 'data.h5'}", f"run.out={folder}", f"run.name={number}"]
            folder.mkdir(exist_ok=True)
            taken = _steps(load_config(overrides=[*overrides, *own]), int(steps), world)
            found.append(share * world.allreduce(taken, op=operation("max")))
        if world.rank == 0:
            Path(out).write_text(json.dumps({"steps": found}))
    except BaseException:
        abort(world)
    return 0


def _steps(config, steps, world) -> float:
    """The lower quartile, as others only add to a time."""
    from mpi4py import MPI

    session = build(config, MPI.COMM_SELF)
    clock = time.thread_time if session.device.type == "cpu" else time.perf_counter
    for _ in range(WARM_UP):
        train_step(session)
    taken = []
    for _ in range(steps):
        world.Barrier()
        start = clock()
        train_step(session)
        taken.append(clock() - start)
    session.grid.free()
    return statistics.quantiles(taken, method="inclusive")[0]


if __name__ == "__main__":
    sys.exit(main())
