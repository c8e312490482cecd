"""Measured costs of a model's layers, for `pipeline.partition`.

`hpctrain.pipeline` does not import this file: it brings torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from hpctrain import comm
from hpctrain.grid import Grid
from hpctrain.layers import Tokens, WeightGradients
from hpctrain.models.gpt2 import GPT2
from hpctrain.pipeline.partitioners import LayerCosts, partition
from hpctrain.randomness import Key

Layer = Callable[[torch.Tensor], torch.Tensor]


def profile(
    layers: Sequence[Layer], make_input: Callable[[], torch.Tensor], repeats: int = 5, later=None
) -> LayerCosts:
    """Least seconds of each layer of a chain after a pass to warm up, and its bytes. What others do to the machine
    only ever adds to a time.

    The weight gradient's time is the full backward's less the input gradient's. Gradients are added up, as from the
    second microbatch of a step on; those that were there before are put back. The activation of a layer is what its
    backward needs, its input included, without weights and without its output, which the next layer counts.

    Args:
        layers: functions of one tensor.
        make_input: gives the first layer's input. If it requires no gradient, the first layer has no input gradient.
        later: `layers.WeightGradients` of the model, whose layers put off their weight gradients as they do in
            schedules with split backwards; without it, input gradients are those of `torch.autograd.grad`.
    """
    x, sizes, gradients = make_input(), [], {}
    for layer in layers:
        y, parameters, activation = _kept(layer, x)
        gradients |= {p: p.grad for p in parameters}
        sizes.append((y.nbytes, activation, sum(p.nbytes for p in parameters)))
        x = y.detach().requires_grad_()
    for parameter in gradients:
        parameter.grad = None
    runs = []
    for _ in range(repeats + 1):
        x, run = make_input(), []
        for layer in layers:
            y, times = _times(layer, x, later)
            run.append(times)
            x = y.detach().requires_grad_()
        runs.append(run)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    least = [map(min, zip(*each)) for each in zip(*runs[1:])]
    forward, inputs, whole = map(list, zip(*least))
    message, activation, weights = map(list, zip(*sizes))
    both = [(min(i, b), max(0.0, b - i)) for i, b in zip(inputs, whole)]
    return LayerCosts(forward, [i for i, _ in both], [w for _, w in both], message, activation, weights)


def profile_gpt2(
    shape, sequences: int, *, algorithm="agarwal", dtype=torch.float32, device=None, repeats: int = 5
) -> LayerCosts:
    """Costs of a GPT-2's blocks on a microbatch of `sequences`, measured by this process alone.

    The first block has the embeddings' costs besides its own, the last those of the projection onto the vocabulary and
    the loss; one block is measured for all others. A tensor grid would spread all of them: what counts for a partition
    are the ratios.
    """
    from mpi4py import MPI  # starts MPI, so not at import

    grid = Grid(comm=MPI.COMM_SELF)
    pieces = min(3, shape.layers)  # first, one for all between, last
    here = {(0, stage): 0 for stage in range(pieces)}
    shorter = type(shape)(**{**vars(shape), "layers": pieces})
    model = GPT2(grid, shorter, placement=here, algorithm=algorithm, key=Key(0), dtype=dtype, device=device)
    tokens = Tokens.of(grid, sequences, shape.context, algorithm=algorithm)
    ids = torch.randint(shape.vocabulary, (sequences * shape.context,), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)

    def piece(stage: int) -> Layer:
        def forward(x):
            y = model(x, tokens, stage)
            return model.loss(y, ids, 1 / len(ids)) if stage == model.last else y

        return forward

    measured = profile([piece(stage) for stage in range(pieces)], lambda: ids, repeats, WeightGradients(model))
    between = shape.layers - 2
    costs = {
        name: values[:1] + values[1:2] * between + values[2:] if between > 0 else values
        for name, values in vars(measured).items()
    }
    return LayerCosts(**costs)


def partition_gpt2(
    world, method: str | Sequence[int], shape, sequences: int, ranks: int, microbatches: int, *, algorithm="agarwal",
    dtype=torch.float32, device=None, **options,
) -> list[int]:  # fmt: skip
    """Blocks of each stage of a GPT-2, for `models.gpt2.GPT2(cut=…)`; the same on all ranks of `world`.

    The first rank of this communicator (mpi4py) measures and decides for all, since neither clocks nor exponentials are
    the same everywhere. Nothing is measured where costs do not matter.

    Args:
        sequences: of a microbatch.
        options: of `pipeline.partition`.

    Raises:
        ValueError: on all ranks, as `pipeline.partition`.
    """
    counts = None
    with comm.together(world):
        if world.rank == 0:
            costs = LayerCosts([1.0] * shape.layers)
            if method in ("dp", "lp", "rl") or options.get("memory") is not None:
                costs = profile_gpt2(shape, sequences, algorithm=algorithm, dtype=dtype, device=device)
            counts = partition(method, costs, ranks, microbatches, **options)
    return world.bcast(counts)


def _times(layer: Layer, x: torch.Tensor, later) -> tuple[torch.Tensor, tuple[float, float, float]]:
    """The output; seconds of the forward, of the backward to the input alone, and of the full backward.

    Each backward has a forward of its own, as some use up what it kept.
    """
    inputs = whole = 0.0
    x, gradient = _leaf(x), None
    forward, y = _clock(lambda: layer(x))
    if y.requires_grad:
        gradient = torch.ones_like(y)
        whole, _ = _clock(lambda: y.backward(gradient))
        x = _leaf(x)
        y = layer(x)
        if later is not None:
            with later:
                inputs, _ = _clock(lambda: y.backward(gradient))
        elif x.requires_grad:
            inputs, _ = _clock(lambda: torch.autograd.grad(y, x, gradient))
    return y, (forward, inputs, whole)


def _leaf(x: torch.Tensor) -> torch.Tensor:
    """The same values, without a gradient from an earlier use."""
    return x.detach().requires_grad_(x.requires_grad)


def _clock(work: Callable[[], object]) -> tuple[float, object]:
    _wait()
    start = time.perf_counter()
    result = work()
    _wait()
    return time.perf_counter() - start, result


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _kept(layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """The output, the weights it depends on, and the bytes of all else that its backward needs."""
    kept = []
    x = _leaf(x)

    def pack(tensor):
        kept.append(tensor.detach())  # not the tensor itself: an output would keep its own graph alive
        return kept[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    nodes = list(_nodes(y))
    parameters = [node.variable for node in nodes if hasattr(node, "variable") and node.variable is not x]
    for node in nodes:  # functions written in Python may keep tensors as attributes
        for value in getattr(node, "__dict__", {}).values():
            kept += [part for part in (value if isinstance(value, tuple) else [value]) if torch.is_tensor(part)]
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in kept}
    for other in (*parameters, y):
        storages.pop(other.untyped_storage().data_ptr(), None)
    return y, parameters, sum(storages.values())


def _nodes(y: torch.Tensor) -> Iterator:
    """The graph behind a tensor, each node once."""
    seen, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            yield node
