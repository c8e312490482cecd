"""Step times of ZeRO-1, -2 and -3 beside torch's DDP, ZeroRedundancyOptimizer and FSDP2 over gloo, in one run.

    $MPIRUN -n 2 python -m mpi4py benchmarks/zero.py                      both shapes; 5 minutes
    $MPIRUN -n 4 python -m mpi4py benchmarks/zero.py --shapes base --steps 10
    $MPIRUN -n 2 python -m mpi4py benchmarks/zero.py --messages           ours by messages, as between nodes

The models, batches, optimizers and rules are those of benchmarks/peers.py: every rank takes a step of each side in
turn, and `ratio` is the median over the rounds of theirs / ours in seconds, so above 1 ours is faster.
"""

import argparse
import functools
import json
import os
import statistics

import torch
import torch.distributed as dist
from mpi4py import MPI
from peers import HEADS, LAYERS, SHAPES, VOCABULARY, free_port, interleaved
from peers_torch import torch_ddp, torch_fsdp, torch_zero_redundancy

import hpctrain as ht
from hpctrain.config import Replicas
from hpctrain.layers import Tokens
from hpctrain.models.export import whole_parameters
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.replicas import make
from hpctrain.shard import split
from hpctrain.train.batches import Microbatch
from hpctrain.train.optimizer import adamw
from hpctrain.train.trainer import Trainer

METHODS = ("ddp", "zero1", "zero2", "zero3")
PEERS = {
    "torch ddp": torch_ddp,
    "torch ZeroRedundancyOptimizer": torch_zero_redundancy,
    "torch fsdp2": functools.partial(torch_fsdp, reshard=False),
    "torch fsdp2, reshard": functools.partial(torch_fsdp, reshard=True),
}
# Ours, theirs, and the ratio to reach on 2 and on 4 ranks.
PAIRS = [
    ("zero1", "torch ddp", 1.0, 1.0),
    ("zero1", "torch ZeroRedundancyOptimizer", 1.0, 1.0),
    ("zero2", "torch ddp", None, None),
    ("zero2", "torch fsdp2", 1.05, 1.15),
    ("zero3", "torch ddp", None, None),
    ("zero3", "torch fsdp2, reshard", 1.05, 1.15),
]


def ours(method, shape, batch, messages):
    """A function that takes a step and returns the loss, and the whole initial weights, on every rank."""
    grid = ht.Grid(data=MPI.COMM_WORLD.size)
    grid.data.one_node &= not messages
    sizes = GPT2Shape(LAYERS, shape["width"], HEADS, shape["context"], VOCABULARY, tied=False)
    model = GPT2(grid, sizes, key=ht.Key(0), dtype=torch.float32)
    weights = {name: MPI.COMM_WORLD.bcast(weight) for name, weight in whole_parameters(model, grid)}
    optimizer = adamw(model.parameters(), 0.01)
    trainer = Trainer(model, grid, optimizer, replicas=make(Replicas(method), model, grid, optimizer))
    part = split(len(batch), grid.data.size, grid.data.rank)
    tokens = Tokens.of(grid, part.stop - part.start, shape["context"], part.start)
    rows = batch[part]
    scale = 1 / (len(batch) * shape["context"])
    microbatch = Microbatch(tokens, rows[:, :-1].reshape(-1), rows[:, 1:].reshape(-1), scale)
    return lambda: trainer.step([microbatch])[0], weights


def compared(name, options):
    """The JSON objects of one shape.

    Raises:
        RuntimeError: when the losses of the first step differ, so that not all train the same model.
    """
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(VOCABULARY, (shape["batch"], shape["context"] + 1), generator=generator)
    steps, weights = {}, None
    for method in METHODS:
        steps[method], weights = ours(method, shape, batch, options.messages)
    for peer, made in PEERS.items():
        steps[peer] = made(weights, HEADS, batch)
    times, losses = interleaved(options.steps, *steps.values())
    for side, values in zip(steps, losses):
        if abs(values[0] / losses[0][0] - 1) > 1e-5:
            raise RuntimeError(f"the first loss differs: {losses[0][0]} of ours and {values[0]} of {side}")
    seconds, tokens = dict(zip(steps, times)), shape["batch"] * shape["context"]
    way = "messages" if options.messages else "shared memory"
    for method, peer, *goals in PAIRS:
        mine, theirs = seconds[method], seconds[peer]
        yield {
            "benchmark": "zero",
            "case": f"{name}, {MPI.COMM_WORLD.size} ranks, {method} by {way}",
            "peer": peer,
            "ours": round(tokens / statistics.median(mine)),
            "theirs": round(tokens / statistics.median(theirs)),
            "unit": "tokens/s",
            "ratio": round(statistics.median(b / a for a, b in zip(mine, theirs)), 3),
            "goal": goals[MPI.COMM_WORLD.size == 4],
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="base,communication-heavy", help="of: " + ", ".join(SHAPES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--messages", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    store = dist.TCPStore("127.0.0.1", world.bcast(free_port()), world.size, world.rank == 0)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    for name in options.shapes.split(","):
        for result in compared(name, options):
            if world.rank == 0:
                print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
