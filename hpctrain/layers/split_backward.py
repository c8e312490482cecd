"""Weight gradients that are computed later than the input gradients, for pipeline schedules with split backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from hpctrain.grid import Axis
from hpctrain.layers.box import BoxProduct
from hpctrain.layers.experts.experts import Experts
from hpctrain.layers.linear import Linear
from hpctrain.layers.plane import PlaneProduct


class HasModules(Protocol):
    """A torch.nn.Module, or what stands for one."""

    def modules(self) -> Iterator[torch.nn.Module]: ...


class SplitBackward:
    """Puts off the weight gradients of a model's products: backward then gives the gradients of inputs and of all else
    (biases, norms, embeddings), and leaves the products to be called.

        split_backward = SplitBackward(model)
        with split_backward as products:
            loss.backward()
        ...
        with torch.no_grad():
            for product in products:
                product()

    A put off product keeps the layer's input and the gradient of its output, as this rank was given them, and gathers
    both once more.

    Args:
        model: this rank's stages.
        axis: the pipeline axis, where it is enough that another rank has products; the call is then collective.

    Raises:
        ValueError: when the model has no `layers.Linear`, so that nothing could be put off.

    Source: Qi et al., "Zero bubble pipeline parallelism" (ICLR 2024), §2.
    """

    def __init__(self, model: HasModules, axis: Axis | None = None):
        products: list[BoxProduct | PlaneProduct | Experts] = [
            module.product for module in model.modules() if isinstance(module, Linear)
        ]
        products += [module for module in model.modules() if isinstance(module, Experts)]
        if not (axis.comm.allreduce(len(products)) if axis else products):
            raise ValueError(
                f"{type(model).__name__} has no hpctrain.layers.Linear whose weight gradient could be put off; use a "
                "schedule with whole backwards, such as 1f1b, or layers of hpctrain"
            )
        self.queue: list[Callable[[], None]] | None = None
        for product in products:
            product.split_backward = self

    def __enter__(self) -> list[Callable[[], None]]:
        self.queue = []
        return self.queue

    def __exit__(self, *_: object) -> None:
        self.queue = None
