"""Any stage graph of torch modules as a network to train: branches, skips and joins, each stage on its rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hpctrain import comm
from hpctrain.parameter import annotate
from hpctrain.pipeline.actions import Action
from hpctrain.pipeline.draws import DrawCheck, refuse_dropout
from hpctrain.pipeline.executor import StageWork
from hpctrain.pipeline.schedules import Schedule
from hpctrain.randomness import RngKey, check_key, seeded
from hpctrain.shard import Shard

if TYPE_CHECKING:
    from hpctrain.grid import Grid


class Network(torch.nn.Module):
    """This rank's stages of a network, for `ht.Trainer` or, by `work`, for the `Executor` itself.

        graph = StageGraph(4, [Edge(0, 1, (8, 16)), Edge(0, 2, (8, 16)), Edge(1, 3, (8, 16)), Edge(2, 3, (8, 16))])
        schedule = list_schedule(graph, {(0, 0): 0, (0, 1): 0, (0, 2): 1, (0, 3): 1}, microbatches=4)
        network = Network(grid, schedule, [lambda: nn.Linear(3, 16), nn.Tanh, nn.Sigmoid, Head])
        trainer = ht.Trainer(network, grid, torch.optim.SGD(network.parameters(), 0.1), schedule)
        loss, norm = trainer.step([(x, target), ...])  # four pairs, of any numbers of samples

    A stage is called with what comes along its edges, in the order of `graph.into[stage]`, and returns one tensor,
    which goes along every edge of `graph.out[stage]`, or one for each. A stage that no edge leads to is given the
    microbatch's input instead. A stage that no edge leaves is given the target as its last argument and returns the
    loss, divided by the samples of all microbatches and replicas. What comes along an edge must not be changed in
    place.

    With one replica of each stage, and backwards in the order of the microbatches, as `list_schedule` has them, the
    loss and every gradient are, bit for bit, those of the stages called one after another in the order `graph.sorted`,
    microbatch after microbatch; where a stage uses at several places an input that others use too, to rounding, since
    it adds up its own uses first.

    A rank may have no weights at all; torch's optimizers take that as `[{"params": list(network.parameters())}]`.

    Args:
        grid: the process grid. With tensor axes, stages are made of `hpctrain.layers`.
        schedule: gives the graph and the placement. The shape of an edge is that of a microbatch, samples first. One
            of `pipeline.schedule` has edges of float32 without shapes; of others, or with shapes, it is
            `dataclasses.replace(schedule, graph=StageGraph.chain(stages, shape, dtype))`.
        stages: for each stage a function without arguments that makes its module; only called on the ranks that hold
            the stage. Its random numbers, drawn from torch's generator, are the same on every grid.
        key: names the initial weights; by default drawn from torch's generator on the first rank.
        shape: function (edge, microbatch) -> shape of the message, where it is not the samples of the microbatch's
            input, `len(input)`, and the further sizes of the edge.
        device: of the stages and of arriving messages.

    Attributes:
        graph, placement: of the schedule.
        stages: the numbers of this rank's stages; `stage[str(number)]` is the module.

    Raises:
        ValueError: on every rank, for a schedule with token slices or versions of weights, and when stages are missing
            or modules, an edge has no shape or is not of floating point numbers, two stages share a parameter, a stage
            of plain torch meets a tensor axis, or one has torch's dropout or, with replicas, batch norm; and whatever a
            function of `stages` raises on any rank. In the trainer's first step, when a stage draws random numbers in
            training, or a microbatch is no pair.
    """

    def __init__(
        self, grid: Grid, schedule: Schedule, stages: Sequence[Callable[[], torch.nn.Module]], *,
        key: RngKey | None = None, shape: Callable | None = None, device: torch.device | None = None,
    ):  # fmt: skip
        super().__init__()
        grid.check_whole_sequences("pipeline.Network")
        self.graph, self.placement, self.device = schedule.graph, schedule.placement, device
        self._shape = shape
        self._draws = DrawCheck(grid.comm)
        if schedule.slices > 1 or schedule.delayed:
            raise ValueError(
                f"schedule {schedule.name} cuts microbatches or keeps several versions of weights, which a Network "
                "does not; use list_schedule or one with whole microbatches and a flush, such as 1f1b"
            )
        if len(stages) != self.graph.stages:
            raise ValueError(f"stages must have one function for each of {self.graph.stages} stages, got {len(stages)}")
        if modules := [stage for stage in stages if isinstance(stage, torch.nn.Module)]:
            raise ValueError(
                f"stages must be functions that make modules, got a {type(modules[0]).__name__}; put lambda: before"
            )
        for edge in self.graph.edges:
            if edge.shape == (0,) and shape is None:
                raise ValueError(f"{edge} needs a shape such as (8, 16) for 8 samples of 16, or give Network shape=")
            if not getattr(torch, edge.dtype).is_floating_point:
                raise ValueError(f"{edge} must be of floating point numbers, which have gradients")
        key = RngKey(grid.comm.bcast(int(torch.randint(2**62, ())))) if key is None else check_key(key)
        ranks: dict[int, set[int]] = {}
        for (_, stage), rank in self.placement.items():
            ranks.setdefault(stage, set()).add(rank)
        self.stages = [stage for stage in self.graph.sorted if grid.pipeline.rank in ranks[stage]]
        self.stage = torch.nn.ModuleDict()
        comm.start_watchdog(grid)  # layers without a `key` communicate, for which others wait where one fails before
        with comm.together(grid.world):
            for stage in self.stages:
                with seeded(key / stage):
                    self.stage[str(stage)] = stages[stage]().to(device)
            self._check_modules(grid.data.size * schedule.replicas)
            self._describe(grid.tensor.size, ranks)

    def _check_modules(self, replicas: int) -> None:
        """Refuse what would give another network on another grid."""
        for stage in self.stages:
            refuse_dropout(f"stage {stage}", self.stage[str(stage)])
            for module in self.stage[str(stage)].modules():
                if replicas > 1 and isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                    raise ValueError(
                        f"stage {stage} has a {type(module).__name__} of torch, whose statistics would be those of one "
                        f"of {replicas} replicas; use another norm or grid.data=1, hpctrain.layers.BatchNorm2d, and a "
                        "schedule with one replica of a stage"
                    )

    def _describe(self, tensor: int, ranks: dict[int, set[int]]) -> None:
        """Give every parameter its shard."""
        seen: dict[torch.nn.Parameter, int] = {}
        for stage in self.stages:
            for name, parameter in self.stage[str(stage)].named_parameters():
                if parameter in seen:
                    raise ValueError(f"stages {seen[parameter]} and {stage} share {name}; make them one stage")
                seen[parameter] = stage
                shard = getattr(parameter, "shard", None)
                if shard is None and tensor > 1:
                    raise ValueError(
                        f"{name} of stage {stage} is of plain torch, and {tensor} tensor ranks share the stage; use "
                        "hpctrain.layers, or grid.tensor=1"
                    )
                shard = shard or Shard.whole(parameter.shape)
                holders = tuple(sorted(ranks[stage])) if len(ranks[stage]) > 1 else ()
                annotate(parameter, shard=dataclasses.replace(shard, holders=holders))

    def parameters_of(self, stage: int) -> Iterator[torch.nn.Parameter]:
        """Those of one stage of this rank."""
        return self.stage[str(stage)].parameters()

    def message_spec(self, number: int, microbatch: Any) -> tuple[tuple[int, ...], torch.dtype, torch.device | None]:
        """Shape, dtype and device of a microbatch's message along an edge, given by its number."""
        edge = self.graph.edges[number]
        shape = self._shape(edge, microbatch) if self._shape else (len(microbatch[0]), *edge.shape[1:])
        return tuple(shape), getattr(torch, edge.dtype), self.device

    def check_pairs(self, microbatches: list) -> None:
        """Raise ValueError for a microbatch that is no pair (input, target), before the stages that use it alone do."""
        for microbatch in microbatches:
            if not (isinstance(microbatch, (list, tuple)) and len(microbatch) == 2):
                raise ValueError(f"a microbatch of a Network is a pair (input, target), got {_kind(microbatch)}")

    def forward(self, stage: int, inputs: list[torch.Tensor], microbatch: Any):
        """One stage of this rank on a microbatch, a pair (input, target)."""
        x, target = microbatch
        last, before = not self.graph.out[stage], _versions(inputs)
        arguments = [*(inputs if self.graph.into[stage] else [x]), *([target] if last else [])]
        y = self._draws.call(stage, self.training, self.stage[str(stage)], *arguments)
        if _versions(inputs) != before:
            raise ValueError(
                f"stage {stage} changes its input in place, which stages on the same rank would see, and those on "
                "others not; use another operation there, such as ReLU(inplace=False)"
            )
        if not last:
            self._check(stage, y, microbatch)
        elif not (isinstance(y, torch.Tensor) and y.numel() == 1):
            raise ValueError(f"stage {stage} must return the loss, a tensor of one number, got {_said(y)}")
        return y

    def check_draws(self) -> None:
        """After the first step, before its update: refuse stages that drew numbers which depend on the grid.

        Raises:
            ValueError: on every rank. Collective the first time, and nothing later.
        """
        self._draws.check()

    def _check(self, stage: int, y, microbatch) -> None:
        """What leaves is what the other ranks expect."""
        edges = self.graph.out[stage]
        given = [y] if isinstance(y, torch.Tensor) else y
        if not (isinstance(given, (list, tuple)) and all(isinstance(part, torch.Tensor) for part in given)):
            raise ValueError(f"stage {stage} must return a tensor, or a tuple of one for each edge, got {_said(y)}")
        parts = [y] * len(edges) if isinstance(y, torch.Tensor) else y
        if len(parts) != len(edges):
            raise ValueError(
                f"stage {stage} gave {len(parts)} tensors for {len(edges)} edges; give one, or one for each"
            )
        for (number, _), part in zip(edges, parts):
            shape, dtype, _ = self.message_spec(number, microbatch)
            if (part.shape, part.dtype) != (shape, dtype):
                raise ValueError(
                    f"stage {stage} gave {tuple(part.shape)} of {part.dtype} for {self.graph.edges[number]}, where "
                    f"{shape} of {dtype} is expected"
                )

    def work(self, microbatches: list) -> StageWork:
        """That of these microbatches, pairs (input, target), for the executor."""
        return _Work(self, microbatches)


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    """Others whenever one is changed in place, where torch counts."""
    return [x._version for x in tensors if not x.is_inference()]


def _said(y) -> str:
    return f"one of shape {tuple(y.shape)}" if isinstance(y, torch.Tensor) else f"{y!r:.60}"


def _kind(microbatch) -> str:
    several = f" of {len(microbatch)}" if isinstance(microbatch, (list, tuple)) else ""
    return f"a {type(microbatch).__name__}{several}"


class _Work(StageWork):
    def __init__(self, network: Network, microbatches: list):
        self.network, self.microbatches = network, microbatches

    def message_spec(self, action: Action):
        assert action.edge is not None
        return self.network.message_spec(action.edge, self.microbatches[action.microbatch])

    def forward(self, action: Action, inputs: list[torch.Tensor]):
        return self.network(action.stage, inputs, self.microbatches[action.microbatch])
