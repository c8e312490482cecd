"""A torch module becomes one whose weights and work are divided over the tensor axis, in place."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import math
from collections.abc import Sequence

import torch
from torch import nn

from hpctrain import comm
from hpctrain.convert.arriving_gradients import mark_gradients
from hpctrain.convert.averaging import MeanGradients
from hpctrain.convert.decide import decide
from hpctrain.convert.experts import refuse_router_losses
from hpctrain.convert.first_steps import FirstSteps
from hpctrain.convert.initial import check_model, give_buffers
from hpctrain.convert.optimizers import watch_optimizers
from hpctrain.convert.plan import Plan
from hpctrain.convert.pretrained import DividedAdapters, DividedPretrained, has_prompts, is_pretrained
from hpctrain.convert.replica_buffers import watch_buffers
from hpctrain.convert.sequence import CutSequences, check_sequence
from hpctrain.convert.sequence_dropout import CurrentSpans, use_whole_masks
from hpctrain.convert.sharded_activation import returned
from hpctrain.convert.spread_experts import SpreadPretrained
from hpctrain.convert.wrappers import leave_out_of_graphs, refuse_ddp, refuse_other_weights
from hpctrain.digest import digest
from hpctrain.grid import Grid
from hpctrain.layers.parameter import drawn_key
from hpctrain.parameter import shard_of

log = logging.getLogger("hpctrain")

_NAMED = 6  # weights in the line that says what stays whole


def divide(
    model: nn.Module, grid: Grid, replicate: list[str] | tuple[str, ...] = (), check_steps: int = 3,
    zero: int | None = None, pipeline: str | None = None, layers_per_stage: Sequence[int] | None = None,
    shard_activations: bool = False,
) -> nn.Module:  # fmt: skip
    """As `ht.parallelize`, which has the arguments and errors, does without a plan."""
    if not isinstance(check_steps, int) or isinstance(check_steps, bool) or check_steps < 0:
        raise ValueError(f"check_steps must be an integer of at least 0, got {check_steps!r}")
    if zero not in (None, 0, 1, 2, 3) or isinstance(zero, bool):
        raise ValueError(f"zero must be None, 0, 1, 2 or 3, got {zero!r}")
    if zero is not None and grid.pipeline.size > 1:
        raise ValueError(
            f"zero is for a loop of one's own, got a grid with pipeline={grid.pipeline.size}; give the ht.Trainer a "
            "strategy, as ht.data_parallel.Zero1(model.parameters(), grid, optimizer)"
        )
    if not isinstance(shard_activations, bool):
        raise ValueError(f"shard_activations must be True or False, got {shard_activations!r}")
    comm.start_watchdog(grid)
    meta = any(parameter.is_meta for parameter in model.parameters())
    with comm.together(grid.world):
        if hasattr(model, "hpctrain_grid"):
            raise ValueError("the model is already parallelized")
        check_model(model)
    stages = None
    if grid.pipeline.size > 1:
        _check_equal(model, grid)
        from hpctrain.convert.pipeline import PipelineStages  # with schedules, partitioners and more

        with comm.together(grid.world):
            stages = PipelineStages(model, grid, pipeline, layers_per_stage, shard_activations)
    with comm.together(grid.world):
        plan = Plan(model, grid, chosen_modules(model, replicate), shard_activations)
        decide(model, plan, None if stages is None else stages.trunk)
        if zero is not None and grid.data.size > 1 and plan.spreads:
            raise ValueError(
                f"zero = {zero} averages over replicas, and the ranks that have the same experts are others where "
                f"these are spread by grid.expert = {grid.expert.size}; leave zero out and call "
                "ht.sync_gradients(model), or use expert=1"
            )
        cuts = grid.sequence.size > 1
        if cuts:
            check_sequence(model, plan.context_attention)
            current = CurrentSpans(grid.sequence.rank)
            use_whole_masks(plan, model, current)
        for module in filter(is_pretrained, model.modules()):
            if cuts and module is model:
                plan.swap_class(module, CutSequences, hpctrain_grid=grid, hpctrain_current=current)
            else:
                together = plan.spreads and hasattr(module, "generate")
                plan.swap_class(module, SpreadPretrained if together else DividedPretrained, hpctrain_grid=grid)
        for module in model.modules():
            if has_prompts(module) and not is_pretrained(module):
                plan.swap_class(module, DividedAdapters, hpctrain_grid=grid)
    if stages is None:
        _check_equal(model, grid)
    key = drawn_key(grid, None) if meta else None
    with comm.together(grid.world):
        plan.apply(key)
        for module in model.modules():
            give_buffers(module)
    watch_buffers(model, plan.kept, grid)
    refuse_router_losses(model, grid)
    if zero is not None:
        vars(model)["no_sync"] = contextlib.nullcontext  # nothing is summed before it is needed
    replicas = any(grid.alike(shard_of(parameter)).size > 1 for parameter in model.parameters())
    if zero and replicas:
        from hpctrain.convert.zero import ZeroGradients

        ZeroGradients(model, grid, zero)
    else:
        mark_gradients(model, grid, MeanGradients(model, grid).complete if replicas and zero == 0 else None)
    if plan.shards:
        model.register_forward_hook(_give_whole)
    watch_optimizers()
    refuse_ddp(model)
    refuse_other_weights(model)
    leave_out_of_graphs()
    if stages is not None:
        stages.annotate()
        vars(model)["hpctrain_pipeline"] = stages
    elif check_steps and grid.tensor.size * grid.sequence.size > 1:
        FirstSteps(model, grid, plan.claimed, check_steps)
    vars(model)["hpctrain_grid"] = grid
    if grid.rank == 0 and grid.tensor.size > 1:
        _report(model)
    return model


def _report(model):
    """One line: what of the weights is not divided."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.shard.replicated}
    if sizes:
        total = sum(math.prod(p.whole_shape) for p in model.parameters())
        largest = sorted(sizes, key=lambda name: -sizes[name])
        more = f" and {len(sizes) - _NAMED} more" * (len(sizes) > _NAMED)
        share = 100 * sum(sizes.values()) / total
        log.warning(
            "parallelize: %.2g %% of the weights stay whole on every rank: %s%s",
            share,
            ", ".join(largest[:_NAMED]),
            more,
        )


def chosen_modules(model: nn.Module, replicate: Sequence[str]) -> set[nn.Module]:
    """The modules that `replicate` names, and all that are in them."""
    if isinstance(replicate, str):
        raise ValueError(f"replicate must be a list of paths or types, got {replicate!r}; write [{replicate!r}]")
    chosen: set[nn.Module] = set()
    for entry in replicate:
        if not isinstance(entry, str):
            got = f"the type {entry.__name__}" if isinstance(entry, type) else f"a {type(entry).__name__}"
            raise ValueError(f"replicate must list paths or names of types, as strings, got {got}")
        found = [
            module
            for path, module in model.named_modules()
            if fnmatch.fnmatchcase(path, entry) or type(module).__name__ == entry
        ]
        if not found:
            raise ValueError(f"replicate: no module has the path or type {entry!r}")
        chosen.update(inner for module in found for inner in module.modules())
    return chosen


def _check_equal(model, grid):
    """Every rank must bring the same weights: of a mixture nobody would know."""
    state = model.state_dict().items()
    mine = {name: _fingerprint(x) for name, x in state if isinstance(x, torch.Tensor)}  # not of get_extra_state()
    everyone = grid.comm.allgather(mine)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            names = [name for name in everyone[0] if other.get(name) != everyone[0][name]]
            raise ValueError(
                f"the model differs between ranks 0 and {rank}, first in {(names or ['its names'])[0]!r};"
                " call torch.manual_seed with the same seed on every rank before building it"
            )


def _give_whole(model, arguments, output):
    return returned(output)


def _fingerprint(tensor):
    if tensor.is_meta:
        return tuple(tensor.shape)
    parts = [tensor]
    if tensor.layout != torch.strided:
        sparse = tensor.to_sparse().coalesce()
        parts = [sparse.indices(), sparse.values()]
    return (*tensor.shape, *(int(digest(part)) for part in parts))
