"""Buffers of modules that nobody knows, over replicas: a forward that changes them takes them from its own batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hpctrain.grid import Grid


def watch_buffers(model: torch.nn.Module, modules: Iterable[torch.nn.Module], grid: Grid) -> None:
    """Refuse the calls of the model that change floats in buffers of `modules`, as running statistics are; whole
    numbers, such as counts of calls, are the same on all replicas. Costs a microsecond a buffer and call.
    """
    if grid.data.size == 1:
        return
    paths = {module: path for path, module in model.named_modules()}
    watched = [
        (module, name, paths[module])
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    ]
    if not watched:
        return
    before: dict[tuple, tuple] = {}

    def remember(model, arguments):
        before.update(
            {(m, name): (m._buffers.get(name), getattr(m._buffers.get(name), "_version", 0)) for m, name, _ in watched}
        )

    def compare(model, arguments, output):
        for module, name, path in watched:
            buffer, version = before[module, name]
            now = module._buffers.get(name)
            if now is not buffer or (now is not None and now._version != version):
                raise ValueError(
                    f"the forward of {path or 'the model itself'} ({type(module).__name__}) changed its buffer "
                    f"{name!r}, from the batch of one of {grid.data.size} replicas; use data=1, or list the module in "
                    "replicate=[...] if what it writes does not depend on the batch"
                )

    model.register_forward_pre_hook(remember)
    model.register_forward_hook(compare)
