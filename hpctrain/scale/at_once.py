"""Seconds of training steps of several models, where every rank of this MPI job trains its own, and all train one.

`hpctrain machine` starts it:   mpirun -n N python -m mpi4py -m hpctrain.scale.at_once OUT.json STEPS JOBS.json

JOBS.json has settings of those that ranks train `alone` and of those that they train `together`. Alone nothing is
exchanged, so that only what the ranks of a node share, cores, caches and memory, makes them slower than one by itself:
of a CPU it is CPU seconds, times the ranks of a core, as `hpctrain.plan.measure` counts them. Together they wait for
one another, by the clock.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpctrain.comm.buffers import operation
from hpctrain.config import load_config
from hpctrain.grid import Grid
from hpctrain.launch import abort, check_launcher
from hpctrain.plan.computing import of_a_core
from hpctrain.train.loop import train_step
from hpctrain.train.session import build

if TYPE_CHECKING:
    from mpi4py import MPI

WARM_UP = 3  # steps


def main() -> int:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    out, steps, jobs = sys.argv[1:]
    try:
        check_launcher(world.size)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        settings = json.loads(Path(jobs).read_text())
        found = {
            "alone": alone(settings["alone"], int(steps), Path(out).parent, world),
            "together": together(settings["together"], int(steps), Path(out).parent, world),
        }
        if world.rank == 0:
            Path(out).write_text(json.dumps(found))
    except BaseException:
        abort(world)
    return 0


def alone(jobs: list[list[str]], steps: int, folder: Path, world: MPI.Intracomm) -> list[float]:
    """Of a step of each job. All ranks must see `folder`, in which each has one of its own."""
    from mpi4py import MPI

    with Grid(world.size, comm=world) as grid:
        share = of_a_core(grid)
    own = folder / f"{world.rank}-of-{world.size}"
    return [share * _step(job, number, steps, own, MPI.COMM_SELF, world) for number, job in enumerate(jobs)]


def together(jobs: list[list[str]], steps: int, folder: Path, world: MPI.Intracomm) -> list[float]:
    """The same where all ranks train one model."""
    own = folder / f"all-of-{world.size}"
    return [_step(job, number, steps, own, world, world) for number, job in enumerate(jobs)]


def _step(job: list[str], number: int, steps: int, own: Path, ranks: MPI.Intracomm, world: MPI.Intracomm) -> float:
    """Seconds of the slowest rank; the lower quartile, as others only add to a time."""
    own.mkdir(exist_ok=True)
    places = [f"data.path={own / 'data.h5'}", f"run.out={own}", f"run.name={number}"]
    session = build(load_config(overrides=[*job, *places]), ranks)
    lonely = ranks.size == 1 and session.device.type == "cpu"
    clock = time.thread_time if lonely else time.perf_counter
    for _ in range(WARM_UP):
        train_step(session)
    taken = []
    for _ in range(steps):
        world.Barrier()
        start = clock()
        train_step(session)
        taken.append(world.allreduce(clock() - start, op=operation("max")))
    session.grid.free()
    return statistics.quantiles(taken, method="inclusive")[0]


if __name__ == "__main__":
    sys.exit(main())
