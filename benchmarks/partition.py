"""Partitions of unequal layers: a step with each partitioner's, against the best of all contiguous ones.

    $MPIRUN -n 2 python -m mpi4py benchmarks/partition.py      6 layers, 5 partitions; 1 minute
    $MPIRUN -n 4 python -m mpi4py benchmarks/partition.py      7 layers, 20 partitions; 2 minutes on 4 cores
    $MPIRUN -n 4 python -m mpi4py benchmarks/partition.py --wait      the same on fewer cores

A chain of MLP layers, one of which is four times as dear, is cut by costs measured on rank 0 and run by 1F1B. All
partitions are taken in turn in the same run. Prints one JSON object a line: median milliseconds of a step (`ours`)
beside those of the partition that was the fastest (`theirs`), and what the simulator predicted for ours.

Where ranks share cores, all partitions take about as long as all their work. With --wait, layers wait where they would
compute, which needs no core: executor and messages are real, the layers are not.
"""

import argparse
import itertools
import json
import statistics
import time

import torch
from mpi4py import MPI

import hpctrain as ht
from hpctrain import comm
from hpctrain.pipeline import Executor, partition, schedule, score
from hpctrain.pipeline.profile import profile

WIDTH, ROWS, MICROBATCHES = 128, 128, 8
LAYERS = {2: 6, 4: 7}
WARM_UP = 2  # rounds


class Layer(torch.nn.Module):
    """x + W gelu(V x)."""

    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, hidden), torch.nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Waiting(torch.nn.Module):
    """Takes the time of a layer with so many hidden features, but no processor."""

    def __init__(self, hidden):
        super().__init__()
        self.seconds = hidden / WIDTH * 0.75e-3
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return _Wait.apply(x, self.weight, self.seconds)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.seconds)
        return grad, grad.sum(), None


class Chain:
    """The stage of this rank under one partition; `pipeline.executor.StageWork`."""

    def __init__(self, layers, counts, rank):
        start = sum(counts[:rank])
        self.layers, self.last = layers[start : start + counts[rank]], len(counts) - 1

    def message_spec(self, action):
        return (ROWS, WIDTH), torch.float32, torch.device("cpu")

    def forward(self, action, inputs):
        x = inputs[0] if inputs else torch.ones(ROWS, WIDTH)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() if action.stage == self.last else x


def message_seconds(axis):
    """Of an activation from rank 0 to rank 1."""
    x, times = torch.ones(ROWS, WIDTH), []
    for _ in range(20):
        axis.comm.Barrier()
        start = time.perf_counter()
        for sender in (0, 1):
            if axis.rank == sender:
                comm.send(x, axis, 1 - sender, 0)
            elif axis.rank == 1 - sender:
                comm.recv(x, axis, sender, 0)
        times.append((time.perf_counter() - start) / 2)
    return statistics.median(times)


def measured(executor, chains, rounds):
    """Median seconds of a step of each partition, taken in turn; the slowest rank counts."""
    world, times = executor.axis.comm, {counts: [] for counts in chains}
    order = list(chains.items())
    for _ in range(rounds + WARM_UP):
        order.append(order.pop(0))  # nobody is always first, as the caches are what the last one left
        for counts, chain in order:
            for layer in chain.layers:
                layer.zero_grad()
            world.Barrier()
            start = time.perf_counter()
            executor.run(chain)
            times[counts].append(world.allreduce(time.perf_counter() - start, MPI.MAX))
    return {counts: statistics.median(each[WARM_UP:]) for counts, each in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dear", type=int, nargs="*", help="numbers of the dear layer, one case each")
    parser.add_argument("--wait", action="store_true", help="layers that wait instead of computing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    grid = ht.Grid(pipeline=MPI.COMM_WORLD.size)
    axis, ranks = grid.pipeline, grid.size
    count, kind = LAYERS[ranks], Waiting if options.wait else Layer
    executor = Executor(axis, schedule("1f1b", ranks, MICROBATCHES))
    message = message_seconds(axis)
    for dear in options.dear or (1, count - 1):
        layers = torch.nn.ModuleList(kind(WIDTH * (16 if number == dear else 4)) for number in range(count))
        costs = found = None
        if axis.rank == 0:
            costs = profile(list(layers), lambda: torch.ones(ROWS, WIDTH, requires_grad=True), repeats=15)
            link = {"bandwidth": costs.message[0] / message}
            found = {name: partition(name, costs, ranks, MICROBATCHES, **link) for name in ("dp", "lp", "rl", "even")}
        found = axis.comm.bcast(found)
        cuts = itertools.combinations(range(1, count), ranks - 1)
        every = [tuple(b - a for a, b in itertools.pairwise((0, *inner, count))) for inner in cuts]
        taken = measured(executor, {counts: Chain(layers, counts, axis.rank) for counts in every}, options.rounds)
        best = min(taken, key=taken.get)
        case = f"{ranks} ranks, {kind.__name__.lower()} {dear} of {count} four times as dear"
        for name, counts in found.items():
            if axis.rank == 0:
                ours = taken[tuple(counts)]
                predicted = score(counts, costs, ranks, MICROBATCHES, **link)
                print(
                    json.dumps(
                        {
                            "benchmark": "partition",
                            "case": f"{case}: {name} {counts}",
                            "peer": f"best of all {len(every)}: {list(best)}",
                            "ours": round(1e3 * ours, 1),
                            "theirs": round(1e3 * taken[best], 1),
                            "unit": "ms",
                            "ratio": round(taken[best] / ours, 3),
                            "goal": 0.95 if name == "dp" else None,
                            "predicted": round(1e3 * predicted, 1),
                        }
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
