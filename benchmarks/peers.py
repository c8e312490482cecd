"""Train the same GPT with hpctrain and with others, step by step in turn, and print the ratio of tokens a second.

    $MPIRUN -n 2 python -m mpi4py benchmarks/peers.py                  all peers, both shapes; 4 minutes
    $MPIRUN -n 4 python -m mpi4py benchmarks/peers.py --shapes base    four ranks
    $MPIRUN -n 2 python -m mpi4py benchmarks/peers.py --peers ddp --steps 30

Peers: `ddp` and `tensor` are torch's DistributedDataParallel and tensor parallel, `megatron` is Megatron-core's tensor
parallel, which is looked for on PYTHONPATH and needs none of its dependencies for this:

    pip install --no-deps --target ~/megatron megatron-core==0.16.1
    PYTHONPATH=~/megatron $MPIRUN -n 2 python -m mpi4py benchmarks/peers.py --peers megatron

Both sides live in the same processes: every rank holds an MPI and a gloo communicator, one BLAS thread, the same model
(layers 4, vocabulary 4096), initial weights, batch and fused AdamW, and takes a step of ours, then one of theirs, …
Neither side clips. --matmul medium gives both sides oneDNN's faster float32 products. Prints one JSON object a line;
`ratio` is the median over the pairs of steps of theirs / ours in seconds, so above 1 ours is faster: the speed of a
shared machine drifts, and the steps of a pair see the same of it. `losses_differ` is the relative difference of the
losses in the [first, last] step. A peer that cannot be imported has `absent`, the reason, instead of figures.
"""

import argparse
import json
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
from mpi4py import MPI
from peers_torch import torch_ddp, torch_tensor_parallel

import hpctrain as ht
from hpctrain.layers import Tokens
from hpctrain.models.export import whole_parameters
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.shard import split
from hpctrain.train.batches import Microbatch
from hpctrain.train.optimizer import adamw
from hpctrain.train.trainer import Trainer

SHAPES = {
    "base": {"width": 256, "context": 256, "batch": 8},
    "communication-heavy": {"width": 512, "context": 128, "batch": 4},
}
LAYERS, HEADS, VOCABULARY = 4, 4, 4096
WARM_UP = 3  # steps
GOALS = {  # (peer, shape, ranks): ratio to reach
    ("ddp", "base", 2): 1.0,
    ("ddp", "communication-heavy", 2): 1.05,
    ("tensor", "base", 2): 1.35,
    ("tensor", "base", 4): 1.7,
    ("tensor", "communication-heavy", 2): 1.9,
    ("megatron", "base", 2): 1.0,
    ("megatron", "base", 4): 1.1,
}


def megatron(*arguments):
    """Loads Megatron-core, which may not be there and takes seconds, when it is asked for."""
    from peers_megatron import megatron_tensor_parallel

    return megatron_tensor_parallel(*arguments)


PEERS = {"ddp": torch_ddp, "tensor": torch_tensor_parallel, "megatron": megatron}
NAMES = {"ddp": "torch ddp", "tensor": "torch tensor", "megatron": "megatron-core tensor"}


def ours(peer, shape, batch):
    """A function that takes a step and returns the loss, and the whole initial weights, on every rank."""
    ranks = MPI.COMM_WORLD.size
    grid = ht.Grid(data=ranks) if peer == "ddp" else ht.Grid(tensor=ranks)
    sizes = GPT2Shape(LAYERS, shape["width"], HEADS, shape["context"], VOCABULARY, tied=False)
    model = GPT2(grid, sizes, key=ht.Key(0), dtype=torch.float32)
    weights = {name: MPI.COMM_WORLD.bcast(weight) for name, weight in whole_parameters(model, grid)}
    trainer = Trainer(model, grid, adamw(model.parameters(), 0.01))
    part = split(len(batch), grid.data.size, grid.data.rank)
    tokens = Tokens.of(grid, part.stop - part.start, shape["context"], part.start)
    rows = batch[part]
    scale = 1 / (len(batch) * shape["context"])
    microbatch = Microbatch(tokens, rows[:, :-1].reshape(-1), rows[:, 1:].reshape(-1), scale)
    return lambda: trainer.step([microbatch])[0], weights


def interleaved(steps, *sides):
    """Seconds and losses of every step of each side, taken in turn; the slowest rank counts."""
    times, losses = [[] for _ in sides], [[] for _ in sides]
    for _ in range(steps + WARM_UP):
        for side, step in enumerate(sides):
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            loss = step()
            times[side].append(MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX))
            losses[side].append(MPI.COMM_WORLD.allreduce(float(loss)) / MPI.COMM_WORLD.size)
    return [t[WARM_UP:] for t in times], losses


def compared(peer, shape, steps):
    """What one peer gives on one shape, as members of the JSON object.

    Raises:
        RuntimeError: when the losses of the first step differ, so that the two do not train the same model.
    """
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(VOCABULARY, (shape["batch"], shape["context"] + 1), generator=generator)
    step, weights = ours(peer, shape, batch)
    try:
        other = PEERS[peer](weights, HEADS, batch)
    except ImportError as error:
        return {"absent": str(error)}
    (mine, theirs), losses = interleaved(steps, step, other)
    first, *_, last = (abs(a - b) / b for a, b in zip(*losses))
    if not first < 1e-5:
        raise RuntimeError(f"the first loss differs: {losses[0][0]} of ours and {losses[1][0]} of {peer}")
    tokens = shape["batch"] * shape["context"]
    return {
        "ours": round(tokens / statistics.median(mine)),
        "theirs": round(tokens / statistics.median(theirs)),
        "unit": "tokens/s",
        "ratio": round(statistics.median(b / a for a, b in zip(mine, theirs)), 3),
        "losses_differ": [float(f"{difference:.1e}") for difference in (first, last)],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="ddp,tensor,megatron", help="of: " + ", ".join(PEERS))
    parser.add_argument("--shapes", default="base,communication-heavy", help="of: " + ", ".join(SHAPES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--matmul", default="highest", choices=["highest", "high", "medium"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(options.matmul)
    world = MPI.COMM_WORLD
    store = dist.TCPStore("127.0.0.1", world.bcast(free_port()), world.size, world.rank == 0)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    for name in options.shapes.split(","):
        for peer in options.peers.split(","):
            case = f"{name}, {world.size} ranks, {options.matmul} products"
            result = {"benchmark": "peers", "case": case, "peer": NAMES[peer]}
            result |= compared(peer, SHAPES[name], options.steps)
            result["goal"] = GOALS.get((peer, name, world.size))
            if world.rank == 0:
                print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
