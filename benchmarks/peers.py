"""Train the same GPT with hpctrain and with torch, step by step in turn, and print the ratio of tokens a second.

    $MPIRUN -n 2 python -m mpi4py benchmarks/peers.py                  DDP and tensor parallel, both shapes; 3 minutes
    $MPIRUN -n 4 python -m mpi4py benchmarks/peers.py --shapes base    four ranks
    $MPIRUN -n 2 python -m mpi4py benchmarks/peers.py --peers ddp --steps 30

Both sides live in the same processes: every rank holds an MPI and a gloo communicator, one BLAS thread, the same model
(layers 4, vocabulary 4096), the same batch and fused AdamW, and takes a step of ours, then one of theirs, then ours, …
Neither side clips. --matmul medium gives both sides oneDNN's faster float32 products. Prints one JSON object a line;
`ratio` is the median over the pairs of steps of theirs / ours in seconds, so above 1 ours is faster: the speed of a
shared machine drifts, and the steps of a pair see the same of it.
"""

import argparse
import json
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from mpi4py import MPI

import hpctrain as ht
from hpctrain.layers import Tokens
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
GOALS = {  # (peer, shape, ranks): ratio to reach
    ("ddp", "base", 2): 1.0,
    ("ddp", "communication-heavy", 2): 1.05,
    ("tensor", "base", 2): 1.35,
    ("tensor", "base", 4): 1.6,
    ("tensor", "communication-heavy", 2): 1.9,
}


# Theirs ----------------------------------------------------------------------------------------------------------


class TorchBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_width = width // HEADS

    def forward(self, x):
        h = self.ln_1(x)
        # the number of heads follows from what this rank's projection gives
        q, k, v = (p(h).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for p in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(h)
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class TorchGPT(nn.Module):
    def __init__(self, width, context):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TorchBlock(width) for _ in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def torch_ddp(shape, batch):
    """torch's DistributedDataParallel over gloo, gradients as views of its buckets."""
    model = TorchGPT(shape["width"], shape["context"])
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    part = split(len(batch), dist.get_world_size(), dist.get_rank())
    ids, targets = batch[part, :-1], batch[part, 1:]

    def step():
        loss = F.cross_entropy(wrapped(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_tensor_parallel(shape, batch):
    """torch.distributed.tensor.parallel over gloo: column and row plans, vocabulary-parallel output and loss."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = TorchGPT(shape["width"], shape["context"])
    plan = {"wte": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    for i in range(LAYERS):
        plan.update({f"blocks.{i}.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")})
        plan.update({f"blocks.{i}.{name}": RowwiseParallel() for name in ("proj", "down")})
    parallelize_module(model, mesh, plan)
    # fused steps refuse a mixture of DTensors and tensors, so one optimizer for each
    split_parameters = [p for p in model.parameters() if hasattr(p, "device_mesh")]
    whole_parameters = [p for p in model.parameters() if not hasattr(p, "device_mesh")]
    optimizers = [torch.optim.AdamW(p, lr=1e-3, fused=True) for p in (split_parameters, whole_parameters)]
    ids, targets = batch[:, :-1], batch[:, 1:]

    def step():
        with loss_parallel():
            loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


PEERS = {"ddp": torch_ddp, "tensor": torch_tensor_parallel}


# Ours ------------------------------------------------------------------------------------------------------------


def ours(peer, shape, batch):
    ranks = MPI.COMM_WORLD.size
    grid = ht.Grid(data=ranks) if peer == "ddp" else ht.Grid(tensor=ranks)
    sizes = GPT2Shape(LAYERS, shape["width"], HEADS, shape["context"], VOCABULARY, tied=False)
    model = GPT2(grid, sizes, key=ht.Key(0), dtype=torch.float32)
    trainer = Trainer(model, grid, adamw(model.parameters(), 0.01))
    part = split(len(batch), grid.data.size, grid.data.rank)
    tokens = Tokens.of(grid, part.stop - part.start, shape["context"], part.start)
    rows = batch[part]
    scale = 1 / (len(batch) * shape["context"])
    microbatch = Microbatch(tokens, rows[:, :-1].reshape(-1), rows[:, 1:].reshape(-1), scale)
    return lambda: trainer.step([microbatch])


def interleaved(steps, *sides):
    """Seconds of every step of each side, taken in turn; the slowest rank counts."""
    times = [[] for _ in sides]
    for number in range(steps + 3):
        for side, step in enumerate(sides):
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            step()
            seconds = MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX)
            if number >= 3:
                times[side].append(seconds)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="ddp,tensor", help="of: " + ", ".join(PEERS))
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
        shape = SHAPES[name]
        generator = torch.Generator().manual_seed(0)
        batch = torch.randint(VOCABULARY, (shape["batch"], shape["context"] + 1), generator=generator)
        for peer in options.peers.split(","):
            mine, theirs = interleaved(options.steps, ours(peer, shape, batch), PEERS[peer](shape, batch))
            if world.rank == 0:
                tokens = shape["batch"] * shape["context"]
                pairs = [b / a for a, b in zip(mine, theirs)]
                mine, theirs = statistics.median(mine), statistics.median(theirs)
                result = {
                    "benchmark": "peers",
                    "case": f"{name}, {world.size} ranks, {options.matmul} products",
                    "peer": f"torch {peer}",
                    "ours": round(tokens / mine),
                    "theirs": round(tokens / theirs),
                    "unit": "tokens/s",
                    "ratio": round(statistics.median(pairs), 3),
                    "goal": GOALS.get((peer, name, world.size)),
                }
                print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
