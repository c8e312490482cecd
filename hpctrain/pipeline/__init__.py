"""Pipelines: the order of work on every rank, its proof and simulation, its lowering to messages, and the executor.

Everything but the executor, networks and `ampnet` is plain Python; it starts neither MPI nor torch.
"""

import importlib

from hpctrain.pipeline.actions import Action, Fused
from hpctrain.pipeline.graph import Edge, StageGraph
from hpctrain.pipeline.list_scheduler import list_schedule
from hpctrain.pipeline.lowering import Lowered
from hpctrain.pipeline.message_driven import AMPNet
from hpctrain.pipeline.partitioners import LayerCosts, partition, score
from hpctrain.pipeline.registry import NAMES, schedule
from hpctrain.pipeline.schedules import Schedule
from hpctrain.pipeline.simulate import Costs, Simulation
from hpctrain.pipeline.synchronous import forward_only, gpipe, interleaved, one_f_one_b
from hpctrain.pipeline.terapipe import balanced_slices, token_slices

__all__ = [
    "AMPNet",
    "Action",
    "Costs",
    "Edge",
    "Executor",
    "Fused",
    "LayerCosts",
    "Lowered",
    "NAMES",
    "Network",
    "Schedule",
    "Simulation",
    "StageGraph",
    "balanced_slices",
    "forward_only",
    "gpipe",
    "interleaved",
    "list_schedule",
    "one_f_one_b",
    "partition",
    "schedule",
    "score",
    "token_slices",
]


def __getattr__(name):
    if name == "ampnet":
        return importlib.import_module("hpctrain.pipeline.ampnet")
    if name in ("Executor", "Network"):  # bring torch
        return getattr(importlib.import_module(f"hpctrain.pipeline.{name.lower()}"), name)
    raise AttributeError(f"module 'hpctrain.pipeline' has no attribute {name!r}")
