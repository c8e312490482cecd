"""Measure what the ranks of this MPI job can do; `hpctrain machine` starts it with several numbers of ranks.

    mpirun -n N python -m mpi4py -m hpctrain.plan.measure OUT.json

Samples are read from a corpus that is packed beside OUT.json, which all ranks must see; most often from the page cache.

All ranks work at the same time, as they do in training; a figure is the lower quartile of its calls, as what others do
to the machine only adds to a time, each of the slowest rank. Where ranks outnumber the cores, a call is repeated until
all have had several turns: a short one would have a core of its own.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from hpctrain import comm, cores
from hpctrain.data import ShardedTokens, pack
from hpctrain.data_parallel.buckets import BUCKET_BYTES
from hpctrain.grid import Grid
from hpctrain.launch import abort, check_launcher
from hpctrain.layers.gelu import gelu_tanh
from hpctrain.pipeline.given_gradients import scalar_of
from hpctrain.plan.passes import BACKWARD, INNER, RESIDUAL

PRODUCTS = ((1024, 1024, 1024), (512, 512, 2048), (2048, 256, 256), (256, 1024, 256), (1024, 64, 1024), (128, 256, 512))
SIZES = tuple(4**k for k in range(4, 13))  # bytes of a collective: 256 to 16 MiB
CALLS = 9
TURNS = 0.03  # s in which every rank of several on a core has had its turns; the scheduler's are of some milliseconds
CORPUS, SAMPLES = 1 << 20, (128, 8192)  # bytes of text, and tokens that are read of it at once
_CPU = torch.device("cpu")


def main() -> int:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    try:
        check_launcher(world.size)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        with Grid(world.size, comm=world) as grid:
            found = measure(grid, Path(sys.argv[1]).parent)
        if world.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))
    except BaseException:
        abort(world)
    return 0


def measure(grid: Grid, folder: Path) -> dict:
    """The figures, the same on every rank. Collective over the grid's data axis, which has all its ranks. Writes a
    corpus into `folder`."""
    device = comm.local_device("auto", grid.comm)
    nodes = max(Counter(grid.world.nodes).values())
    found = {
        "ranks": grid.size,
        "ranks_of_a_node": nodes,
        "memory": memory(device, nodes),
        "products": {
            name: [(*shape, seconds(grid, product(shape, dtype, device), device)) for shape in PRODUCTS]
            for name, dtype in types(device).items()
        },
        "elements": elements(grid, device, 4 * 2**20),  # as large as activations
        "state": elements(grid, device, 128 * 2**20),  # as large as weights
        "norms": norms(grid, device),
        "activations": activations(grid, device),
        "cache": cache(device, nodes),
        "waiting": waiting(grid, device) if grid.size > 1 else 0.0,
        "launch": launch(grid, device),
        "attention": attention(grid, device),
        "reading": reading(grid, folder),
        "collectives": collectives(grid, device) if grid.size > 1 else {},
        "bucket": BUCKET_BYTES,
    }
    return grid.comm.bcast(found)


def types(device: torch.device) -> dict[str, torch.dtype]:
    """Those that are worth while on the device."""
    wide = {"fp32": torch.float32, "fp64": torch.float64}
    return {**wide, "bf16": torch.bfloat16, "fp16": torch.float16} if device.type == "cuda" else wide


def seconds(grid: Grid, work: Callable[[], object], device: torch.device, calls: int = CALLS) -> float:
    """Of a call of `work`, on the slowest rank."""

    def taken(repeats: int) -> float:
        _wait(device)
        grid.comm.Barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        _wait(device)
        return grid.comm.allreduce(time.perf_counter() - start, op=_max()) / repeats

    work()
    repeats = math.ceil(TURNS / taken(1)) if share_cores(grid) else 1
    return statistics.quantiles(taken(repeats) for _ in range(calls))[0]


def share_cores(grid: Grid) -> bool:
    """Whether a node has more ranks than cores."""
    return max(Counter(grid.world.nodes).values()) > cores.find().count


def product(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """A product of (m, k, n)."""
    m, k, n = shape
    a, b = torch.ones(m, k, dtype=dtype, device=device), torch.ones(k, n, dtype=dtype, device=device)
    out = torch.empty(m, n, dtype=dtype, device=device)
    return lambda: torch.mm(a, b, out=out)


def elements(grid: Grid, device: torch.device, nbytes: int) -> float:
    """Bytes a second that an element-wise operation reads and writes, of tensors of so many."""
    a, b = (torch.ones(nbytes // 4, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 3 * nbytes / seconds(grid, lambda: torch.add(a, b, out=out), device)


def norms(grid: Grid, device: torch.device, layers: int = 4, width: int = 512) -> float:
    """Bytes a second of norms with the sums around them, forward and backward, as a prediction counts them."""
    x = torch.ones(2048, width, device=device, requires_grad=True)

    def chain():
        y = x
        for _ in range(layers):
            y = y + torch.nn.functional.layer_norm(y, (width,))
        scalar_of([y], [x]).backward()

    return (1 + BACKWARD) * RESIDUAL * 2 * x.nbytes * layers / seconds(grid, chain, device)


def activations(grid: Grid, device: torch.device, layers: int = 4, width: int = 512) -> float:
    """The same of what lies between the products of a block: biases, copies of heads, GELU in the MLP."""
    heads, hidden = (torch.ones(width, n * width, device=device, requires_grad=True) for n in (3, 4))
    bias = torch.zeros(4 * width, device=device, requires_grad=True)

    def chain():
        total = torch.zeros((), device=device)
        for _ in range(layers):
            mixed = (heads + bias[: 3 * width])[:, :width].t().contiguous()
            total = total + gelu_tanh(hidden + bias)[0, 0] + mixed[0, 0]
        total.backward()

    kept = 4 * width * (3 + 1 + 4 + 4) * width  # inputs and outputs of attention and of the activation
    return (1 + BACKWARD) * INNER * kept * layers / seconds(grid, chain, device)


def waiting(grid: Grid, device: torch.device, products: int = 8) -> float:
    """Part of a product's time that the ranks wait for one another where they exchange something after each."""
    axis, part = grid.data, torch.zeros(1, 1024, device=device)
    work = product((384, 384, 384), torch.float32, device)

    def several(*calls: Callable[[], object]) -> Callable[[], None]:
        def run():
            for _ in range(products):
                for call in calls:
                    call()

        return run

    def exchange() -> object:
        return comm.all_gather(part, axis)

    apart = [seconds(grid, several(call), device) for call in (work, exchange)]
    return max(0.0, seconds(grid, several(work, exchange), device) - sum(apart)) / apart[0]


def cache(device: torch.device, ranks: int) -> float:
    """Bytes of the last level's cache that a rank of a node has."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).L2_cache_size)
    levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    sizes = [int(text[:-1]) << {"K": 10, "M": 20}[text[-1]] for text in (level.read_text().strip() for level in levels)]
    return max(sizes, default=0) / ranks


def launch(grid: Grid, device: torch.device, operations: int = 200) -> float:
    """Seconds of an operation on nothing, forward and backward each."""

    def chain():
        x = torch.ones(1, device=device, requires_grad=True)
        y = x
        for _ in range(operations):
            y = y * 1.5
        y.sum().backward()

    return seconds(grid, chain, device) / (2 * operations)


def attention(grid: Grid, device: torch.device, heads: int = 8, length: int = 256, width: int = 32) -> float:
    """flop/s in causal attention, of the half of the scores that count, forward and backward."""
    q = torch.ones(2, heads, length, width, device=device, requires_grad=True)
    call = torch.nn.functional.scaled_dot_product_attention
    flops = 2 * 2 * heads * length**2 * width * (1 + 2.5)  # backward computes the scores once more
    return flops / seconds(grid, lambda: scalar_of([call(q, q, q, is_causal=True)], [q]).backward(), device)


def collectives(grid: Grid, device: torch.device) -> dict[str, list[tuple[int, float]]]:
    """{operation: [(bytes of the whole tensor, seconds)]} over all ranks, and of messages between two."""
    axis = grid.data
    found: dict[str, list[tuple[int, float]]] = {}
    for nbytes in SIZES:
        whole = torch.zeros(axis.size, max(1, nbytes // 4 // axis.size), device=device)
        buffer = comm.AllReduceBuffer(axis, whole.numel(), whole)
        calls: dict[str, Callable[[], object]] = {
            "all_gather": functools.partial(comm.all_gather, whole[:1], axis),
            "reduce_scatter": functools.partial(comm.reduce_scatter, whole, axis),
            "all_reduce": buffer.all_reduce,
        }
        for name, call in calls.items():
            found.setdefault(name, []).append((whole.nbytes, seconds(grid, call, device)))
        if axis.size == 2:
            message = whole.flatten()

            def there_and_back(message=message):
                for sender in (0, 1):
                    if axis.rank == sender:
                        comm.send(message, axis, 1 - sender)
                    else:
                        comm.recv(message, axis, sender)

            found.setdefault("message", []).append((whole.nbytes, seconds(grid, there_and_back, device) / 2))
    return found


def reading(grid: Grid, folder: Path) -> list[tuple[int, float]]:
    """(tokens of a sample, seconds to read it): from anywhere in the corpus, as training does, its chunks checked."""
    path = folder / f"corpus-{grid.size}.h5"
    with comm.together(grid.comm):
        if grid.rank == 0:
            text = folder / "corpus.txt"
            text.write_text("All ranks read from it at the same time.\n" * (CORPUS // 41))
            pack([str(text)], path)
    tokens, found = ShardedTokens(path, grid.comm), []
    places = np.random.default_rng(grid.rank)
    for count in SAMPLES:

        def sample(count: int = count) -> object:
            return tokens.read(int(places.integers(tokens.tokens - count)), count)

        found.append((count, seconds(grid, sample, _CPU)))
    tokens.close()
    return found


def memory(device: torch.device, ranks: int) -> float:
    """Bytes that a rank may have: the device's, or its share of the node's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        most = min(most, int(text))
    return most / ranks


def _wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _max():
    from mpi4py import MPI

    return MPI.MAX


if __name__ == "__main__":
    sys.exit(main())
