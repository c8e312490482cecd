"""`ht.parallelize`: the one line that turns a torch module into one whose weights and work are divided over the tensor
axis, as asked or as a plan finds best."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hpctrain.convert import divide
from hpctrain.given import check_types
from hpctrain.grid import Grid

if TYPE_CHECKING:
    from hpctrain.plan import Machine
    from hpctrain.plan.for_model import ModelPlan


def parallelize(
    model: nn.Module, grid: Grid, replicate: list[str] | tuple[str, ...] = (), check_steps: int = 3,
    zero: int | None = None, pipeline: str | None = None, layers_per_stage: Sequence[int] | None = None,
    shard_activations: bool = False, plan: ModelPlan | str | None = None, example: Any = None,
    machine: Machine | str | Path | None = None,
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
    `.grad` are this rank's shard, on which optimizers work; as the weight does, they say they have the whole shape,
    and `.as_subclass(torch.Tensor)` is the shard itself. `state_dict()` is of shards, which `load_state_dict()` takes
    back and files refuse: `ht.gather_state_dict` is for these, and for optimizers' `ht.gather_optimizer_state`.
    Parameters stay the same objects, with their attributes; hooks on their gradients are given the whole ones.
    `model.apply(f)` gives each module its whole weights, `reset_parameters()` and `load_state_dict` work, and
    `save_pretrained` writes whole weights. What cannot be done to a sharded weight is refused by name.

    In a loop of one's own, torch's clip_grad_norm_ and GradScaler, and norms and sums of gradients, are of the whole
    gradient; every rank must call them. So are those of `.data`, and of copies; where they meet tensors of the whole
    shape, are written to by an index, random numbers are drawn for them, or their elements are moved, that is done on
    the whole. Of torch.autograd.grad they are shards too, and with create_graph whole. What else would be that of
    a part is refused: other reductions and products of gradients, optimizers that mix the elements of a weight (LBFGS,
    Adafactor, Muon), replicas without `sync_gradients`, torch's DistributedDataParallel.

    Divided are: nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU, nn.MultiheadAttention,
    nn.TransformerEncoderLayer and DecoderLayer, nn.Conv*d, nn.ConvTranspose*d, nn.BatchNorm*d, nn.Bilinear,
    nn.EmbeddingBag, nn.LSTM, nn.GRU, nn.RNN and their cells (the weights, not the work), what
    torch.nn.utils.parametrize computes weights from, and what inherits from linear layers, embeddings and convolutions.
    A module of any other type keeps its own parameters and buffers whole on every rank, with whole gradients, and its
    children are divided; one line is logged that says what stays whole. Where a buffer of such a module takes
    statistics of one replica's batch, the call that changes it is refused.

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
    without a mask and with use_cache=False. Hooks within the model see the local tokens. Refused by name: padding,
    caches, `generate`, modules that may mix positions.

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
            replicas; 2: the gradients too; 3: the weights too, which are gathered while a layer computes, and
            where other code reads them, on all replicas or none. From 1 on optimizers are any of torch's that treat
            every element by itself; one's own see flat ranges of weights as well, with the shape of the whole. `.grad`
            is this rank's range of the mean, flat, of which norms and clipping are those of the whole, and the weights
            stay in their memory. Weights that no replica's loss depends on have no gradient, as on one rank. Every
            replica calls backward; one without samples of `model(...).sum() * 0`, or clips by `ht.clip_grad_norm_`.
        plan: what to divide. None: all that can be. "auto": of pairs of linear layers, attention and other layers those
            whose division saves more time than it costs to move what they need, and `shard_activations` where that is
            faster, or all that fits; the others stay whole on every rank, as with `replicate`. Or a plan that
            `ht.plan.for_model` made of the model, to look at before. For grids without pipeline, sequence and expert
            axes.
        example: for plan="auto": what the model is called with, of the sizes of training: a tensor, a tuple of
            arguments, or a dict of those with names. The first rank calls the model with it, without gradients.
        machine: for plan="auto": one that is known by name, or a file that `hpctrain machine -o here.toml` wrote; by
            default here.toml.

    From here on a watchdog ends the job where an operation of communication takes longer than HPCTRAIN_WATCHDOG seconds
    (600; 0 is never), as where only some ranks call the model, and every rank that waits says for whom.

    Raises:
        ValueError: on every rank, before anything is changed: when a module can be neither divided nor left as it is,
            an option of one is not supported, a weight has a hook that would see a part, weights are shared in a way
            that cannot be divided, the ranks' weights differ, an entry of `replicate` matches nothing, the model has no
            trunk for a pipeline axis, or ranks share sequences that the model cannot cut; and as `ht.plan.for_model`.
    """
    check_types(model=(model, nn.Module), grid=(grid, Grid))
    if plan is None:
        if example is not None or machine is not None:
            raise ValueError('example and machine are for plan="auto", got plan=None')
    else:
        plan = _plan(model, grid, replicate, shard_activations, plan, example, machine)
        replicate, shard_activations = [*replicate, *plan.replicate], plan.shard_activations
    return divide(model, grid, replicate, check_steps, zero, pipeline, layers_per_stage, shard_activations)


def _plan(model, grid, replicate, shard_activations, plan, example, machine) -> ModelPlan:
    from hpctrain.plan.for_model import ModelPlan, box_of, for_model

    if shard_activations:
        raise ValueError("shard_activations is the plan's to choose; leave it or plan out")
    if isinstance(plan, ModelPlan):
        if plan.box != box_of(grid):
            raise ValueError(f"the plan was made for a grid of tensor={plan.box}, got tensor={box_of(grid)}")
        if example is not None or machine is not None:
            raise ValueError('example and machine are for plan="auto", got a plan that was made before')
        return plan
    if plan != "auto":
        raise ValueError(f'plan must be None, "auto" or what ht.plan.for_model gave, got {plan!r:.100}')
    if example is None:
        raise ValueError('plan="auto" needs example: what the model is called with, of the sizes of training')
    return for_model(model, grid, example, "here.toml" if machine is None else machine, replicate)
