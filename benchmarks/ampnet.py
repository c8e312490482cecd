"""Train the same GPT by AMPNet, by the flushed pipeline (1F1B) and by PipeDream, step by step in turn.

    $MPIRUN -n 2 python -m mpi4py benchmarks/ampnet.py                  4 minutes; then -n 4
    $MPIRUN -n 2 python -m mpi4py benchmarks/ampnet.py --seconds 20

4 layers of width 128, 8 microbatches of 2 sequences of bytes of this repository's texts: all of 64 tokens ("fixed"), or
of 8 to 120, as many in all ("variable"). A step is 8 microbatches; 1F1B updates once in it, PipeDream and AMPNet after
each microbatch, or AMPNet too after all ("one update"). AdamW; initial weights and data are the same.

Prints one JSON object a line. Throughput: `ratio` is the median over the rounds of theirs / ours in seconds, ours being
AMPNet's, above 1 where it is faster. Occupancy: of each rank, the part of the time in which it did not wait for a
message. Loss: the steps, 60 at most, until the mean loss of 4 is below 3.3 nats a token.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import pairs
import torch
from mpi4py import MPI

import hpctrain as ht
from hpctrain.layers import Tokens
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.pipeline import schedule
from hpctrain.train.batches import Microbatch
from hpctrain.train.optimizer import make_optimizer

SHAPE = GPT2Shape(layers=4, width=128, heads=4, context=128, vocabulary=257, tied=False)
COUNT, SEQUENCES = 8, 2
LENGTHS = {"fixed": [64] * COUNT, "variable": [120, 8, 64, 16, 100, 40, 124, 40]}
GOAL, WINDOW, MOST = 3.3, 4, 60
WARM_UP = 2
ROOT = Path(__file__).parents[1]


def sides(ranks):
    """{name: schedule}"""
    made = {"1f1b": schedule("1f1b", ranks, COUNT), "pipedream": schedule("pipedream", ranks, COUNT)}
    for keys in (ranks, 2 * ranks):
        made[f"ampnet, {keys} keys"] = schedule("ampnet", ranks, COUNT, max_active_keys=keys)
    one = {"max_active_keys": 2 * ranks, "min_update_frequency": COUNT}
    made[f"ampnet, {2 * ranks} keys, one update"] = schedule("ampnet", ranks, COUNT, **one)
    return made


class Side:
    """A model and its trainer."""

    def __init__(self, grid, order, lengths):
        self.grid, self.order, self.lengths = grid, order, lengths
        self.model = GPT2(grid, SHAPE, None, order.placement, key=ht.RngKey(0), dtype=torch.float32)
        self.trainer = ht.Trainer(self.model, grid, make_optimizer(self.model.parameters(), 0.1), order)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = 1e-3

    def microbatches(self, text, step):
        """Of the text, other ones for every step."""
        generator, made = torch.Generator().manual_seed(step), []
        targets = {m: sum(self.lengths[other] for other in group) for group in self.order.updates for m in group}
        for m, length in enumerate(self.lengths):
            starts = torch.randint(len(text) - length - 1, (SEQUENCES,), generator=generator).tolist()
            rows = torch.stack([text[start : start + length + 1] for start in starts])
            tokens = Tokens.of(self.grid, SEQUENCES, length)
            ids, wanted = rows[:, :-1].reshape(-1), rows[:, 1:].reshape(-1)
            made.append(Microbatch(tokens, ids, wanted, 1 / (SEQUENCES * targets[m])))
        return made

    def step(self, text, number):
        """(seconds of the slowest rank, loss, occupancy by rank)"""
        microbatches, traffic = self.microbatches(text, number), self.grid.transport.traffic
        traffic.clear()
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        loss, _ = self.trainer.step(microbatches)
        seconds = time.perf_counter() - start
        waited = sum(s for (axis, name), s in traffic.seconds().items() if (axis, name[:4]) == ("pipeline", "recv"))
        waits = MPI.COMM_WORLD.allgather(1 - waited / seconds)
        return MPI.COMM_WORLD.allreduce(seconds, MPI.MAX), loss, waits


def throughput(grid, text, case, seconds):
    """Lines of AMPNet beside the others, and of everybody's occupancy."""
    made = {name: Side(grid, order, LENGTHS[case]) for name, order in sides(grid.pipeline.size).items()}
    found = {name: [] for name in made}
    end = time.perf_counter() + seconds
    for number in itertools.count():
        if number > WARM_UP + 3 and not MPI.COMM_WORLD.bcast(time.perf_counter() < end):
            break
        for name, side in made.items():
            found[name].append(side.step(text, number))
    tokens = SEQUENCES * sum(LENGTHS[case])
    times = {name: [each[0] for each in steps[WARM_UP:]] for name, steps in found.items()}
    for name, peer in itertools.product(made, ("1f1b", "pipedream")):
        if name.startswith("ampnet"):
            yield {
                "case": f"{case} lengths, {name}, {grid.pipeline.size} ranks", "peer": peer,
                "ours": round(tokens / statistics.median(times[name])),
                "theirs": round(tokens / statistics.median(times[peer])), "unit": "tokens/s",
                **pairs.compared(times[name], times[peer]), "goal": 1.0,
            }  # fmt: skip
    for name, steps in found.items():
        waits = [statistics.median(part) for part in zip(*(each[2] for each in steps[WARM_UP:]))]
        yield {
            "case": f"occupancy, {case} lengths, {name}, {grid.pipeline.size} ranks", "peer": None,
            "occupancy": [round(part, 2) for part in waits],
        }  # fmt: skip


def steps_to_goal(grid, text, case):
    """Lines of the steps that each takes to the same loss, and their seconds."""
    for name, order in sides(grid.pipeline.size).items():
        side, losses, total = Side(grid, order, LENGTHS[case]), [], 0.0
        for number in range(MOST):
            seconds, loss, _ = side.step(text, number)
            losses.append(loss)
            total += seconds
            if statistics.mean(losses[-WINDOW:]) < GOAL and number >= WINDOW:
                break
        reached = statistics.mean(losses[-WINDOW:])
        yield {
            "case": f"loss {GOAL}, {case} lengths, {name}, {grid.pipeline.size} ranks", "peer": None,
            "steps": len(losses), "loss": round(reached, 3), "seconds": round(total, 1),
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of steps of each of the two cases")
    options = parser.parse_args()
    torch.set_num_threads(1)
    files = sorted(ROOT.glob("hpctrain/**/*.md"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    grid = ht.Grid(pipeline=MPI.COMM_WORLD.size)
    parts = [throughput(grid, text, case, options.seconds) for case in LENGTHS]
    parts.append(steps_to_goal(grid, text, "fixed"))
    for line in itertools.chain(*parts):
        if grid.rank == 0:
            print(json.dumps({"benchmark": "ampnet"} | line), flush=True)


if __name__ == "__main__":
    main()
