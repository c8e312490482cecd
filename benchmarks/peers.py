"""Train the same GPT with hpctrain and with others, step by step in turn, and print the ratio of tokens a second.

    $MPIRUN -n 2 python -m mpi4py benchmarks/peers.py                  all peers, both shapes; 8 minutes
    $MPIRUN -n 4 python -m mpi4py benchmarks/peers.py --shapes base    four ranks
    $MPIRUN -n 2 python -m mpi4py benchmarks/peers.py --peers ddp --steps 30
    $MPIRUN -n 1 python -m mpi4py benchmarks/peers.py --peers ddp --shapes large --device cuda      on a GPU
    $MPIRUN -n 2 python -m mpi4py benchmarks/peers.py --peers fsdp2,fsdp2-reshard --messages    as between nodes
    $MPIRUN -n 2 python -m mpi4py benchmarks/peers.py --peers ddp --memory ours        then with "theirs"

Peers over gloo, and what of ours they are held against: torch's DistributedDataParallel (ddp), ZeroRedundancyOptimizer
(zero1), FSDP2 without and with resharding after forward (zero2, zero3) and tensor parallel; Megatron-core's tensor
parallel and DeepSpeed's ZeRO-1, -2 and -3, which are looked for on PYTHONPATH and need none of their large dependencies
for this:

    pip install --no-deps --target ~/peers megatron-core==0.16.1 deepspeed==0.19.8 einops hjson msgpack ninja psutil \
        py-cpuinfo
    PYTHONPATH=~/peers $MPIRUN -n 2 python -m mpi4py benchmarks/peers.py --peers megatron,deepspeed-1

Both sides live in the same processes: every rank holds an MPI and a gloo communicator, one BLAS thread, the same model
(layers 4, vocabulary 4096), initial weights, batch and fused AdamW, and takes a step of ours, then one of theirs, …
Neither side clips. --matmul medium gives both sides oneDNN's faster float32 products. Prints one JSON object a line;
`ratio` is the median over the pairs of steps of theirs / ours in seconds, so above 1 ours is faster: the speed of a
shared machine drifts, and the steps of a pair see the same of it. The seconds of both are in `ours_samples` and
`theirs_samples`; benchmarks/tables.py makes the tables of them. `least` is their fastest step by our fastest, which
others on the machine disturb least. `losses_differ` is the relative difference of the losses in the [first, last] step.
A peer that cannot be imported has `absent`, the reason, instead of figures.

With --memory one side alone takes 5 steps: `peak_mib` is the most memory that all ranks together had, pages that
several share counted once, less what they had before. Every side needs a job of its own, since freed memory stays.
"""

import argparse
import contextlib
import functools
import json
import statistics
import sys
import threading
import time

import pairs
import torch
from gloo import gloo
from mpi4py import MPI
from peers_torch import torch_ddp, torch_fsdp, torch_tensor_parallel, torch_zero_redundancy

import hpctrain as ht
from hpctrain.config import DataParallelConfig
from hpctrain.data_parallel import make
from hpctrain.layers import Tokens
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.shard import split
from hpctrain.train.batches import Microbatch
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.trainer import Trainer

SHAPES = {
    "base": {"width": 256, "context": 256, "batch": 8},
    "communication-heavy": {"width": 512, "context": 128, "batch": 4},
    "large": {"width": 1024, "context": 1024, "batch": 8},
}
LAYERS, HEADS, VOCABULARY = 4, 4, 4096
WARM_UP = 3  # steps


def megatron(*arguments):
    """Loads Megatron-core, which may not be there and takes seconds, when it is asked for."""
    from peers_megatron import megatron_tensor_parallel

    return megatron_tensor_parallel(*arguments)


def deepspeed(*arguments):
    """Likewise DeepSpeed, which prints."""
    with contextlib.redirect_stdout(sys.stderr):
        from peers_deepspeed import deepspeed_zero

        return deepspeed_zero(*arguments)


PEERS = {  # name: (ours, theirs)
    "ddp": ("ddp", torch_ddp),
    "zero-redundancy": ("zero1", torch_zero_redundancy),
    "fsdp2": ("zero2", functools.partial(torch_fsdp, reshard=False)),
    "fsdp2-reshard": ("zero3", functools.partial(torch_fsdp, reshard=True)),
    "deepspeed-1": ("zero1", functools.partial(deepspeed, 1)),
    "deepspeed-2": ("zero2", functools.partial(deepspeed, 2)),
    "deepspeed-3": ("zero3", functools.partial(deepspeed, 3)),
    "tensor": ("tensor", torch_tensor_parallel),
    "megatron": ("tensor", megatron),
}
GOALS = {  # peer: {(shape, ranks): ratio to reach}
    "ddp": {("base", 2): 1.0, ("base", 4): 1.0, ("communication-heavy", 2): 1.05},
    "zero-redundancy": {("base", 2): 1.0, ("base", 4): 1.0},
    "fsdp2": {("base", 2): 1.05, ("base", 4): 1.15},
    "fsdp2-reshard": {("base", 2): 1.05, ("base", 4): 1.15},
    **{f"deepspeed-{stage}": {("base", 2): 1.0, ("base", 4): 1.0} for stage in (1, 2, 3)},
    "tensor": {("base", 2): 1.35, ("base", 4): 1.7, ("communication-heavy", 2): 1.9},
    "megatron": {("base", 2): 1.0, ("base", 4): 1.1},
}


def ours(method, shape, batch, messages):
    """A function that takes a step and returns the loss, and one that gives the whole weights, on every rank."""
    ranks = MPI.COMM_WORLD.size
    grid = ht.Grid(tensor=ranks) if method == "tensor" else ht.Grid(data=ranks)
    for axis in grid.axes():
        axis.one_node &= not messages
    ht.comm.decide_cuda_aware(grid, batch.device)
    model = GPT2(grid, _sizes(shape), key=ht.RngKey(0), dtype=torch.float32, device=batch.device)
    optimizer = make_optimizer(model.parameters(), 0.01)
    replicas = make(DataParallelConfig("ddp" if method == "tensor" else method), model, grid, optimizer)
    trainer = Trainer(model, grid, optimizer, strategy=replicas)
    part = split(len(batch), grid.data.size, grid.data.rank)
    tokens = Tokens.of(grid, part.stop - part.start, shape["context"], part.start)
    rows = batch[part]
    scale = 1 / (len(batch) * shape["context"])
    microbatch = Microbatch(tokens, rows[:, :-1].reshape(-1), rows[:, 1:].reshape(-1), scale)

    def weights():
        return {name: MPI.COMM_WORLD.bcast(weight) for name, weight in whole_parameters(model, grid)}

    return lambda: trainer.step([microbatch])[0], weights


def _sizes(shape):
    return GPT2Shape(LAYERS, shape["width"], HEADS, shape["context"], VOCABULARY, tied=False)


def interleaved(steps, *sides):
    """Seconds and losses of every step of each side, taken in turn; the slowest rank counts."""
    times, losses = [[] for _ in sides], [[] for _ in sides]
    for _ in range(steps + WARM_UP):
        for side, step in enumerate(sides):
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            loss = step()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            times[side].append(MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX))
            losses[side].append(MPI.COMM_WORLD.allreduce(float(loss)) / MPI.COMM_WORLD.size)
    return [t[WARM_UP:] for t in times], losses


def compared(peer, shape, steps, messages, device):
    """What one peer gives on one shape, as members of the JSON object.

    Raises:
        RuntimeError: when the losses of the first step differ, so that the two do not train the same model.
    """
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(VOCABULARY, (shape["batch"], shape["context"] + 1), generator=generator).to(device)
    method, make_theirs = PEERS[peer]
    step, weights = ours(method, shape, batch, messages)
    try:
        other = make_theirs(weights(), HEADS, batch)
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
        **pairs.compared(mine, theirs),
        "least": round(min(theirs) / min(mine), 3),
        "losses_differ": [float(f"{difference:.1e}") for difference in (first, last)],
    }


def peak_memory(peer, side, shape, messages):
    """MiB, over all ranks, as a member of the JSON object; one sample a millisecond or so (Linux's "Pss")."""

    def resident():
        with open("/proc/self/smaps_rollup") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024

    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(VOCABULARY, (shape["batch"], shape["context"] + 1), generator=generator)
    method, make_theirs = PEERS[peer]
    alone = GPT2(ht.Grid(comm=MPI.COMM_SELF), _sizes(shape), key=ht.RngKey(0), dtype=torch.float32)
    weights = {name: p.detach().clone() for name, p in alone.named_parameters()}
    before, peaks, over = resident(), [0.0], threading.Event()

    def watch():
        while not over.wait(0.001):
            peaks[0] = max(peaks[0], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    step = ours(method, shape, batch, messages)[0] if side == "ours" else make_theirs(weights, HEADS, batch)
    for _ in range(5):
        step()
    over.set()
    watcher.join()
    return {"side": side, "peak_mib": round(MPI.COMM_WORLD.allreduce(peaks[0] - before), 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(PEERS), help="of: " + ", ".join(PEERS))
    parser.add_argument("--shapes", default="base,communication-heavy", help="of: " + ", ".join(SHAPES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--matmul", default="highest", choices=["highest", "high", "medium"])
    parser.add_argument("--device", default="cpu", help="cpu or cuda, which the ranks share")
    parser.add_argument("--messages", action="store_true", help="of ours, on all axes, instead of shared memory")
    parser.add_argument("--memory", choices=["ours", "theirs"], help="of one peer: memory instead of time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(options.matmul)
    ranks, way = MPI.COMM_WORLD.size, "messages" if options.messages else "shared memory"
    device = ht.comm.local_device(options.device, MPI.COMM_WORLD)
    if device.type == "cuda":
        if options.memory or "megatron" in options.peers or "deepspeed" in options.peers:
            parser.error("--device cuda is for torch's peers, and not for --memory: name them with --peers")
        way = "messages on cuda"
    with gloo():
        for name in options.shapes.split(","):
            for peer in options.peers.split(","):
                case = f"{name}, {ranks} ranks, {PEERS[peer][0]} by {way}, {options.matmul} products"
                result = {"benchmark": "peers", "case": case, "peer": peer}
                if options.memory:
                    result |= peak_memory(peer, options.memory, SHAPES[name], options.messages)
                else:
                    result |= compared(peer, SHAPES[name], options.steps, options.messages, device)
                    result["goal"] = GOALS[peer].get((name, ranks)) if device.type == "cpu" else None
                if MPI.COMM_WORLD.rank == 0:
                    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
