"""Plain torch modules with what the trainer asks of a model that is cut into pipeline stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from hpctrain import comm
from hpctrain.convert import divide
from hpctrain.grid import Grid
from hpctrain.grid_shape import stage_holders
from hpctrain.models.plain.shape import PlainShape
from hpctrain.models.staged import set_holders, stage_blocks
from hpctrain.models.staged_model import StagedModel
from hpctrain.parameter import annotate
from hpctrain.pipeline.draws import DrawCheck, refuse_dropout
from hpctrain.randomness import RngKey, restored, seeded
from hpctrain.shard import Shard


@dataclass(frozen=True)
class WholeSequences:
    """A microbatch of `sequences` × `length` tokens, of which every tensor rank has all; see `layers.Tokens`. Auxiliary
    losses of the modules, of which nobody but they knows, have no `share`."""

    sequences: int
    length: int
    first: int
    step: int
    share: float = 0.0

    @property
    def inner(self) -> range:
        return range(self.first, self.first + self.sequences)

    @property
    def spans(self) -> tuple[range, ...]:
        return (range(self.length),)

    def positions(self) -> torch.Tensor:
        return torch.arange(self.length)


class PlainModel(StagedModel[WholeSequences]):
    """This rank's stages of what a `PlainSpec`'s function returns: one module, or a list of parts.

    Args:
        make: gives what the function returns; see `PlainSpec`.
        kind: names the function in errors.
        key: seeds torch's generator while `make` and functions in a list run.

    Others as of `models.staged.StagedTransformer`, whose blocks are the parts of the list.

    Raises:
        ValueError: on every rank, for anything else than a module or a list of model.layers modules; one module on a
            pipeline axis, or a list on both a pipeline and a tensor axis; a loss with parameters on the former, or
            trained ones on the latter; parts that share a parameter, dropout of torch, and what `parallelize` refuses;
            a grid whose ranks share sequences.
    """

    def __init__(
        self, grid: Grid, shape: PlainShape, make: Callable[[], Any], layers_per_stage: Sequence[int] | None = None,
        placement: Mapping[tuple[int, int], int] | None = None, *, kind: str, key: RngKey,
        dtype: torch.dtype | None = None, device: torch.device | None = None,
    ):  # fmt: skip
        super().__init__()
        grid.check_whole_sequences(f"model.kind = {kind}, of plain torch modules,")
        if placement is None:
            placement = {(0, stage): stage for stage in range(grid.pipeline.size)}
        holders = stage_holders(placement)
        self.grid, self.shape, self.kind, self.device = grid, shape, kind, device
        self.placement, self.last, self.algorithm = placement, len(holders) - 1, None
        self._default = dtype or torch.get_default_dtype()
        self.draws = DrawCheck(grid.comm)
        self._versions: dict | None = None  # as they were before the first forward
        self._checked = False
        here = [stage for stage, ranks in enumerate(holders) if grid.pipeline.rank in ranks]
        with comm.together(grid.world):
            with seeded(key):
                made = make()
            plain = functools.partial(cross_entropy, vocabulary=shape.vocabulary)
            made, mean_loss = made if isinstance(made, tuple) and len(made) == 2 else (made, plain)
            self.mean_loss: Callable[[Any, torch.Tensor], torch.Tensor] = self._loss(mean_loss, dtype)
            parts = self._parts(made, len(holders))
            blocks = stage_blocks(len(parts), len(holders), layers_per_stage if isinstance(made, list) else None)
            self.stages = {stage: blocks[stage] for stage in here}
            local = {}
            for i in [i for stage in here for i in blocks[stage]]:
                with seeded(key / i):
                    local[str(i)] = self._module(parts[i], i).to(device=device, dtype=dtype)
            made_already = {str(i): part for i, part in enumerate(parts) if isinstance(part, torch.nn.Module)}
            self._refuse_shared(local | made_already)
        single = not isinstance(made, list)
        if single or len(holders) == 1:
            module = local["0"] if single else torch.nn.Sequential(*local.values())
            if grid.tensor.size > 1:
                divide(module, grid, getattr(module, "replicate", ()))
                self.hpctrain_grid = grid  # every tensor rank has the whole loss
            setattr(self, "module" if single else "layers", module)
        else:
            self.layers = torch.nn.ModuleDict(local)
            with comm.together(grid.world):
                self._check_messages()
        for stage in here:
            for parameter in self.parameters_of(stage):
                if not hasattr(parameter, "shard"):
                    slices = tuple(slice(0, size) for size in parameter.shape)
                    annotate(parameter, shard=Shard(tuple(parameter.shape), slices))
                set_holders(parameter, holders[stage])

    def _loss(self, mean_loss, dtype) -> Callable[[Any, torch.Tensor], torch.Tensor]:
        """The function that came beside the model; of a module, what it has where the model is."""
        if not callable(mean_loss):
            raise ValueError(f"{self.kind} must return a loss function beside the model, got {mean_loss!r:.100}")
        if not isinstance(mean_loss, torch.nn.Module):
            return mean_loss
        parameters = list(mean_loss.parameters())
        if (self.last and parameters) or (self.grid.tensor.size > 1 and any(p.requires_grad for p in parameters)):
            raise ValueError(
                f"the loss of model.kind = {self.kind}, {mean_loss!r:.100}, has parameters, which are neither divided "
                "over a tensor axis nor on one stage of a pipeline; let the last module have them and give them to it"
            )
        return mean_loss.to(device=self.device, dtype=dtype)

    def _parts(self, made, stages: int) -> list:
        """What was made as a list of parts."""
        kind, layers, grid = self.kind, self.shape.layers, self.grid
        if isinstance(made, torch.nn.Module) and stages > 1:
            raise ValueError(
                f"model.kind = {kind} gives one module, which cannot be cut into {stages} pipeline stages; use "
                "grid.pipeline=1, or return a list of model.layers modules"
            )
        if isinstance(made, torch.nn.Module):
            return [made]
        if not isinstance(made, list):
            raise ValueError(
                f"model.kind = {kind} must return a torch.nn.Module, a list of them, or either with a loss function, "
                f"got {type(made).__name__}"
            )
        if len(made) != layers:
            raise ValueError(f"model.kind = {kind} must return model.layers = {layers} modules, got {len(made)}")
        if stages > 1 and grid.tensor.size > 1:
            raise ValueError(
                f"model.kind = {kind} makes plain torch modules, which are divided over a tensor axis or over a "
                f"pipeline, got grid.pipeline={grid.pipeline.size} and {grid.tensor.size} tensor ranks; use a ModelSpec"
            )
        return made

    def _module(self, part, number: int) -> torch.nn.Module:
        module = part if isinstance(part, torch.nn.Module) else part() if callable(part) else part
        if not isinstance(module, torch.nn.Module):
            raise ValueError(f"part {number} of model.kind = {self.kind} is no torch.nn.Module: {module!r:.100}")
        refuse_dropout(f"model.kind = {self.kind}", module)
        return module

    def _refuse_shared(self, parts: dict[str, torch.nn.Module]) -> None:
        seen: dict[torch.nn.Parameter, str] = {}
        for number, part in parts.items():
            for name, parameter in part.named_parameters():
                if seen.setdefault(parameter, number) != number:
                    raise ValueError(
                        f"parts {seen[parameter]} and {number} of model.kind = {self.kind} share {name}, which stages "
                        "cannot; make them one part, or one module of all"
                    )

    def _check_messages(self) -> None:
        """Call this rank's stages once: other ranks receive what they give, and know its shape beforehand."""
        tokens = self.tokens(1, self.shape.context)
        shape, dtype, device = self.message_spec(tokens)
        for stage in self.stages:
            if stage == self.last:
                continue
            ids = torch.zeros(shape[:2], dtype=torch.int64, device=device)
            x = ids if stage == 0 else torch.zeros(shape, dtype=dtype, device=device)
            with torch.no_grad(), restored():
                y = self._run(stage, x)
            if not isinstance(y, torch.Tensor) or (tuple(y.shape), y.dtype) != (shape, dtype):
                got = f"{tuple(y.shape)} of {y.dtype}" if isinstance(y, torch.Tensor) else type(y).__name__
                raise ValueError(
                    f"part {self.stages[stage].stop - 1} of model.kind = {self.kind} must give (sequences, length, "
                    f"model.width) = {shape} of {dtype}, got {got}"
                )

    def parameters_of(self, stage: int) -> Iterator[torch.nn.Parameter]:
        if stage == 0 == self.last:
            yield from self.parameters()
        else:
            for i in self.stages[stage]:
                yield from self.layers[str(i)].parameters()

    def tokens(self, sequences: int, length: int, documents: Sequence[Sequence[int]] = ()) -> WholeSequences:
        assert not documents, "nobody but the modules knows what a token attends to"
        return WholeSequences(sequences, length, 0, 0)

    def forward(self, x: torch.Tensor, tokens: WholeSequences, stage: int | None = None) -> torch.Tensor:
        """One stage of this rank. Stage 0 takes ids, (sequences × length,); see `PlainSpec` for what leaves a stage."""
        if stage is None:
            (stage,) = self.stages
        if self._versions is None:
            self._versions = self._versions_of_buffers()
        if stage == 0:
            x = x.view(tokens.sequences, tokens.length)
        return self.draws.call(stage, self.training, self._run, stage, x)

    def _run(self, stage: int, x: torch.Tensor) -> torch.Tensor:
        if self.last == 0:
            whole: torch.nn.Module = self.get_submodule("module" if hasattr(self, "module") else "layers")
            return whole(x)
        for i in self.stages[stage]:
            x = self.layers[str(i)](x)
        return x

    def loss(self, output: Any, targets: torch.Tensor, scale: float) -> torch.Tensor:
        """The mean of the microbatch's losses, times the number of its targets and `scale`."""
        targets = targets.view(-1, self.shape.context)
        if not targets.numel():  # a replica may have no sequence; the mean of none is no number
            given = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point()]
            return sum((x.sum() * 0.0 for x in given), start=torch.zeros((), device=targets.device))
        return self.mean_loss(output, targets) * (targets.numel() * scale)

    def last_logits(self, output: Any, tokens: WholeSequences) -> torch.Tensor:
        if not isinstance(output, torch.Tensor):
            raise ValueError(
                f"a text is written by logits, (sequences, length, vocabulary), and model.kind = {self.kind} gives a "
                f"{type(output).__name__}; use run.sample=0"
            )
        return output[-1, -1].cpu()

    def message_spec(
        self, tokens: WholeSequences, stage: int = 0
    ) -> tuple[tuple[int, int, int], torch.dtype, torch.device | None]:
        """Shape, dtype and device of what a stage gives to the next one."""
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), self._default)
        return (tokens.sequences, tokens.length, self.shape.width), dtype, self.device

    def check_draws(self) -> None:
        """After the first step, before an update that is the caller's: refuse what would be lost, or be another on
        another grid.

        Raises:
            ValueError: on every rank. Collective the first time, and nothing later.
        """
        if self._checked:
            return
        self.draws.check()
        with comm.together(self.grid.world):
            after = self._versions_of_buffers()
            changed = [name for name, version in (self._versions or {}).items() if after.get(name) != version]
            if changed:
                raise ValueError(
                    f"the buffer {changed[0]} of model.kind = {self.kind} changes in training, where it "
                    "would be another on another grid; use a norm without running statistics, such as LayerNorm"
                )
        self._checked = True

    def _versions_of_buffers(self) -> dict[str, tuple[int, int]]:
        """What tells whether a buffer that state_dict() holds was replaced or changed in place."""
        kept = self.state_dict(keep_vars=True)
        return {name: (id(each), each._version) for name, each in self.named_buffers() if name in kept}


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The mean over (sequences, length) targets. There may be more logits than tokens of the vocabulary."""
    is_tensor = isinstance(logits, torch.Tensor)
    if not is_tensor or logits.shape[:-1] != targets.shape or logits.shape[-1] < vocabulary:
        raise ValueError(
            f"the model must give logits of (sequences, length, vocabulary), {(*targets.shape, vocabulary)}, got "
            f"{tuple(logits.shape) if is_tensor else type(logits).__name__}; return it with a loss of its own otherwise"
        )
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
