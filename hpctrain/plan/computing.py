"""Rates at which a rank computes while all others do, by the operations that training consists of."""

from __future__ import annotations

import functools
import math
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from hpctrain import cores, gemm
from hpctrain.comm.buffers import operation
from hpctrain.grid import Grid
from hpctrain.layers import Attention, Tokens
from hpctrain.layers.gelu import gelu_tanh
from hpctrain.models.gpt2.model import Block
from hpctrain.models.gpt2.shape import GPT2Shape
from hpctrain.pipeline.given_gradients import scalar_of
from hpctrain.plan.passes import BACKWARD, INNER, OPERATIONS, RESIDUAL
from hpctrain.randomness import RngKey

Clock = Callable[[], float]
CALLS = 9
TURNS = 0.03  # s in which every rank of several on a core has had its turns; the scheduler's are of some milliseconds


def types(device: torch.device) -> dict[str, torch.dtype]:
    """Those that are worth while on the device."""
    wide = {"fp32": torch.float32, "fp64": torch.float64}
    return {**wide, "bf16": torch.bfloat16, "fp16": torch.float16} if device.type == "cuda" else wide


def _quartile(taken: Sequence[float]) -> float:
    # of two calls the other method says less than the quicker one took, even less than nothing
    return statistics.quantiles(taken, method="inclusive")[0]


def in_turn(
    grid: Grid, works: Sequence[Callable[[], object]], device: torch.device, clock: Clock = time.perf_counter,
    typical: Callable[[Sequence[float]], float] = _quartile,
) -> list[float]:  # fmt: skip
    """Seconds of a call of each, on the slowest rank. Calls alternate, so that all see the same of what others do."""

    def taken(work: Callable[[], object], repeats: int) -> float:
        _wait(device)
        grid.comm.Barrier()
        start = clock()
        for _ in range(repeats):
            work()
        _wait(device)
        return grid.comm.allreduce(clock() - start, op=operation("max")) / repeats

    for work in works:
        work()
    crowded = of_a_core(grid) > 1
    repeats = [math.ceil(TURNS / taken(work, 1)) if crowded else 1 for work in works]
    calls = [[taken(work, count) for work, count in zip(works, repeats)] for _ in range(CALLS)]
    return [typical(each) for each in zip(*calls)]


def computing(grid: Grid, works: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """The same of calls that wait for nobody: what the core takes, whoever else uses it, for all its ranks."""
    if device.type != "cpu":
        return in_turn(grid, works, device)
    return [of_a_core(grid) * taken for taken in in_turn(grid, works, device, time.thread_time)]


def seconds(grid: Grid, work: Callable[[], object], device: torch.device) -> float:
    """Of a call that waits for nobody."""
    return computing(grid, [work], device)[0]


def of_a_core(grid: Grid) -> float:
    """Ranks of each core where a node has more of them than cores, else 1. A rank alone may be bound to a few."""
    nodes, allowed = grid.world.nodes, grid.comm.allgather(os.sched_getaffinity(0))
    here = [each for node, each in zip(nodes, allowed) if node == nodes[grid.rank]]
    ranks = len(here) / cores.find(affinity=set().union(*here)).count
    return grid.comm.allreduce(max(1.0, ranks), op=operation("max"))


def product(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """A product of (m, k, n)."""
    m, k, n = shape
    a, b = torch.ones(m, k, dtype=dtype, device=device), torch.ones(k, n, dtype=dtype, device=device)
    out = torch.empty(m, n, dtype=dtype, device=device)
    return lambda: gemm.mm(a, b, out)


def elements(grid: Grid, device: torch.device, nbytes: int) -> float:
    """Bytes a second that an element-wise operation reads and writes, of tensors of so many."""
    a, b = (torch.ones(nbytes // 4, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 3 * nbytes / seconds(grid, lambda: torch.add(a, b, out=out), device)


def update(grid: Grid, device: torch.device, tensors: int = 16, elements: int = 1 << 20) -> float:
    """Bytes a second that clipping and AdamW read and write, of more than caches hold: the gradients' norm, their
    multiplication, and the update of weights and two moments, 40 bytes an element."""
    weights, gradients, means, squares = (
        [torch.full((elements,), 1e-3, device=device) for _ in range(tensors)] for _ in range(4)
    )
    steps = [torch.ones((), device=device) for _ in range(tensors)]

    def step():
        torch._foreach_norm(gradients)
        torch._foreach_mul_(gradients, 1.0)
        torch._fused_adamw_(
            weights, gradients, means, squares, [], steps, lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    return 40 * tensors * elements / seconds(grid, step, device)


def tables(grid: Grid, device: torch.device, nbytes: int = 8 * 2**20) -> float:
    """Bytes a second of a table's gradient: zeros in new memory, their sum with another, and a copy. What is so large
    is given back to the system, and a processor's pages are cleared when they are first written."""
    head, total, out = (torch.ones(nbytes // 4, device=device) for _ in range(3))

    def new() -> torch.Tensor:
        if device.type != "cpu":
            return torch.empty_like(head)
        return torch.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=head.dtype)

    return (1 + 3 + 2) * nbytes / seconds(grid, lambda: out.copy_(torch.add(new().zero_(), head, out=total)), device)


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


def weights(grid: Grid, device: torch.device, most: int = 32) -> dict[str, float]:
    """How many bytes of weights stay in a cache from one product to the next, by products of few rows with 1, 2, 4 …
    weights in turn, all of which have another one's place in it by then, or not; and bytes a second at which one that
    did not stay is read, besides, 0 where that takes no longer. What the system says of caches is the host's, which
    virtual machines share."""
    x, out = torch.ones(64, 512, device=device), torch.empty(64, 2048, device=device)
    each = [torch.ones(512, 2048, device=device) for _ in range(most)]
    counts = [2**k for k in range(most.bit_length())]

    def products(several: list[torch.Tensor]) -> None:
        for weight in several:
            gemm.mm(x, weight, out)

    works = [functools.partial(products, each[:count] * (most // count)) for count in counts]
    taken = {count: found / most for count, found in zip(counts, computing(grid, works, device))}
    warm, cold = taken[1], max(taken[1], taken[most])
    kept = max(count for count in taken if taken[count] <= (warm + cold) / 2)
    nbytes = each[0].nbytes
    return {"cache": kept * nbytes, "cold": nbytes / (cold - warm) if cold > warm else 0.0}


def launch(grid: Grid, device: torch.device, blocks: int = 4) -> float:
    """Seconds that an operation takes besides: a block of GPT-2 on next to nothing, forward and backward, over its
    operations as a prediction counts them."""
    from mpi4py import MPI

    with Grid(1, comm=MPI.COMM_SELF) as alone:
        shape, tokens = GPT2Shape(layers=1, width=8, heads=1, context=4, vocabulary=8), Tokens.of(alone, 1, 4)
        block = Block(alone, shape, algorithm="agarwal", key=RngKey(0), device=device)
        x = torch.ones(4, shape.width, device=device, requires_grad=True)

        def chain():
            y = x
            for _ in range(blocks):
                y = block(y, tokens)
            scalar_of([y], [x]).backward()

        return seconds(grid, chain, device) / (blocks * (3 * OPERATIONS + 4 * 4))  # and those of four products


def attention(grid: Grid, device: torch.device, length: int, width: int, heads: int = 8) -> float:
    """flop/s in causal attention of sequences of this length by heads of this width, of the half of the scores that
    count, forward and backward. Long ones go by tiles."""
    from mpi4py import MPI

    with Grid(1, comm=MPI.COMM_SELF) as alone:
        layer, tokens = (
            Attention(alone, heads * width, heads, key=RngKey(0), device=device),
            Tokens.of(alone, 2, length),
        )
        q, k, v = (torch.ones(2, heads, length, width, device=device, requires_grad=True) for _ in range(3))
        flops = 2 * 2 * heads * length**2 * width * (1 + 2.5)  # backward computes the scores once more
        return flops / seconds(grid, lambda: scalar_of([layer.attend(q, k, v, tokens)], [q, k, v]).backward(), device)


def _wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
