"""Options of a message driven pipeline: how many instances are under way, and when weights are updated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AMPNet:
    """Ranks work on whatever has arrived, gradients before activations; every node updates its own weights by itself.

    With max_active_keys=1 it is serial SGD to the bit: an instance goes through the network after the updates of the
    one before. With more, a gradient is that of the weights which the node had at the forward, and is applied to newer
    ones; what a run gives then depends on the speed of its ranks.

    Source: Gaunt et al., "AMPNet: Asynchronous Model-Parallel Training for Dynamic Neural Networks" (2017), §3.

    Attributes:
        max_active_keys: instances (samples, microbatches) that are under way at most.
        min_update_frequency: a node updates its weights by the sum of the gradients of each so many instances that are
            done there: when the next instance comes to it, or, by what is left, when the step ends.
        staleness_correction: the learning rate of an update is divided by the mean staleness of its gradients, where
            that is above 1 (Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", 2016). Staleness
            is the number of updates between the weights that a gradient is of and those that it is applied to.

    Raises:
        ValueError: for a number below 1.
    """

    max_active_keys: int = 4
    min_update_frequency: int = 1
    staleness_correction: bool = False

    def __post_init__(self):
        for name in ("max_active_keys", "min_update_frequency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
