"""Inside a stage: how each operator of a block is divided over the axes of a tensor box, so that computing and moving
take the least time together. `stage_rules.py` has the operators and their rules.

Source: Zheng et al., "Alpa" (OSDI 2022), §4; norms and sums are merged into one operator of the residual stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.config import Config
from hpctrain.plan import job as jobs
from hpctrain.plan.estimator import Estimator
from hpctrain.plan.machine import Machine
from hpctrain.plan.memory import allocatable
from hpctrain.plan.stage_rules import Stage


class Divided(NamedTuple):
    """An operator and how it is divided: {dim: axes}."""

    name: str
    rule: dict[str, tuple[str, ...]]
    seconds: float


@dataclass(frozen=True)
class StagePlan:
    """The best rules of a block, with a microbatch.

    Attributes:
        operators: in their order.
        seconds: forward and backward; moving: of them, on the edges.
        kept: bytes from forward to backward.
        present: seconds of the rules that the layers follow with `tensor.algorithm`, or None where panels travel.
    """

    operators: list[Divided]
    seconds: float
    moving: float
    kept: float
    present: float | None


def inside_stage(config: Config, machine: Machine | str) -> StagePlan:
    """The rules of least time for the blocks of a configuration on its tensor box, that fit into the machine's memory
    as the rest of the configuration stands. Starts no MPI.

    Raises:
        ValueError: as `predict`; for boxes of stages, a mixture of experts, and where no rules fit.
    """
    machine = Machine.load(machine) if isinstance(machine, str) else machine
    machine = machine.crowded(config.ranks)
    jobs.check_one_box(config, "a plan inside a stage")
    job, choice = jobs.read(config)
    stage = Stage(job, machine, choice)
    free = allocatable(machine) - Estimator(job, machine).memory.allocated(choice)
    blocks = -(-job.costs.layers // choice.pipeline) * min(choice.pipeline, choice.microbatches)
    limit = stage.box.block(choice.recompute).kept + free / blocks
    return divided(stage, math.inf if choice.recompute == "block" and free >= 0 else limit)


def divided(stage: Stage, limit: float = math.inf) -> StagePlan:
    """The rules of least time for a block that keeps at most `limit` bytes of a microbatch."""
    problem = stage.problem(limit)
    best = problem.best()
    if best is None:
        least = sum(each.min() for each in problem.memory)
        raise ValueError(
            f"a block keeps at least {least:.4g} bytes of a microbatch, where {max(0, limit):.4g} are left for it; "
            "use more ranks, more microbatches or train.recompute"
        )
    rules = [operator.rules[number] for operator, number in zip(stage.operators, best)]
    found = []
    for operator, rule in zip(stage.operators, rules):
        dims = dict.fromkeys(cut for cut in rule.cuts if cut)
        over = {dim: tuple(axis for axis, cut in zip(stage.axes, rule.cuts) if cut == dim) for dim in dims}
        found.append(Divided(operator.name, over, rule.seconds))
    seconds = problem.cost(best)
    present = None if stage.box.plane else problem.cost(stage.present())
    return StagePlan(found, seconds, seconds - sum(rule.seconds for rule in rules), problem.needs(best), present)


def text(plan: StagePlan) -> str:
    """A line an operator: the axes that cut each of its dims, and its milliseconds."""
    lines = [f"{plan.seconds * 1e3:.4g} ms a block and microbatch, of which {plan.moving * 1e3:.4g} between operators"]
    for name, rule, seconds in plan.operators:
        over = "  ".join(f"{dim}: {' '.join(axes)}" for dim, axes in rule.items())
        lines.append(f"  {name:15}{1e3 * seconds:9.4g} ms  {over}")
    if plan.present is None:
        lines.append("the layers follow other rules: panels travel in the products of tensor.algorithm")
    else:
        more = 100 * (plan.present / plan.seconds - 1)
        lines.append(f"as the layers are divided: {plan.present * 1e3:.4g} ms, {more:.1f} % more")
    return "\n".join(lines)
