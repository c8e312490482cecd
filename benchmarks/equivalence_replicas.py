"""Train by every replica method on every grid and compare losses and gradient norms with one rank's.

    $MPIRUN -n 8 python -m mpi4py benchmarks/equivalence_replicas.py      every grid of 8; 20 minutes on 2 cores
    $MPIRUN -n 4 python -m mpi4py benchmarks/equivalence_replicas.py      every grid of 4; 3 minutes
    $MPIRUN -n 4 python -m mpi4py benchmarks/equivalence_replicas.py --methods zero3 --accumulate 3 --clip 0.3

Each grid and method is tried with 1, 2 and 3 accumulated microbatches, with and without clipping, in float64 for three
steps of a GPT of which nothing divides (width 15, 3 heads, vocabulary 23, one layer more than stages), with tied
weights, dropout and a batch of 5, so that of 8 replicas some have nothing. AdamW; SGD for local SGD, which averages
after every step and does not clip, and whose losses are those of each replica's own weights and so equal the serial
ones alone. The parameter server has one place of the data axis for itself.

Prints one JSON object for each grid and method; exits with 1 when any relative difference exceeds 1e-10.
"""

import argparse
import functools
import itertools
import json
import sys

import torch
from mpi4py import MPI

import hpctrain as ht
from hpctrain import data_parallel
from hpctrain.choices import STRATEGIES
from hpctrain.config import DataParallelConfig
from hpctrain.grid_shape import all_grids
from hpctrain.layers import Tokens
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.shard import split, subsplit
from hpctrain.train.batches import Microbatch
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.trainer import Trainer

GOAL = 1e-10
STEPS, BATCH, LENGTH = 3, 5, 7
TOKENS = torch.randint(23, (STEPS, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(5))


def microbatches(grid, step, count, idle):
    """This rank's part of a step's batch; none for the last `idle` ranks of the data axis."""
    working = grid.data.size - idle
    mine = split(BATCH, working, grid.data.rank) if grid.data.rank < working else slice(0, 0)
    for part in (subsplit(mine, count, m) for m in range(count)):
        tokens = Tokens.of(grid, part.stop - part.start, LENGTH, part.start, step)
        rows = TOKENS[step, tokens.first : tokens.first + tokens.sequences]
        targets = TOKENS[step, tokens.inner.start : tokens.inner.stop, 1:].reshape(-1)
        yield Microbatch(tokens, rows[:, :-1].reshape(-1), targets, 1 / (BATCH * LENGTH))


def trained(grid, method, layers, count, clip):
    """Losses and gradient norms of all steps."""
    shape = GPT2Shape(layers=layers, width=15, heads=3, context=8, vocabulary=23, dropout=0.1)
    model = GPT2(grid, shape, key=ht.RngKey(3), dtype=torch.float64)
    optimizer = (
        torch.optim.SGD(model.parameters()) if method == "local_sgd" else make_optimizer(model.parameters(), 0.1)
    )
    how = data_parallel.make(DataParallelConfig(method=method, average_every=1), model, grid, optimizer)
    trainer = Trainer(model, grid, optimizer, count, max_norm=clip, strategy=how)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    idle = getattr(how, "servers", 0)
    got = [trainer.step(list(microbatches(grid, step, count, idle))) for step in range(STEPS)]
    return [loss for loss, _ in got] + ([norm for _, norm in got] if method != "local_sgd" else [])


@functools.cache
def serial(local, layers, clip):
    alone = ht.Grid(comm=MPI.COMM_SELF)
    return trained(alone, "local_sgd" if local else "ddp", layers, 1, clip)


def difference(grid, method, count, clip):
    layers = grid.pipeline.size + 1
    expected = serial(method == "local_sgd", layers, clip)
    got = trained(grid, method, layers, count, clip)
    return max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(STRATEGIES))
    parser.add_argument("--accumulate", default="1,2,3")
    parser.add_argument("--clip", default="0,0.3")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts, clips = [int(n) for n in options.accumulate.split(",")], [float(n) for n in options.clip.split(",")]
    worst = 0.0
    for data, pipeline, tensor in all_grids(MPI.COMM_WORLD.size):
        grid = ht.Grid(data, pipeline, tensor)
        for method in options.methods.split(","):
            if method == "parameter_server" and data == 1:
                continue
            cases = [(n, clip) for n, clip in itertools.product(counts, clips) if not clip or method != "local_sgd"]
            largest = max(difference(grid, method, *case) for case in cases)
            worst = max(worst, largest)
            if MPI.COMM_WORLD.rank == 0:
                result = {
                    "benchmark": "equivalence_replicas",
                    "case": f"{method}, data {data}, pipeline {pipeline}, tensor {tensor}",
                    "runs": len(cases),
                    "largest_relative_difference": largest,
                    "goal": GOAL,
                }
                print(json.dumps(result), flush=True)
    return int(worst > GOAL)


if __name__ == "__main__":
    sys.exit(main())
