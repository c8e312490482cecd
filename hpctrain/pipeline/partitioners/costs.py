"""What the layers of a chain cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.pipeline.simulate import PerStage


@dataclass(frozen=True, init=False)
class LayerCosts:
    """Times of one microbatch and bytes, for each layer of a chain; one number stands for a list of equal ones.

    Attributes:
        forward: a list, as long as there are layers. Any unit of time.
        input_gradient, weight_gradient: a full backward takes both.
        message: bytes that the layer gives to the next one; the gradient that comes back is as large.
        activation: bytes held from the layer's forward to its gradients.
        weights: bytes of the layer's weights, with all that is kept for each of them.

    Raises:
        ValueError: for lists of different lengths, and for a cost below zero.

    >>> LayerCosts([1.0, 2.0], input_gradient=0.5).input_gradient
    [0.5, 0.5]
    """

    forward: list[float]
    input_gradient: list[float]
    weight_gradient: list[float]
    message: list[int]
    activation: list[float]
    weights: list[float]

    def __init__(
        self, forward: Sequence[float], input_gradient: PerStage = 0.0, weight_gradient: PerStage = 0.0,
        message: int | Sequence[int] = 0, activation: PerStage = 0, weights: PerStage = 0,
    ):  # fmt: skip
        given = {
            "forward": forward, "input_gradient": input_gradient, "weight_gradient": weight_gradient,
            "message": message, "activation": activation, "weights": weights,
        }  # fmt: skip
        layers = len(forward)
        for name, value in given.items():
            values = [value] * layers if isinstance(value, (int, float)) else list(value)
            if len(values) != layers:
                raise ValueError(f"{name} lists {len(values)} values for {layers} layers; give one, or {layers}")
            if not all(0 <= v < math.inf for v in values):
                raise ValueError(f"{name}={value}: costs are finite and at least 0")
            object.__setattr__(self, name, values)

    def __len__(self):
        return len(self.forward)
