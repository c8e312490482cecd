"""What the overlaps of `tensor.overlap` hide of a GPT's communication: each alone and all together, against none.

    $MPIRUN -n 2 python -m mpi4py benchmarks/overlap.py        boxes (2, 1, 1) and (1, 1, 2); 3 minutes
    $MPIRUN -n 4 python -m mpi4py benchmarks/overlap.py        box (2, 1, 2); 3 minutes

A training step (2 layers, width 512, 2 microbatches of 2 sequences of 64) is taken in turn without overlaps, with those
that the box has room for, as its communication alone and as its computation alone. Prints one JSON object a line:
median seconds of the slowest rank, and `hidden` = (sequential - overlapped) / min(communication, computation), negative
where the overlap costs time. The case "none" has the sequential step on both sides and shows how far to trust the
others. "weight_gradient" hides nothing: it saves one of the two sums of the weights' gradients.

The communication alone is that of a recorded step, call by call on the same sizes; the computation alone is the step
with every call answered by what was recorded. Panels of weights, which travel by messages beside the product that takes
them, are part of its computation.
"""

import argparse
import json
import statistics
import time
from itertools import combinations, product

import torch
from mpi4py import MPI

import hpctrain as ht
from hpctrain import comm
from hpctrain.choices import OVERLAPS
from hpctrain.comm import collectives, reductions, rooted
from hpctrain.comm.message_workspace import MessageWorkspace
from hpctrain.comm.shared_memory_workspace import SharedMemoryWorkspace
from hpctrain.comm.workspace import LocalWorkspace
from hpctrain.layers import Tokens, algorithm_of
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.train.batches import Microbatch
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.trainer import Trainer

SHAPE = GPT2Shape(layers=2, width=512, heads=8, context=64, vocabulary=1024)
BOXES = [(2, 1, 1), (1, 1, 2), (2, 1, 2)]
MICROBATCHES, SEQUENCES = 2, 2
WARM_UP = 2  # steps
MODULES = {
    reductions: ("all_reduce",),
    collectives: ("all_gather", "reduce_scatter", "all_to_all"),
    rooted: ("broadcast",),
}
WORKSPACES = LocalWorkspace, SharedMemoryWorkspace, MessageWorkspace


class Tape:
    """The communication calls of a step, to be made again without the computation, or answered without being made."""

    def __init__(self):
        self.mode, self.calls, self.position = "pass", [], 0
        for module, names in MODULES.items():
            for name in names:
                wrapped = self._wrapped(getattr(module, name))
                setattr(module, name, wrapped)
                setattr(comm, name, wrapped)
        for kind, name in product(WORKSPACES, ("gather", "reduce")):
            setattr(kind, name, self._wrapped(getattr(kind, name)))

    def _wrapped(self, call):
        def wrapper(*arguments):
            if self.mode == "answer":
                tensor, result = self.calls[self.position % len(self.calls)][2:]
                self.position += 1
                return result if result is not None else arguments[tensor]
            result = call(*arguments)
            if self.mode == "record":
                at = next(i for i, argument in enumerate(arguments) if isinstance(argument, torch.Tensor))
                copies = [torch.zeros_like(a) if isinstance(a, torch.Tensor) else a for a in arguments]
                # a result that is an argument is returned as such, so that what is written in place stays there
                kept = None if result.data_ptr() == arguments[at].data_ptr() else result.clone()
                self.calls.append((call, copies, at, kept))
            return result

        return wrapper

    def replay(self):
        for call, arguments, _, _ in self.calls:
            if call.__name__ == "reduce" and isinstance(arguments[0], WORKSPACES):
                workspace, buffer, counts = arguments
                call(workspace, workspace.buffer(buffer.numel(), buffer), counts)
            else:
                call(*arguments)

    def during(self, mode, step):
        def run():
            self.mode, self.position = mode, 0
            step()
            self.mode = "pass"

        return run


def training_step(box, windows, overlap):
    grid = ht.Grid(tensor=box)
    if not windows:
        for axis in (grid.plane(*names) for count in (1, 2, 3) for names in combinations("xyz", count)):
            axis.one_node = False
    model = GPT2(grid, SHAPE, algorithm=algorithm_of(grid, "agarwal", overlap), key=ht.RngKey(0), dtype=torch.float32)
    trainer = Trainer(model, grid, make_optimizer(model.parameters(), 0.01), MICROBATCHES)
    generator = torch.Generator().manual_seed(0)
    microbatches = []
    for m in range(MICROBATCHES):
        tokens = Tokens.of(grid, SEQUENCES, SHAPE.context, m * SEQUENCES)
        batch = torch.randint(SHAPE.vocabulary, (SEQUENCES, SHAPE.context + 1), generator=generator)
        start = tokens.first - m * SEQUENCES
        rows = batch[start : start + tokens.sequences]
        scale = 1 / (MICROBATCHES * SEQUENCES * SHAPE.context)
        microbatches.append(Microbatch(tokens, rows[:, :-1].reshape(-1), rows[:, 1:].reshape(-1), scale))
    return lambda: trainer.step(microbatches)


def seconds(steps, sides):
    """Median seconds of a step of each side, taken in turn; the slowest rank counts."""
    times, order = {name: [] for name in sides}, list(sides.items())
    for _ in range(steps + WARM_UP):
        order.append(order.pop(0))  # nobody is always first, as the caches are what the last one left
        for name, step in order:
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            step()
            times[name].append(MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX))
    return {name: statistics.median(each[WARM_UP:]) for name, each in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    world, tape = MPI.COMM_WORLD, Tape()
    for box in BOXES:
        if box[0] * box[1] * box[2] != world.size:
            continue
        for windows in (True, False):
            sides = {name: training_step(box, windows, overlap) for name, overlap in sets(box).items()}
            alone = training_step(box, windows, ())
            alone()
            tape.calls.clear()
            tape.during("record", alone)()
            parts = {"communication": tape.replay, "computation": tape.during("answer", alone)}
            taken = seconds(steps, {**sides, **parts})
            for name in sets(box):
                if world.rank == 0 and name != "sequential":
                    print(json.dumps(result(box, windows, name, taken)), flush=True)


def sets(box):
    """The overlaps that there is communication for on this box, each alone and all together, by name."""
    x, y, z = box
    possible = [name for name in OVERLAPS if (x * y if name == "input_gradient" else z) > 1]
    together = {"all": possible} if len(possible) > 1 else {}
    return {"sequential": (), "none": (), **{name: (name,) for name in possible}, **together}


def result(box, windows, name, taken):
    sequential, overlapped, communication, computation = (
        taken[key] for key in ("sequential", name, "communication", "computation")
    )
    return {
        "benchmark": "overlap",
        "case": f"{name} on {box}, {'windows' if windows else 'messages'}",
        "sequential": round(sequential, 4),
        "overlapped": round(overlapped, 4),
        "communication": round(communication, 4),
        "computation": round(computation, 4),
        "hidden": round((sequential - overlapped) / min(communication, computation), 3),
    }


if __name__ == "__main__":
    main()
