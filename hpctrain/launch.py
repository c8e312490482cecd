"""How a rank's process begins and ends: its launcher, its threads, a user's mistake, and a failure that ends all."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from hpctrain import cores

if TYPE_CHECKING:
    from mpi4py import MPI

USAGE_ERROR = 2


def check_launcher(size: int) -> None:
    """Raise where the launcher of one MPI started the library of another, which gives worlds of one rank each."""
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"]
    if os.environ.get("SLURM_TASK_PID") == str(os.getpid()):  # else started by a shell in a step, where it may be alone
        names.append("SLURM_STEP_NUM_TASKS")
    started = next(filter(None, map(os.environ.get, names)), None)
    if started and int(started) > 1 and size == 1:
        raise RuntimeError(
            f"the launcher started {started} ranks, but MPI sees one: mpirun and the MPI library that mpi4py loaded "
            "are of different makes; use the launcher that belongs to the library (`python -m mpi4py "
            "--mpi-lib-version`), or the --mpi of srun that it knows (`srun --mpi=list`); for runs of one rank each by "
            "srun, unset SLURM_TASK_PID"
        )


def limit_threads() -> None:
    """Without OMP_NUM_THREADS, share the node's cores among its ranks; every rank taking all of them is slow."""
    if not os.environ.get("OMP_NUM_THREADS"):
        ranks = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get("MPI_LOCALNRANKS") or "1"
        os.environ["OMP_NUM_THREADS"] = str(cores.find().share(int(ranks))[0])


def complain(error: Exception, rank: int = 0, status: int = USAGE_ERROR) -> int:
    """Say a user's mistake once, on rank 0; returns the exit status."""
    if rank == 0:
        print(f"hpctrain: error: {error}", file=sys.stderr, flush=True)
    return status


def abort(world: MPI.Comm) -> NoReturn:
    """End all ranks, after this one's traceback. Waiting would hang: the others are in a collective without it."""
    print(f"hpctrain: rank {world.rank} of {world.size} failed:", file=sys.stderr)
    traceback.print_exc()
    sys.stderr.flush()
    world.Abort(1)
