"""Measured costs of a chain of layers, for `pipeline.partition`.

`hpctrain.pipeline` does not import this file: it brings torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from hpctrain.pipeline.partitioners import LayerCosts

R = TypeVar("R")

Layer = Callable[[torch.Tensor], torch.Tensor]


def profile(
    layers: Sequence[Layer], make_input: Callable[[], torch.Tensor], repeats: int = 5, split_backward: Any = None
) -> LayerCosts:
    """Least seconds of each layer of a chain after a pass to warm up, and its bytes. What others do to the machine
    only ever adds to a time.

    The weight gradient's time is the full backward's less the input gradient's. Gradients are added up, as from the
    second microbatch of a step on; those that were there before are put back. The activation of a layer is what its
    backward needs, its input included, without weights and without its output, which the next layer counts.

    Args:
        layers: functions of one tensor.
        make_input: gives the first layer's input. If it requires no gradient, the first layer has no input gradient.
        split_backward: `layers.SplitBackward` of the model, whose layers put off their weight gradients as they do in
            schedules with split backwards; without it, input gradients are those of `torch.autograd.grad`.
    """
    x, sizes = make_input(), []
    gradients: dict[torch.Tensor, torch.Tensor | None] = {}
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
            y, times = _times(layer, x, split_backward)
            run.append(times)
            x = y.detach().requires_grad_()
        runs.append(run)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    least = [map(min, zip(*each)) for each in zip(*runs[1:])]
    forward, inputs, whole = map(list, zip(*least))
    message, kept, weights = map(list, zip(*sizes))
    both = [(min(i, b), max(0.0, b - i)) for i, b in zip(inputs, whole)]
    return LayerCosts(forward, [i for i, _ in both], [w for _, w in both], message, kept, weights)


def _times(layer: Layer, x: torch.Tensor, split_backward) -> tuple[torch.Tensor, tuple[float, float, float]]:
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
        if split_backward is not None:
            with split_backward:
                inputs, _ = _clock(lambda: y.backward(gradient))
        elif x.requires_grad:
            inputs, _ = _clock(lambda: torch.autograd.grad(y, x, gradient))
    return y, (forward, inputs, whole)


def _leaf(x: torch.Tensor) -> torch.Tensor:
    """The same values, without a gradient from an earlier use."""
    return x.detach().requires_grad_(x.requires_grad)


def _clock(work: Callable[[], R]) -> tuple[float, R]:
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
