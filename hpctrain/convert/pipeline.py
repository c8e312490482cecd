"""A torch module whose trunk, a list of blocks, is cut into the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from hpctrain import comm
from hpctrain.convert.elsewhere import NO_NUMBERS, Cut, Elsewhere, Progress, absentees, entering, here
from hpctrain.convert.sharded_activation import of_rows, rows_in, rows_of
from hpctrain.convert.trunk import Beside, Trunk, beside_trunk, block_costs, find_trunk
from hpctrain.digest import digest
from hpctrain.grid import Grid
from hpctrain.parameter import annotate, shard_of
from hpctrain.pipeline.draws import DrawCheck, refuse_dropout
from hpctrain.pipeline.executor import StageWork
from hpctrain.pipeline.partitioners import LayerCosts, check_counts, partition

CHECKED = 3  # steps in which the ranks compare their microbatches
KNOWN = 64  # kinds of microbatches that are remembered: each shape makes one, and each number or name in one


class PipelineStages:
    """This rank's stage of a model; the trainer's view of it. The model's own forward runs it, on every rank.

    A rank keeps its blocks of the trunk. Modules beside it lie on the first stage where they are registered before the
    trunk, and on the last otherwise; parameters that several stages have, as tied ones, get the sum of their gradients.

    Args:
        model: is changed in place.
        path: of the trunk, a ModuleList or Sequential; None where there is one alone.
        layers_per_stage: how many of its blocks each stage has, by default as their weights are balanced best.
        shards: stages send each other the tokens of a rank of the tensor axis; otherwise all of them.

    Attributes: `stages`, {this rank's stage: range of its blocks}; `placement`, as of a `pipeline.Schedule`; `saved`,
    the names of the whole model's state, and `names`, {name: that of the first of its aliases}.

    Raises:
        ValueError: on every rank, when the model has no such trunk, or has dropout, whose masks depend on the grid.
    """

    def __init__(
        self, model: nn.Module, grid: Grid, path: str | None = None, layers_per_stage: Sequence[int] | None = None,
        shards: bool = False,
    ):  # fmt: skip
        ranks, mine = grid.pipeline.size, grid.pipeline.rank
        grid.check_whole_sequences("pipeline= of ht.parallelize")
        self.model, self.grid, self.shards = model, grid, shards and grid.tensor.size > 1
        refuse_dropout("the model", model)
        path, trunk = find_trunk(model, path, ranks)
        self.trunk = trunk
        first: dict[int, str] = {}
        saved = model.state_dict(keep_vars=True)
        self.saved = list(saved)
        state = [*saved.items(), *model.named_parameters(remove_duplicate=False)]
        self.names = {name: first.setdefault(id(tensor), name) for name, tensor in state}
        beside = list(beside_trunk(model, path))
        costs = block_costs(trunk, beside)
        if layers_per_stage is None:
            layers = LayerCosts(costs, [2 * cost for cost in costs])
            layers_per_stage = partition("dp", layers, ranks, 4 * ranks)
        counts = check_counts(layers_per_stage, len(trunk), ranks)
        starts = [0, *itertools.accumulate(counts)]
        blocks = [range(*ends) for ends in itertools.pairwise(starts)]
        self.stages, self.last = {mine: blocks[mine]}, ranks - 1
        self.placement = {(0, stage): stage for stage in range(ranks)}
        self._holders = self._find_holders(trunk, beside, blocks)
        self._progress = Progress()
        self._received: torch.Tensor | None = None
        self._entry: dict[Any, tuple] = {}
        self._loss: Callable | None = None
        self._running, self._steps = False, 0
        self._draws = DrawCheck(grid.comm)
        for parent, name, child, before in beside:
            if mine != (0 if before else self.last):
                where = f"{_path_of(model, parent)}.{name}".lstrip(".")
                parent._modules[name] = Elsewhere(child, where, self._progress)
        for place, (name, block) in enumerate(list(trunk._modules.items())):
            where = f"{path}.{name}".lstrip(".")
            if place in blocks[mine]:
                block.register_forward_pre_hook(self._enter_block(place, where), with_kwargs=True)
            else:
                trunk._modules[name] = Elsewhere(block, where, self._progress, place)
        model.register_forward_pre_hook(self._check_called)

    def _find_holders(self, trunk: Trunk, beside: list[Beside], blocks: list[range]) -> dict[str, list[int]]:
        """The stages of every parameter, by its first name; the same on all ranks."""
        inside = {}
        for stage, places in enumerate(blocks):
            modules = [trunk[place] for place in places]
            modules += [each.child for each in beside if stage == (0 if each.before else self.last)]
            inside[stage] = list(dict.fromkeys(p for module in modules for p in module.parameters()))
        of_any = {p for parameters in inside.values() for p in parameters}
        everywhere = [p for p in self.model.parameters() if p not in of_any]
        first = {id(p): self.names[name] for name, p in self.model.named_parameters()}
        holders: dict[str, list[int]] = {}
        for stage, parameters in inside.items():
            for p in [*everywhere, *parameters]:
                holders.setdefault(first[id(p)], []).append(stage)
        shared = [[p for p in parameters if len(holders[first[id(p)]]) > 1] for parameters in inside.values()]
        for mine, theirs in itertools.combinations(shared, 2):
            common = set(mine) & set(theirs)
            if [p for p in mine if p in common] != [p for p in theirs if p in common]:
                raise ValueError("stages of a pipeline have the weights that they share in different orders")
        return holders

    def annotate(self) -> None:
        """After the division over tensor axes: the shards name the stages that have them."""
        for name, p in self.model.named_parameters():
            stages = self._holders[self.names[name]]
            holders = tuple(stages) if len(stages) > 1 else ()
            annotate(p, shard=dataclasses.replace(shard_of(p), holders=holders))

    # What the model's forward comes to --------------------------------------------------------------------------------

    def _enter_block(self, place, path):
        first = next(iter(self.stages.values())).start

        def hook(module, arguments, options):
            if not self._running:  # computed once more, in backward
                return here((arguments, options))
            progress = self._progress
            progress.come_to(place)
            if place == first and place:
                hidden = entering(arguments, options, path)
                self._entry[progress.key] = self._message_shape(hidden), hidden.dtype, hidden.device
                if self._received is None:
                    raise Cut(hidden)
                if self._received.requires_grad and not torch.is_grad_enabled():
                    raise ValueError(
                        f"the block {path!r} is computed without gradients in training, as by torch.utils.checkpoint("
                        "use_reentrant=True); use use_reentrant=False"
                    )
                hidden.received, progress.live = self._activation(self._received, hidden.shape), True
            elif absentees((arguments, options)):
                raise ValueError(f"the block {path!r} is given what another stage of the pipeline computes")
            return here((arguments, options))

        return hook

    # What goes from stage to stage ------------------------------------------------------------------------------------

    def _message_shape(self, hidden) -> tuple[int, ...]:
        if not self.shards:
            return tuple(hidden.shape)
        axis = self.grid.tensor
        return rows_of(hidden.shape, axis).counts[axis.rank], hidden.shape[-1]

    def _message(self, hidden: torch.Tensor) -> torch.Tensor:
        return (rows_in(hidden, self.grid.tensor) if self.shards else hidden).contiguous()

    def _activation(self, received: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return of_rows(received, self.grid.tensor, shape) if self.shards else received

    def _check_called(self, model, arguments) -> None:
        if not self._running:
            raise ValueError(
                "the model is cut into pipeline stages, which no rank can call as a whole: train it by "
                "ht.Trainer(model, grid, optimizer, microbatches, loss=...) and its step() and evaluate()"
            )

    # What the trainer asks --------------------------------------------------------------------------------------------

    def with_loss(self, loss: Callable) -> PipelineStages:
        """`loss`: function (model, microbatch) -> scalar."""
        self._loss = loss
        return self

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def modules(self) -> Iterator[nn.Module]:
        return self.model.modules()

    def parameters_of(self, stage: int) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def work(self, microbatches: list) -> StageWork:
        if self._steps < CHECKED:
            self._compare(microbatches)
            if self._steps == 0:
                self._rehearse(microbatches[0])
            self._steps += 1
        return _Work(self, microbatches)

    def check_draws(self) -> None:
        """After the first step: raises ValueError on every rank where a stage draws random numbers."""
        self._draws.check()

    def _compare(self, microbatches) -> None:
        mine, axes = _fingerprint(microbatches), {"tensor": self.grid.tensor, "pipeline": self.grid.pipeline}
        gathered = {name: axis.comm.allgather(mine) for name, axis in axes.items()}  # both before anybody raises
        with comm.together(self.grid.world):
            for name, everyone in gathered.items():
                if different := [rank for rank, other in enumerate(everyone) if other != everyone[0]]:
                    raise ValueError(
                        f"rank {different[0]} of the {name} axis has other microbatches than rank 0; all stages "
                        "of a replica are given the same ones, as they run the same script"
                    )

    def _rehearse(self, microbatch) -> None:
        """Each rank runs its stage by itself, so that all ranks raise what one of them finds."""
        (stage,) = self.stages
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        with torch.no_grad(), comm.together(self.grid.world):
            received = awaited = None
            if stage:
                shape, dtype, device = self.message_spec(microbatch)
                received, awaited = torch.zeros(shape, dtype=dtype, device=device), (*shape, dtype)
            sent = self._call(microbatch, received, stage)
        for module, training in modes:
            module.training = training
            if isinstance(module, Elsewhere):
                module.stub.train(training)
        mine = None if stage == self.last else (tuple(sent.shape), sent.dtype), awaited
        everyone = self.grid.pipeline.comm.allgather(mine)
        with comm.together(self.grid.world):
            for number, ((given, _), (_, awaited)) in enumerate(itertools.pairwise(everyone)):
                if (*given[0], given[1]) != awaited:
                    raise ValueError(f"stage {number} of the pipeline gives {given}, and the next awaits {awaited}")

    def message_spec(self, microbatch: Any) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        """Of what the stage before sends."""
        key = _shapes(microbatch), self.model.training
        if key not in self._entry:
            if len(self._entry) >= KNOWN:
                self._entry.clear()
                self._progress.outputs.clear()
            self._call(microbatch, None)
        return self._entry[key]

    def forward(self, stage: int, received: torch.Tensor | None, microbatch: Any) -> torch.Tensor:
        """What this stage sends, or the loss."""
        return self._draws.call(stage, self.model.training, self._call, microbatch, received, stage)

    def _call(self, microbatch, received, stage=None):
        assert self._loss is not None
        progress = self._progress
        progress.key, progress.place = (_shapes(microbatch), self.model.training), 0
        progress.live = stage == 0
        self._received, self._running = received, True
        try:
            loss = self._loss(self.model, microbatch)
        except Cut as cut:
            return self._message(cut.hidden)
        except NO_NUMBERS as error:
            raise ValueError(
                f"the forward asks for numbers that another stage of the pipeline computes ({error}), as by .item() or "
                "an if; stages know their shapes alone"
            ) from error
        finally:
            self._received, self._running, progress.live = None, False, False
        if stage != self.last or progress.place != len(self.trunk):
            raise ValueError(
                f"the forward calls {progress.place} of the trunk's {len(self.trunk)} blocks; a pipeline calls each"
            )
        loss = here(loss)
        if absentees(loss):
            raise ValueError(
                "the loss depends on what earlier stages of the pipeline compute, beside the tensor that goes from "
                "block to block; losses of single blocks, for example, cannot be added up"
            )
        return loss


class _Work(StageWork):
    """Of a step."""

    def __init__(self, stages: PipelineStages, microbatches: list):
        self.stages, self.microbatches = stages, microbatches

    def message_spec(self, action):
        return self.stages.message_spec(self.microbatches[action.microbatch])

    def forward(self, action, inputs):
        received = inputs[0] if inputs else None
        return self.stages.forward(action.stage, received, self.microbatches[action.microbatch])


def _path_of(model, module) -> str:
    return next(path for path, each in model.named_modules() if each is module)


def _shapes(microbatch) -> tuple:
    leaves, structure = tree_flatten(_opened(microbatch))
    known = (bool, int, float, str, type(None))
    described = ((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves)
    return structure, tuple(x if isinstance(x, (tuple, *known)) else type(x) for x in described)


def _fingerprint(microbatches) -> list:
    leaves, _ = tree_flatten([_opened(each) for each in microbatches])
    return [(tuple(x.shape), int(digest(x))) for x in leaves if isinstance(x, torch.Tensor)]


def _opened(microbatch):
    """A microbatch may be an object of the user's own, with tensors as attributes."""
    if dataclasses.is_dataclass(microbatch):
        return {field.name: getattr(microbatch, field.name) for field in dataclasses.fields(microbatch)}
    if isinstance(microbatch, (torch.Tensor, tuple, list)) or hasattr(microbatch, "keys"):
        return dict(microbatch) if hasattr(microbatch, "keys") else microbatch
    return vars(microbatch) if hasattr(microbatch, "__dict__") else microbatch
