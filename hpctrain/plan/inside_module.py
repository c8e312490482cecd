"""Inside a stage, for anybody's torch module: how each of its operators is divided over the axes of a tensor box."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.config import load_config
from hpctrain.models import TransformerCosts
from hpctrain.plan import job as jobs
from hpctrain.plan.inside_stage import StagePlan, divided
from hpctrain.plan.job import Choice, Job
from hpctrain.plan.machine import Machine
from hpctrain.plan.stage_rules import Operator, Stage

if TYPE_CHECKING:
    import torch

    from hpctrain.plan.operators import TracedOperator


class ModuleStage(Stage):
    """A module whose operators were traced, on the tensor box of a choice."""

    def __init__(self, job: Job, machine: Machine, choice: Choice, traced: Sequence[TracedOperator]):
        self.traced = traced
        super().__init__(job, machine, choice)

    def _graph(self) -> tuple[list[Operator], list[tuple[int, int]]]:
        operators = []
        for each in self.traced:
            if each.kind == "product":
                operators.append(self._product(each.name, each.n_in, each.n_out))
            elif each.norm:
                operators.append(self._stream(each.name, each.n_out))
            else:
                make = self._attention if each.kind == "attention" else self._activation
                operators.append(make(each.n_in, each.n_out)._replace(name=each.name))
        edges = {(taken, number) for number, each in enumerate(self.traced) for taken in each.inputs}
        return operators, sorted(edges)

    def roles(self) -> list[str]:
        found = ["stream"]
        for each in self.traced[1:]:
            inner = {found[taken] for taken in each.inputs if taken < len(found)} & {"in", "middle"}
            outer = {found[taken] for taken in each.inputs if taken < len(found)} - inner
            if each.kind == "product":
                found.append("out" if inner else "in")
            else:
                found.append("stream" if each.kind == "elementwise" and (outer or not inner) else "middle")
        return found


def inside_module(
    module: torch.nn.Module,
    x: torch.Tensor,
    tensor: int | Sequence[int],
    machine: Machine | str,
    precision: str = "fp32",
    limit: float | str = math.inf,
) -> StagePlan:
    """The rules of least time for the operators of a torch module on a tensor box, by one call of it: products by
    weights, attention and element-wise operators; see `inside_stage`. On the `meta` device nothing is computed. Starts
    no MPI.

    >>> import torch
    >>> with torch.device("meta"):
    ...     block = torch.nn.Sequential(torch.nn.LayerNorm(4096), torch.nn.Linear(4096, 16384), torch.nn.GELU(),
    ...                                 torch.nn.Linear(16384, 4096))
    ...     x = torch.empty(4, 2048, 4096)
    >>> plan = inside_module(block, x, 8, "dgx-h100", "bf16")
    >>> [(name, rule) for name, rule, _ in plan.operators]
    [('0', {'rows': ('x',)}), ('1', {'out': ('x',)}), ('2', {'features': ('x',)}), ('3', {'in': ('x',)})]

    Args:
        module: a block, or any part of one, that takes and gives a tensor.
        x: of (sequences, …, features).
        tensor: ranks of the box, (x, y, z), or of x alone.
        precision: as precision.compute.
        limit: bytes that a rank may keep from forward to backward; "even": no more than where no element is on two
            ranks.

    Raises:
        ValueError: for an unknown machine, operators of another kind, and where no rules keep so little.
    """
    from hpctrain.plan.operators import operators  # brings torch

    machine = Machine.load(machine) if isinstance(machine, str) else machine
    traced = operators(module, x)
    box = [tensor, 1, 1] if isinstance(tensor, int) else [*tensor]
    config = load_config(overrides=[f"grid.tensor={box}", f"precision.compute={precision}"])
    job, choice = jobs.read(config)
    heads = max(each.heads for each in traced) or 1
    width = max((each.n_out for each in traced if each.heads), default=heads)
    costs = TransformerCosts(
        1, x.shape[-1], math.prod(x.shape[1:-1]), 1, (), heads=heads, kv_heads=heads, attention_width=width
    )
    job = dataclasses.replace(job, costs=costs, heads=heads, groups=heads, batch=x.shape[0])
    stage = ModuleStage(job, machine.crowded(config.ranks), choice._replace(microbatches=1), traced)
    least = sum(min(rule.kept for rule in operator.rules) for operator in stage.operators)
    return divided(stage, least * (1 + 1e-9) if limit == "even" else float(limit))
