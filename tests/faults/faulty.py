"""Runs the statements of the first argument on every rank, in which things can be broken and jobs trained:

train("run.name=a", ...)    `hpctrain train` with the configuration and settings given after the statements, and
                            these; prints its status; its last one is that of this program
patch(owner, name, make)    replace a function by make(the function)
at_step(n, act)             call act(trainer, batches) before a trainer's n-th step, counted from now; what it
                            returns, if anything, takes the place of the batches
rank, barrier(), runs       this rank, all ranks' barrier, and the folder of runs
"""

import gc
import os
import sys
from pathlib import Path

from hpctrain import cli

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
status = 0
# mpirun forwards the two by ways of their own, so that what is said in one order may be read in another
sys.stdout.reconfigure(line_buffering=True)
os.dup2(1, 2)


def train(*overrides):
    global status
    status = cli.main(["train", *sys.argv[2:], *overrides])
    if rank == 0:
        print("=== status", status, *overrides, flush=True)
    gc.collect()  # with the job goes its lock on the run folder
    barrier()


def barrier():
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()


def patch(owner, name, make):
    setattr(owner, name, make(getattr(owner, name)))


def at_step(number, act):
    from hpctrain.train.trainer import Trainer

    taken = []

    def counting(step):
        def counted(self, batches):
            taken.append(1)
            if len(taken) == number:
                batches = act(self, batches) or batches
            return step(self, batches)

        return counted

    patch(Trainer, "forward_backward", counting)


if __name__ == "__main__":
    runs = Path(sys.argv[2]).parent / "runs"
    exec(sys.argv[1])
    sys.exit(status)
