"""One line that turns a torch module into one whose weights and work are divided over the tensor axis."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import math
from collections.abc import Sequence

from torch import nn

from hpctrain import comm
from hpctrain.convert.averaging import MeanGradients
from hpctrain.convert.decide import decide
from hpctrain.convert.experts import SpreadPretrained, refuse_router_losses
from hpctrain.convert.first_steps import FirstSteps
from hpctrain.convert.gradients import mark_gradients
from hpctrain.convert.initial import check_model, give_buffers
from hpctrain.convert.optimizers import watch_optimizers
from hpctrain.convert.plan import Plan
from hpctrain.convert.pretrained import DividedPretrained, is_pretrained
from hpctrain.convert.replica_buffers import watch_buffers
from hpctrain.convert.sequence import CutSequences, check_sequence
from hpctrain.convert.sequence_dropout import CurrentSpans, use_whole_masks
from hpctrain.convert.sharded_activation import whole
from hpctrain.convert.wrappers import leave_out_of_graphs, refuse_ddp, refuse_other_weights
from hpctrain.digest import digest
from hpctrain.grid import Grid
from hpctrain.layers.parameter import drawn_key
from hpctrain.parameter import shard_of

log = logging.getLogger("hpctrain")

_NAMED = 6  # weights in the line that says what stays whole


def parallelize(
    model: nn.Module, grid: Grid, replicate: list[str] | tuple[str, ...] = (), check_steps: int = 3,
    zero: int | None = None, pipeline: str | None = None, layers_per_stage: Sequence[int] | None = None,
    shard_activations: bool = False,
) -> nn.Module:  # fmt: skip
    """Divide a model's weights and work over the tensor axis of `grid`, in place; returns the model.

    Every rank runs the same script with the same model, seed and batch (each replica: its own batch, see `zero`), and
    gets the outputs, losses and gradients that one rank would. The model keeps its class, forward, names and hooks;
    activations are whole at the borders of its modules. Make the optimizer afterwards.

    Each element of a weight lies on one rank of the tensor axis: by columns of the first matrix and rows of the second
    of an MLP, by heads of attention, along the longer side of any other. Norms gather their weights and work on every
    rank.

    A weight that is read outside of its own module, as in `F.linear(h, self.table.weight)` or a penalty, is the whole
    one, gathered and differentiable; so all ranks must read it. Outside of a forward, its `.data`, `.detach()` and
    `.grad` are this rank's shard, on which optimizers work, and `state_dict()` is of shards, which `load_state_dict()`
    takes back and files refuse: `ht.gather_state_dict` is for these. Parameters stay the same objects, with their
    attributes; hooks on their gradients are given the whole ones. `model.apply(f)` gives each module its whole weights,
    `reset_parameters()` and `load_state_dict` work, and `save_pretrained` writes whole weights. What cannot be done to
    a sharded weight is refused by name.

    In a loop of one's own, torch's clip_grad_norm_ and GradScaler, and norms and sums of gradients, are of the whole
    gradient; every rank must call them. What else would be that of a part is refused: other reductions and products of
    gradients, optimizers that mix the elements of a weight (LBFGS, Adafactor, Muon), replicas without `sync_gradients`,
    torch's DistributedDataParallel.

    Divided are: nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU, nn.MultiheadAttention,
    nn.TransformerEncoderLayer and DecoderLayer, nn.Conv*d, nn.ConvTranspose*d, nn.BatchNorm*d, nn.Bilinear,
    nn.EmbeddingBag, nn.LSTM, nn.GRU and nn.RNN (their weights, not their work), and what inherits from linear layers,
    embeddings and convolutions. A module of any other type keeps its own parameters and buffers whole on every rank,
    with whole gradients, and its children are divided; one line is logged that says what stays whole. Where a buffer of
    such a module takes statistics of one replica's batch, the call that changes it is refused.

    Between layers activations are whole, but for feed-forward blocks and attention: pairs in nn.Sequential; modules of
    any class that compute down(f(up(x))) or down(f(gate(x)) up(x)); attention of Hugging Face's models, of separate,
    fused or latent projections, and of timm's; mixtures of experts; what `ht.register_rule` tells of. Dropout draws
    from torch's generator the masks that one rank would draw, inside attention too (on a GPU, torch's fused kernels
    draw others); so the generators must have the same seed on all ranks of the tensor axis, and of those that share
    sequences.

    Ranks that share sequences, of a grid with data=(replica, ring, ulysses), are all given the whole ones, too.
    GPT2LMHeadModel, GPT2Model, LlamaForCausalLM and LlamaModel cut them at their entrance: each rank computes and keeps
    what belongs to its tokens, and attention goes over the ring and Ulysses axes. With `labels`, the loss is the whole
    one on every rank, taken in float32 or wider, and there are no logits; without, logits and hidden states are
    gathered. Gradients are summed by `sync_gradients`, as those of replicas; what else is added to the loss counts once
    for each rank of `grid.data`. Positions that begin anew are packed documents where Hugging Face takes them so:
    without a mask and with use_cache=False. Hooks within the model see the local tokens. Refused by name: dropout of
    attention, padding, caches, `generate`, modules that may mix positions.

    On a grid with expert=N, the fused experts of Hugging Face's mixtures are spread over `grid.expert`, and tokens
    travel to them and back: all ranks of it must call the model. `sync_gradients` adds up what the ranks of
    `grid.copies` have, be they replicas or not. The auxiliary loss of `output_router_logits` is refused on a data axis.

    Parameters on the meta device are drawn slice by slice from streams that `torch.manual_seed` decides, in torch's or
    Hugging Face's distributions, and the same on every grid; no rank ever holds a whole one.

    Args:
        replicate: modules to leave whole on every rank: paths, patterns of paths ("blocks.*.gate") or names of types;
            with all that is in them.
        check_steps: calls of the model in which the ranks of the tensor and the sequence axis compare what they do: the
            inputs, the order of its modules, the generators that it draws from, the gradients that reach its outputs.
            Costs a small message for each call of a module meanwhile; 0 leaves it out. Where they differ, all of them
            raise ValueError.
        shard_activations: what leaves feed-forward blocks and attention stays divided by tokens, through sums, dropout
            and norms until the next block, as in Megatron's sequence parallelism: as many bytes are moved as without,
            and half as many again in backward, where blocks gather their inputs once more rather than keep them; each
            rank keeps 1 / t of what it would. Where the tensor axis is a box, the linear layers of these blocks run on
            x, y and z by Agarwal's product. To any other code these are whole activations, gathered when it looks at
            them; so all ranks must, or none. Stages of a pipeline send each other a rank's tokens alone.
        pipeline: path of the model's trunk, a ModuleList or Sequential of blocks, which a pipeline axis cuts into
            stages; by default the only one there is. The model's own forward runs every stage, so that one tensor must
            go from block to block; modules beside the trunk lie on the first stage where they are registered before it,
            and on the last otherwise. The model is trained by `ht.Trainer(model, grid, optimizer, microbatches,
            loss=...)`, with the same microbatches on all stages of a replica.
        layers_per_stage: blocks of each of its stages; by default as their weights are balanced best.
        zero: what to do with the gradients of replicas. None: `sync_gradients` sums them, of losses that are divided by
            the batch of all. 0: they are averaged when they are first needed, by optimizer.step(), by clipping or by
            whoever reads them, as torch's DDP does; the loss is the mean over the replica's own batch, and backwards
            before are added up. (Of batches that are not equal, it is the sum over the replica's own, divided by the
            batch of all and times the number of replicas.) 1: as 0, and the optimizer's state is spread over the
            replicas; 2: the gradients too; 3: the weights too, which are gathered while a layer computes. From 1 on
            optimizers are any of torch's that treat every element by itself, `.grad` is this rank's range of the mean,
            flat, of which norms and clipping are those of the whole, and the weights stay in their memory. Weights that
            no replica's loss depends on have no gradient, as on one rank. Every replica calls backward; one without
            samples of `model(...).sum() * 0`, or clips by `ht.clip_grad_norm_`.

    From here on a watchdog ends the job where an operation of communication takes longer than HPCTRAIN_WATCHDOG seconds
    (600; 0 is never), as where only some ranks call the model, and every rank that waits says for whom.

    Raises:
        ValueError: on every rank, before anything is changed: when a module can be neither divided nor left as it is,
            an option of one is not supported, a weight has a hook that would see a part, weights are shared in a way
            that cannot be divided, the ranks' weights differ, an entry of `replicate` matches nothing, the model has no
            trunk for a pipeline axis, or ranks share sequences that the model cannot cut.
    """
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
    with comm.together(grid.comm):
        if hasattr(model, "hpctrain_grid"):
            raise ValueError("the model is already parallelized")
        check_model(model)
    stages = None
    if grid.pipeline.size > 1:
        _check_equal(model, grid)
        from hpctrain.convert.pipeline import PipelineStages  # with schedules, partitioners and more

        with comm.together(grid.comm):
            stages = PipelineStages(model, grid, pipeline, layers_per_stage, shard_activations)
    with comm.together(grid.comm):
        plan = Plan(model, grid, _chosen(model, replicate), shard_activations)
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
    if stages is None:
        _check_equal(model, grid)
    key = drawn_key(grid, None) if meta else None
    with comm.together(grid.comm):
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


def _chosen(model, replicate) -> set:
    """The modules that `replicate` names, and all that are in them."""
    if isinstance(replicate, str):
        raise ValueError(f"replicate must be a list of paths or types, got {replicate!r}; write [{replicate!r}]")
    chosen: set[nn.Module] = set()
    for entry in replicate:
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
    mine = {name: _fingerprint(tensor) for name, tensor in model.state_dict().items()}
    everyone = grid.comm.allgather(mine)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            names = [name for name in everyone[0] if other.get(name) != everyone[0][name]]
            raise ValueError(
                f"the model differs between ranks 0 and {rank}, first in {(names or ['its names'])[0]!r};"
                " call torch.manual_seed with the same seed on every rank before building it"
            )


def _give_whole(model, arguments, output):
    return whole(output)


def _fingerprint(tensor):
    return tuple(tensor.shape) if tensor.is_meta else (*tensor.shape, int(digest(tensor)))
