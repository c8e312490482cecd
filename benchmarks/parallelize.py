"""Blocks of models that people have through `ht.parallelize`, beside our own layers, others, and one process.

    PYTHONPATH=ZOO $MPIRUN -n 2 python -m mpi4py benchmarks/parallelize.py        then -n 4, -n 1; 5 minutes
    PYTHONPATH=ZOO $MPIRUN -n 2 python -m mpi4py benchmarks/parallelize.py --models llama --widths 512 --profile whole
    PYTHONPATH=ZOO $MPIRUN -n 2 python -m mpi4py benchmarks/parallelize.py --models llama --mkl

Two blocks of transformers' GPT-2 and Llama, torchvision's and timm's ViT and ResNet-50, of 1,024 tokens or pixels,
forward and backward in float32, one thread a rank; ZOO is that of benchmarks/zoo.py. Two of ours, without and with
shard_activations, are held against
    native        hpctrain's own layers, on the same grid and from the same weights; there are such GPT-2s and Llamas
                  alone
    torch         torch's `parallelize_module` over gloo, by the plan that one would write: of torchvision's ViT for its
                  MLP alone, as no style divides nn.MultiheadAttention; it divides neither Conv1D nor convolutions
    transformers  its own tp_plan="auto", which Llama alone of these has
    one process   the blocks as they are, on one rank with as many threads, while the other ranks sleep
On one rank, native beside ours is what the model's own code takes, which `parallelize` leaves as it is. With --mkl
matrix products of ours are those of torch on every processor (hpctrain/gemm.py), and there is one more of
ours: "at most", without its messages, whose numbers are wrong; with these products none can be faster.

All sides take a step in turn. Outputs and gradients of inputs are compared first. Prints one JSON object a line:
tokens/s by medians, `ratio` the median over the steps of theirs / ours in seconds, `received` the bytes that came to
the busiest rank in a step of ours, and of the native layers'.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
import warnings
from unittest import mock

import pairs
import torch
from gloo import gloo
from mpi4py import MPI
from one_process import all_cores
from parallelize_blocks import MODELS, by_torch, shared_folder
from zoo_models import tolerate_absent_operators

import hpctrain as ht
from hpctrain import gemm
from hpctrain.convert import boundary, boundary_products

WARM_UP = 4  # steps; in the first three, ranks compare what they do
GOALS = {"native": 0.95, "torch": 1.3}
OURS = {"whole": False, "divided": True}  # activations


class Side:
    """Blocks that are given an input of every token, or of `rows` of them.

    Attributes: `grid`, of ours, which counts bytes.
    """

    def __init__(self, stack, x, grid=None, rows=None):
        self.stack, self.grid, self.rows = stack, grid, rows
        generator = torch.Generator().manual_seed(1)
        self.seed = self._part(torch.randn(x.shape, generator=generator))
        self.x = self._part(x).requires_grad_()

    def _part(self, x):
        return x.clone() if self.rows is None else x.flatten(0, 1)[self.rows]

    def step(self):
        self.x.grad = None
        self.stack.zero_grad()
        y = self.stack(self.x)
        y.backward(self.seed)
        if self.rows is not None:  # norms' gradients are partial sums until then
            ht.sync_gradients(self.stack, self.grid)
        return y

    def check(self, expected):
        got = self.step().detach().clone(), self.x.grad
        for mine, theirs in zip(got, expected):
            torch.testing.assert_close(mine, self._part(theirs), rtol=1e-3, atol=1e-4)

    def seconds(self):
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        self.step()
        return MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX)

    def received(self):
        before = self.grid.transport.traffic.moved()[1]
        self.step()
        return MPI.COMM_WORLD.allreduce(self.grid.transport.traffic.moved()[1] - before, MPI.MAX)


class Computing(Side):
    """Of which every rank goes on with its own summands."""

    def step(self):
        with (
            mock.patch.object(boundary, "sum_of_all", lambda x, axis: x),
            mock.patch.object(boundary_products, "sum_of_summands", lambda summand, axis: summand.clone()),
        ):
            return super().step()


class OneProcess(Side):
    """The other ranks sleep meanwhile."""

    def seconds(self):
        MPI.COMM_WORLD.Barrier()
        taken = 0.0
        if MPI.COMM_WORLD.rank == 0:
            with all_cores():
                start = time.perf_counter()
                self.step()
                taken = time.perf_counter() - start
        done = MPI.COMM_WORLD.Ibarrier()
        while not done.Test():
            time.sleep(1e-3)
        return MPI.COMM_WORLD.bcast(taken)


def sides_of(model, x, mkl):
    """{name: side} of ours and of the peers, checked against the blocks as they are."""
    ranks = MPI.COMM_WORLD.size
    plain = OneProcess(model.stack(), x)
    expected = plain.step().detach().clone(), plain.x.grad.clone()
    sides = {}
    for name, shards in OURS.items():
        if ranks > 1 or not shards:
            grid = ht.Grid(tensor=ranks)
            sides[name] = Side(ht.parallelize(model.stack(), grid, shard_activations=shards), x, grid)
    if mkl:
        sides["at most"] = Computing(ht.parallelize(model.stack(), ht.Grid(tensor=ranks), check_steps=0), x)
    if model.native:
        grid = ht.Grid(tensor=ranks)
        stack, rows = model.native(grid)
        sides["native"] = Side(stack, x, grid, rows)
    if model.plan and ranks > 1:
        sides["torch"] = Side(by_torch(model.stack(), model.plan), x)
    if model.auto and ranks > 1:
        sides["transformers"] = Side(model.auto(), x)
    for name, side in sides.items():
        if name != "at most":
            side.check(expected)
    return {**sides, "one process": plain}


def compared(case, sides, tokens, steps, products):
    """One line for each of ours and peer."""
    times = {name: [] for name in sides}
    for _ in range(WARM_UP + steps):
        for name, side in sides.items():
            times[name].append(side.seconds())
    times = {name: taken[WARM_UP:] for name, taken in times.items()}
    received = {name: side.received() for name, side in sides.items() if side.grid}
    every = [name for name in (*OURS, "at most") if name in sides]
    for ours in every:
        for peer in (name for name in sides if name not in every):
            speeds = [round(tokens / statistics.median(times[name])) for name in (ours, peer)]
            yield {
                "benchmark": "parallelize",
                "case": f"{case}, activations {ours}{products}, {MPI.COMM_WORLD.size} ranks",
                "peer": peer, "ours": speeds[0], "theirs": speeds[1], "unit": "tokens/s",
                **pairs.compared(times[ours], times[peer]), "goal": GOALS.get(peer),
                "received": [received.get(ours), received.get(peer)],
            }  # fmt: skip


def profile(side, steps):
    """Prints what the Python code of the first rank takes."""
    found = cProfile.Profile(time.process_time)
    for _ in range(WARM_UP):
        side.step()
    for _ in range(steps):
        MPI.COMM_WORLD.Barrier()
        found.enable()
        side.step()
        found.disable()
    if MPI.COMM_WORLD.rank == 0:
        pstats.Stats(found).sort_stats("tottime").print_stats(40)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="of: " + ", ".join(MODELS))
    parser.add_argument("--widths", default="512,1024")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", help="a side, as whole or divided: where its time goes, instead of figures")
    parser.add_argument("--mkl", action="store_true", help="the same matrix products on all sides")
    options = parser.parse_args()
    if options.mkl:
        gemm.is_faster = lambda: False
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    tolerate_absent_operators()
    with gloo(), shared_folder() as folder:
        for name in options.models.split(","):
            for width in map(int, options.widths.split(",")):
                model = MODELS[name](width, folder / f"{name} {width}")
                x = torch.randn(model.shape, generator=torch.Generator().manual_seed(0))
                sides = sides_of(model, x, options.mkl)
                if options.profile:
                    profile(sides[options.profile], options.steps)
                    continue
                products = " by MKL" * options.mkl
                for line in compared(f"{name}, width {width}", sides, x.numel() // width, options.steps, products):
                    if MPI.COMM_WORLD.rank == 0:
                        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
