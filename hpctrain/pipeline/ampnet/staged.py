"""A model that is cut into stages, such as GPT-2 and Llama, as a chain of nodes; its microbatches are the instances."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from hpctrain.pipeline.ampnet.message_graph import MessageGraph
from hpctrain.pipeline.ampnet.source import Source
from hpctrain.pipeline.ampnet.transform import Loss, Transform


class Staged(Protocol):
    """This rank's part of a model, as `models.staged.StagedTransformer`."""

    @property
    def stages(self) -> Mapping[int, range]: ...
    @property
    def placement(self) -> Mapping[tuple[int, int], int]: ...
    @property
    def last(self) -> int: ...
    def parameters_of(self, stage: int) -> Iterator[torch.nn.Parameter]: ...
    def __call__(self, x: torch.Tensor, tokens: object, stage: int) -> torch.Tensor: ...
    def loss(self, y: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor: ...


def chain_of(model: Staged) -> tuple[MessageGraph, dict[str, int]]:
    """The graph and its placement; the nodes of this rank have their modules."""
    graph, placement, given = MessageGraph(), {"source": model.placement[0, 0]}, lambda state, microbatch: microbatch
    graph.add("source", Source(lambda microbatch: [(0, microbatch.ids, ())]))
    for stage in range(model.last + 1):
        kind, name = Loss if stage == model.last else Transform, f"stage {stage}"
        node = kind(functools.partial(_Stage, model, stage), given=given)
        if stage in model.stages:
            node.module = node.make()
        graph.add(name, node).connect(f"stage {stage - 1}" if stage else "source", name)
        placement[name] = model.placement[0, stage]
    graph.check()
    return graph, placement


class _Stage(torch.nn.Module):
    def __init__(self, model: Staged, stage: int):
        super().__init__()
        self.model, self.stage = model, stage
        self.own = set(model.parameters_of(stage))

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True):
        """Those of the stage alone: the rank's other stages are nodes of their own, which update themselves."""
        every = super().named_parameters(prefix, recurse, remove_duplicate)
        return ((name, parameter) for name, parameter in every if parameter in self.own)

    def forward(self, x, microbatch):
        y = self.model(x, microbatch.tokens, self.stage)
        return self.model.loss(y, microbatch.targets, microbatch.scale) if self.stage == self.model.last else y
