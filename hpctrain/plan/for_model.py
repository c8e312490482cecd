"""Of anybody's model: which units `ht.parallelize` divides, which it leaves whole, and what lies between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.config import load_config
from hpctrain.given import check_types
from hpctrain.plan import job as jobs
from hpctrain.plan.machine import Machine
from hpctrain.plan.memory import allocatable
from hpctrain.plan.network import Network
from hpctrain.plan.passes import Box

if TYPE_CHECKING:
    import torch

    from hpctrain.grid import Grid
    from hpctrain.plan.unit_rules import UnitGraph

PRECISIONS = {"torch.float64": "fp64", "torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


@dataclass(frozen=True)
class ModelPlan:
    """How a model is divided over a tensor axis.

    Attributes:
        box: x, y and z of the axis.
        divided: paths of the layers of each unit that is divided, pairs and attention together.
        whole: the same of those that `parallelize` could divide, and the plan leaves whole on every rank.
        shard_activations: as of `parallelize`.
        seconds: of a step of one call, with an optimizer of two moments.
        memory: bytes of a rank, of weights, gradients, the optimizer's state and what is kept for backward.
    """

    box: tuple[int, int, int]
    divided: tuple[tuple[str, ...], ...]
    whole: tuple[tuple[str, ...], ...]
    shard_activations: bool
    seconds: float
    memory: float

    @property
    def replicate(self) -> list[str]:
        """As of `parallelize`."""
        return [path for unit in self.whole for path in unit]


def for_model(
    model: torch.nn.Module, grid: Grid, example: Any, machine: Machine | str | Path = "here.toml",
    replicate: Sequence[str] = (),
) -> ModelPlan:  # fmt: skip
    """The plan of least time for a step on `grid.tensor`, of all that `ht.parallelize` can carry out: each pair of
    linear layers, attention and other layer is divided as it divides them, or left whole on every rank; activations
    between them are whole or sharded. Seconds of computing and moving are the machine's, and what a rank keeps is at
    most its memory: an integer linear program, as of `inside_stage`.

    Every rank calls it, before `parallelize(model, grid, plan=...)`. The first calls the model once with the example,
    without gradients; all get its plan. Generators and buffers are as before; on the meta device nothing is computed.
    Gathers of a weight that is read outside of its module are not counted.

    Args:
        example: what the model is called with, of the sizes of training: a tensor, a tuple of arguments, or a dict of
            those with names.
        machine: one that is known by name, or a file, as `hpctrain machine -o here.toml` writes it.
        replicate: as of `parallelize`; these stay whole in any case.

    Raises:
        ValueError: on every rank: for an unknown machine, one without figures for the model's type, and several nodes
            where its file is of one; where no plan fits; for pipeline, sequence and expert axes, whose cost on
            anybody's model is not known.
    """
    from hpctrain import comm  # brings MPI

    found = None
    with comm.together(grid.world):
        _check(model, grid)
        if grid.rank == 0:
            found = _best(model, grid, example, machine, replicate)
    return grid.comm.bcast(found)


def _check(model, grid):
    if hasattr(model, "hpctrain_grid"):
        raise ValueError("the model is already parallelized; plan before")
    sizes = {"pipeline": grid.pipeline.size, "sequence": grid.sequence.size, "expert": grid.expert.size}
    for name, size in sizes.items():
        if size > 1:
            raise ValueError(f"a plan of a model is of its tensor axis, got a grid with {name}={size}; leave plan out")


def _best(model, grid, example, machine, replicate) -> ModelPlan:
    from hpctrain.convert.units import divided_and_whole  # brings torch

    machine = Machine.load(machine) if isinstance(machine, (str, Path)) else machine
    check_types(machine=(machine, Machine))
    if not grid.world.one_node:
        machine.check_nodes(grid.size, len({*grid.world.nodes}))
    machine = machine.crowded(grid.size)
    limit = allocatable(machine)
    shards = (False, True) if grid.tensor.size > 1 else (False,)
    graphs = [unit_graph(model, grid, example, machine, replicate, each) for each in shards]
    problems = [graph.problem(limit) for graph in graphs]
    found = [(problem.cost(best), graph, best) for graph, problem in zip(graphs, problems)
             if (best := problem.best()) is not None]  # fmt: skip
    if not found:
        least = min(sum(float(each.min()) for each in problem.memory) for problem in problems)
        raise ValueError(
            f"the model needs at least {least:.4g} bytes a rank on tensor={grid.tensor.size}, where machine "
            f"{machine.name} has {max(0.0, limit):.4g} for it; use more ranks or smaller batches"
        )
    seconds, graph, best = min(found, key=lambda each: each[0])
    whole = graph.whole(best)
    plan = ModelPlan(
        box_of(grid), tuple(unit.paths for unit in graph.units if unit.paths not in whole), whole, graph.shards,
        seconds, graph.problem().needs(best),
    )  # fmt: skip
    again, _ = divided_and_whole(model, grid, [*replicate, *plan.replicate], plan.shard_activations)
    if others := {unit.paths for unit in again} ^ {*plan.divided}:
        named = ", ".join(sorted({path for paths in others for path in paths}))
        raise ValueError(
            f"a plan of {type(model).__name__} cannot be carried out: with others left whole, parallelize would divide "
            f"{named} otherwise; list them in replicate, or leave plan out"
        )
    return plan


def unit_graph(
    model: torch.nn.Module, grid: Grid, example: Any, machine: Machine, replicate: Sequence[str], shards: bool
) -> UnitGraph:
    """All choices, with sharded activations or with whole ones; of one rank, without communication."""
    from hpctrain.convert.units import divided_and_whole
    from hpctrain.plan.call_trace import trace
    from hpctrain.plan.unit_rules import UnitGraph

    dtype = next((str(parameter.dtype) for parameter in model.parameters()), "torch.float32")
    if dtype not in PRECISIONS:
        raise ValueError(f"a plan is of models of {', '.join(PRECISIONS)}, got {dtype}")
    units, whole = divided_and_whole(model, grid, replicate, shards)
    config = load_config(
        overrides=[f"grid.tensor={[*box_of(grid)]}", f"precision.compute={PRECISIONS[dtype]}", "train.clip=0"]
    )
    job, choice = jobs.read(config)
    return UnitGraph(trace(model, example, units, whole), units, Box(job, machine, Network(machine), choice), shards)


def box_of(grid: Grid) -> tuple[int, int, int]:
    """x, y and z of the tensor axis."""
    return grid.tensor.x.size, grid.tensor.y.size, grid.tensor.z.size
