"""Train the same GPT in a pipeline with hpctrain and with others, step by step in turn; then hold memory and step time
against the simulator.

    $MPIRUN -n 2 python -m mpi4py benchmarks/pipeline.py                         everything; 6 minutes
    $MPIRUN -n 2 python -m mpi4py benchmarks/pipeline.py --peers torch --seconds 30 --only compare

Peers: torch.distributed.pipelining over gloo, and DeepSpeed's PipelineModule, which is looked for on PYTHONPATH:

    pip install --no-deps --target ~/deepspeed deepspeed==0.19.8 einops hjson msgpack ninja psutil py-cpuinfo
    PYTHONPATH=~/deepspeed $MPIRUN -n 2 python -m mpi4py benchmarks/pipeline.py

Model, batch and optimizer are those of benchmarks/peers.py, embeddings untied, in 4 microbatches. All sides live in the
same processes, one BLAS thread each, and have the same initial weights, microbatches and blocks a stage. A round is one
step of every entry; `ratio` is the median over the rounds of theirs / ours in seconds, `least` their fastest step by
our fastest, which others on the machine disturb least. `ours` and `theirs` are medians. "best" takes of each side the
entry with the fastest step, of those that hold every weight once: Chimera has two copies of the model.
Prints one JSON object a line.

The lines of memory and time have the simulator's prediction as `theirs`, in MiB on the rank that holds most and in ms;
`ratio` is predicted / measured. The step is the fastest one, costs are those of the fastest forward, backward, …:
what others do to the machine only ever adds to a time. The memory measured is every tensor that is alive on a rank
at the end of a forward, buffers of the executor's pool included, and that was not there before the step (weights, their
gradients).
"""

import argparse
import contextlib
import json
import statistics
import sys
import time

import pairs
import torch
from gloo import gloo
from mpi4py import MPI
from peers import HEADS, LAYERS, SHAPES, VOCABULARY
from pipeline_costs import peak_bytes, stage_costs
from pipeline_torch import torch_pipelining

import hpctrain as ht
from hpctrain.layers import Tokens
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.pipeline import schedule
from hpctrain.train.batches import Microbatch
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.trainer import Trainer

MICROBATCHES, WARM_UP, TURNS = 4, 2, 3
SIZES = SHAPES["base"]
SHAPE = GPT2Shape(LAYERS, SIZES["width"], HEADS, SIZES["context"], VOCABULARY, tied=False)
CUTS = {2: [(2, 2), (3, 1)], 4: [(1, 1, 1, 1)]}  # of as many stages; the head costs as much as a block and a half
OURS = ("gpipe", "1f1b", "zb-h1", "chimera", "interleaved", "zb-v")
TWICE = ("chimera",)  # these hold every weight on two ranks
PEERS = {"torch": ("gpipe", "1f1b", "interleaved", "zb-v"), "deepspeed": ("1f1b",)}
NAMES = {"torch": "torch pipelining", "deepspeed": "DeepSpeed PipelineModule"}


def deepspeed(*arguments):
    """Loads DeepSpeed, which may not be there and takes seconds, when it is asked for. It prints."""
    with contextlib.redirect_stdout(sys.stderr):
        from pipeline_deepspeed import deepspeed_pipeline

        return deepspeed_pipeline(*arguments)


MAKERS = {"torch": torch_pipelining, "deepspeed": deepspeed}


class Ours:
    """hpctrain's side of one schedule and cut."""

    def __init__(self, grid, name, cut, batch):
        self.schedule = schedule(name, grid.pipeline.size, MICROBATCHES)
        self.model = GPT2(grid, SHAPE, cut, placement=self.schedule.placement, key=ht.RngKey(0), dtype=torch.float32)
        self.trainer = Trainer(self.model, grid, make_optimizer(self.model.parameters(), 0.01), self.schedule)
        rows, length = batch.shape[0] // MICROBATCHES, batch.shape[1] - 1
        self.microbatches = [
            Microbatch(
                Tokens.of(grid, rows, length, m * rows), part[:, :-1].reshape(-1), part[:, 1:].reshape(-1), scale
            )
            for scale in (1 / (len(batch) * length),)
            for m, part in enumerate(batch.split(rows))
        ]

    def step(self):
        return self.trainer.step(self.microbatches)[0] / self.schedule.ranks  # every rank has the loss


def rounds(seconds, sides):
    """{entry: seconds of every step}, of the slowest rank, and {entry: losses}; one step of each entry in turn, after
    rounds to warm up at least 3 times, until the time is over."""
    world = MPI.COMM_WORLD
    times, losses = {entry: [] for entry in sides}, {entry: [] for entry in sides}
    end = time.perf_counter() + seconds
    while len(losses[next(iter(sides))]) < WARM_UP + 3 or world.bcast(time.perf_counter() < end):
        for entry, step in sides.items():
            world.Barrier()
            start = time.perf_counter()
            loss = step()
            times[entry].append(world.allreduce(time.perf_counter() - start, MPI.MAX))
            losses[entry].append(world.allreduce(loss))
    return {entry: each[WARM_UP:] for entry, each in times.items()}, losses


def entries(names):
    """(schedule, cut) of every cut there is."""
    for name in names:
        placement = schedule(name, MPI.COMM_WORLD.size, MICROBATCHES).placement
        stages = 1 + max(stage for _, stage in placement)
        yield from ((name, cut) for cut in CUTS[stages])


def compare(grid, batch, peers, seconds):
    """Lines of tokens a second.

    Raises:
        RuntimeError: when first losses differ, so that two sides do not train the same model.
    """
    alone = GPT2(ht.Grid(comm=MPI.COMM_SELF), SHAPE, key=ht.RngKey(0), dtype=torch.float32)
    weights = {name: p.detach().clone() for name, p in alone.named_parameters()}
    sides, absent = {}, {}
    for peer in ("ours", *peers):
        for name, cut in entries(OURS if peer == "ours" else PEERS[peer]):
            if peer == "ours":
                sides[peer, name, cut] = Ours(grid, name, cut, batch).step
                continue
            made = schedule(name, grid.pipeline.size, MICROBATCHES)
            try:
                sides[peer, name, cut] = MAKERS[peer](name, weights, HEADS, cut, made.placement, batch, MICROBATCHES)
            except ImportError as error:
                absent[peer] = str(error)
    sides = dict(sorted(sides.items(), key=lambda side: side[0][1:]))  # what is compared, one after the other
    times, losses = rounds(seconds, sides)
    expected = losses["ours", "1f1b", CUTS[2][0]]
    for entry, (first, *_) in losses.items():
        if not abs(first - expected[0]) < 1e-5 * expected[0]:
            raise RuntimeError(f"the first loss differs: {first} of {entry}, {expected[0]} of ours")
    tokens = batch.shape[0] * (batch.shape[1] - 1)

    def line(case, peer, mine, theirs, goal):
        mine, theirs = times[mine], times[theirs]
        return {
            "case": case,
            "peer": peer,
            "ours": round(tokens / statistics.median(mine)),
            "theirs": round(tokens / statistics.median(theirs)),
            "unit": "tokens/s",
            **pairs.compared(mine, theirs),
            "least": round(min(theirs) / min(mine), 3),
            "goal": goal,
        }

    for peer, name, cut in times:
        if peer != "ours":
            theirs = peer, name, cut
            differ = [abs(losses[theirs][i] - losses["ours", name, cut][i]) / expected[i] for i in (0, -1)]
            made = line(_case(name, cut), NAMES[peer], ("ours", name, cut), theirs, 1.0)
            yield made | {"losses_differ": [float(f"{difference:.1e}") for difference in differ]}
        elif all((other, name, cut) not in times for other in peers):
            mine = times[peer, name, cut]
            found = {"ours": round(tokens / statistics.median(mine)), "unit": "tokens/s"}
            yield {"case": _case(name, cut), "peer": None} | found | {"fastest step": round(min(mine), 3)}
    once = [entry for entry in times if entry[1] not in TWICE]
    best = {
        side: min((e for e in once if (e[0] == "ours") == (side == "ours")), key=lambda e: min(times[e]))
        for side in ("ours", "theirs")
    }
    (_, *mine), (peer, *theirs) = best.values()
    yield line(f"best: {_case(*mine)}", f"best: {NAMES[peer]} {_case(*theirs)}", *best.values(), 1.05)
    yield from ({"case": "all", "peer": NAMES[peer], "absent": reason} for peer, reason in absent.items())


def _case(name, cut):
    return f"{name}, blocks {'+'.join(map(str, cut))}, {MPI.COMM_WORLD.size} ranks"


def predict(grid, batch, seconds):
    """Lines of the simulator's memory and step time beside what is measured."""
    for name, cut in entries(OURS):
        side, steps, predicted = Ours(grid, name, cut, batch), [], []
        for _ in range(TURNS):  # the machine's speed drifts
            steps += rounds(seconds / TURNS, {name: side.step})[0][name]
            made, costs = stage_costs(side)
            predicted.append(made.simulate(costs))
        peaks = MPI.COMM_WORLD.allgather(peak_bytes(side))
        held = max(range(len(peaks)), key=peaks.__getitem__)
        simulated = min(predicted, key=lambda each: each.makespan)
        for what, unit, mine, theirs, goal in (
            ("peak activation memory", "MiB", peaks[held] / 2**20, simulated.peak[held] / 2**20, 0.05),
            ("step time", "ms", min(steps) * 1e3, simulated.makespan * 1e3, 0.1),
        ):
            yield {
                "case": f"{what}, {_case(name, cut)}",
                "peer": "simulator",
                "ours": round(mine, 1),
                "theirs": round(theirs, 1),
                "unit": unit,
                "ratio": round(theirs / mine, 3),
                "goal": f"within {goal:.0%} of 1",
            }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(PEERS), help="of: " + ", ".join(PEERS))
    parser.add_argument("--only", choices=["compare", "predict"])
    parser.add_argument("--seconds", type=float, help="of steps, for each part; 120 to compare, 6 for each prediction")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    if world.size != 2:
        raise SystemExit(f"the cuts are for 2 ranks, got {world.size}")
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(VOCABULARY, (SIZES["batch"], SIZES["context"] + 1), generator=generator)
    grid = ht.Grid(pipeline=world.size)
    lines = []
    if options.only != "predict":
        lines.append(compare(grid, batch, options.peers.split(","), options.seconds or 120))
    if options.only != "compare":
        lines.append(predict(grid, batch, options.seconds or 6))
    with gloo():
        for part in lines:
            for line in part:
                if world.rank == 0:
                    print(json.dumps({"benchmark": "pipeline"} | line), flush=True)


if __name__ == "__main__":
    main()
