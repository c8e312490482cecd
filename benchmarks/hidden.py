"""How much of the summing of gradients is hidden under backward, for several sizes of the buckets.

    $MPIRUN -n 2 python -m mpi4py benchmarks/hidden.py        in shared memory, then by messages; 3 minutes

The model of benchmarks/peers.py, replicated. In turn: a step whose sums start during backward, one whose sums all start
after it, the sums alone, and a step without them. Prints one JSON object a line, seconds the medians of the slowest
rank: `hidden` = (after - during) / min(sums, computation), negative where starting early costs time. In shared memory
sums are taken when they are waited for, so that nothing can be hidden; by messages MPI must be given time to progress.

Ends with an error unless all steps, whatever the buckets, have the same losses to the last bit.
"""

import argparse
import json
import statistics

import torch
from mpi4py import MPI
from peers import HEADS, LAYERS, SHAPES, VOCABULARY, interleaved

import hpctrain as ht
from hpctrain import comm
from hpctrain.data_parallel import DataParallel
from hpctrain.layers import Tokens
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.shard import split
from hpctrain.train.batches import Microbatch
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.trainer import Trainer

BUCKETS = (1 << 20, 4 << 20, 1 << 30)  # bytes; of the last there is one


def training(shape, messages, bucket_bytes, alone=False):
    """(replicas, a function that takes a step and returns this rank's loss) of all ranks, or of this rank alone."""
    ranks = MPI.COMM_WORLD.size
    grid = ht.Grid(comm=MPI.COMM_SELF) if alone else ht.Grid(data=ranks)
    if messages:
        comm.choose_all_reduce(grid.data, "direct")
    sizes = GPT2Shape(LAYERS, shape["width"], HEADS, shape["context"], VOCABULARY, tied=False)
    model = GPT2(grid, sizes, key=ht.RngKey(0), dtype=torch.float32)
    optimizer = make_optimizer(model.parameters(), 0.01)
    replicas = DataParallel(model.parameters(), grid, optimizer, bucket_bytes)
    trainer = Trainer(model, grid, optimizer, strategy=replicas)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(VOCABULARY, (shape["batch"], shape["context"] + 1), generator=generator)
    rows = batch[split(len(batch), ranks, MPI.COMM_WORLD.rank)]
    tokens = Tokens.of(grid, len(rows), shape["context"])
    scale = 1 / (len(batch) * shape["context"])
    microbatch = Microbatch(tokens, rows[:, :-1].reshape(-1), rows[:, 1:].reshape(-1), scale)
    return replicas, lambda: trainer.step([microbatch])[0]


def measured(shape, messages, bucket_bytes, steps):
    """Lists of seconds by what was done, and the losses of the steps with sums."""
    _, during = training(shape, messages, bucket_bytes)
    late, after = training(shape, messages, bucket_bytes)
    late.enable_grad_sync = lambda parameters=None: None  # so that `finish_grad_sync` starts all sums
    only, _ = training(shape, messages, bucket_bytes)
    _, computation = training(shape, messages, bucket_bytes, alone=True)

    def sums():
        for bucket in only.buckets:
            bucket.launch()
        for bucket in only.buckets:
            bucket.work.wait()
        return 0.0

    times, losses = interleaved(steps, during, after, sums, computation)
    return dict(zip(("during", "after", "sums", "computation"), times)), losses[:2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--shape", choices=SHAPES, default="communication-heavy")
    options = parser.parse_args()
    torch.set_num_threads(1)
    expected = None
    for messages in (False, True):
        for bucket_bytes in BUCKETS:
            times, losses = measured(SHAPES[options.shape], messages, bucket_bytes, options.steps)
            expected = expected or losses[0]
            if any(each != expected for each in losses):
                raise RuntimeError(f"losses differ with buckets of {bucket_bytes} bytes: {losses}, expected {expected}")
            during, after, sums, computation = map(statistics.median, times.values())
            if MPI.COMM_WORLD.rank == 0:
                way = "messages" if messages else "shared memory"
                line = {
                    "benchmark": "hidden",
                    "case": f"{options.shape}, {MPI.COMM_WORLD.size} ranks, buckets of {bucket_bytes >> 20} MiB, {way}",
                    **{name: round(statistics.median(each), 4) for name, each in times.items()},
                    "hidden": round((after - during) / min(sums, computation), 3),
                    "losses": "equal",
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
