"""Attention of Hugging Face's models and of timm's with its heads divided, their own code untouched.

Their code works on however many heads the projections give it, as it says -1 for their number or reads it from the
module. Caches then hold this rank's heads, and `generate` works.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hpctrain.comm import functional
from hpctrain.convert.boundary import enter
from hpctrain.convert.box import Entered, split_down, split_up
from hpctrain.convert.cached_heads import layer_of, mark_divided, take_heads
from hpctrain.convert.handed_on import hands_on
from hpctrain.convert.handed_out import of_heads
from hpctrain.convert.head_dropout import HeadDropout
from hpctrain.convert.head_twins import INDEX, local_attributes
from hpctrain.convert.intermediate import takes_it_alone
from hpctrain.convert.norms import entered_weights
from hpctrain.convert.plain import is_hooked
from hpctrain.convert.products import SharedEntry, SplitLinear, share_entry, split_linear, split_matrix
from hpctrain.convert.sequence import use_context_attention
from hpctrain.convert.sharded_activation import ShardedActivation
from hpctrain.convert.tiled_attention import TiledAttention
from hpctrain.convert.unit_module import Unit, enclose
from hpctrain.grid import Axis, Grid
from hpctrain.layout import Layout
from hpctrain.shard import split, split_sizes, subsplit

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


class SplitAttention(Unit):
    """Mixin for an attention module.

    Attributes: `axis`, of `grid`; `all_heads`, the number over all ranks; `part`, the query heads of this rank;
    `key_heads`, `key_part`, the same of those of keys; `counts`, query heads by rank; `arguments`, the names of the
    forward's.
    """

    axis: Axis
    grid: Grid
    all_heads: int
    part: slice
    key_heads: int
    key_part: slice
    counts: tuple[int, ...]
    arguments: list[str]

    def forward(self, *args: Any, **kwargs: Any):
        kwargs.update(zip(self.arguments, args))
        here = self.counts[self.axis.rank]
        learned: list[torch.Tensor] = []
        for name, value in kwargs.items():
            if name.endswith("states") or name in ("x", "residual"):
                continue  # to projections, which bring them inside; past them
            if name.endswith("head_mask") and value is not None:
                raise ValueError(f"{self.path} of a parallelized model takes no {name}")
            per_head = name.endswith(("mask", "bias")) or name == "alibi"
            value = self._inside(name, value, per_head or name == "position_embeddings")
            if per_head and isinstance(value, torch.Tensor):
                value = self._of_heads(name, value)
                learned += [value] * value.requires_grad
            kwargs[name] = value
        learned += take_heads(self._cached(kwargs), self.axis, self.key_part, self.key_heads)
        with self._attending(here):
            given = super().forward(**kwargs)
        mark_divided(self._cached(kwargs), here > 0)
        results = given if isinstance(given, tuple) else (given,)
        out, *others, weights = results if len(results) > 1 else (*results, None)
        learned += [vars(child).pop("output") for child in self.children() if isinstance(child, HeadBias)]
        if not here:  # torch's kernel leaves what is added to no scores out of the graph
            out = _depends_on(out, sum(each[:0].sum() for each in learned))
        wanted = self._forward_hooks or kwargs.get("output_attentions")  # hooks: Hugging Face's, to collect them
        if weights is not None:
            weights = of_heads(weights, self.axis, self.counts) if wanted else None
        return (out, *others, weights)[: len(given)] if isinstance(given, tuple) else out

    def _cached(self, given):
        crosses = any(given.get(name) is not None for name in ("encoder_hidden_states", "key_value_states"))
        return layer_of([*given.values()], getattr(self, INDEX, None), crosses)

    def _attending(self, here):
        if self.training:
            return HeadDropout(self.all_heads, self.part, self.grid)
        return contextlib.nullcontext() if here else TiledAttention(self.grid)

    def _inside(self, name, value, known):
        """Each rank's heads give a part of the gradient of what is learned, as a position bias is."""

        def inside(x):
            if not isinstance(x, torch.Tensor) or not x.requires_grad:
                return x
            if not known:
                raise ValueError(
                    f"{self.path} of a parallelized model: nobody knows what the gradient of its {name} is"
                )
            return enter(x, self.axis)

        return tree_map(inside, value) if isinstance(value, (torch.Tensor, tuple, list)) else value

    def _of_heads(self, name, value):
        """What is added to the scores, (batch, heads or 1, queries, keys) or (batch × heads, queries, keys)."""
        if value.dim() == 4 and value.shape[1] == self.all_heads > 1:
            return value[:, self.part if self.counts[self.axis.rank] else slice(1)]  # GPT-2 has a head of zeros
        if value.dim() == 3 and not name.endswith("mask"):
            return value.unflatten(0, (-1, self.all_heads))[:, self.part].flatten(0, 1)
        return value


def _depends_on(out, nothing):
    """`out`, to which a rank alone adds a sum of nothing: no other is to be waited for in backward."""
    return out.like(out.rows() + nothing) if isinstance(out, ShardedActivation) else out + nothing


class BiasedAttention(SplitAttention):
    """Mixin for T5's: a layer makes the position biases, and gives them, of all heads, to those after it; or each makes
    its own."""

    biases: torch.Tensor | None
    output: torch.Tensor | None

    def forward(self, *args: Any, **kwargs: Any):
        kwargs.update(zip(self.arguments, args))
        self.biases, self.output = kwargs.get("position_bias"), None
        out, *others, weights = super().forward(**kwargs)
        biases, own, self.biases, self.output = self.biases, self.output, None, None
        if own is not None and not self.counts[self.axis.rank]:  # as in SplitAttention
            out = _depends_on(out, own.sum())
        if not others:
            return out, weights
        (local,) = others
        if biases is None:  # no layer makes any
            biases = local.new_zeros((1, self.all_heads, *local.shape[2:]), requires_grad=local.requires_grad)
        return out, biases, weights

    def compute_bias(self, *args: Any, **kwargs: Any):
        biases = super().compute_bias(*args, **kwargs)  # type: ignore[misc]  # Hugging Face's
        self.biases, self.output = biases, enter(biases, self.axis)[:, self.part]
        return self.output


class HeadBias(nn.Module):
    """Mixin for a module that makes what is added to the scores: whole weights, and this rank's heads of it.

    Attributes: `axis`; `part`; `output`, what the forward gave, until the attention has taken it.
    """

    axis: Axis
    part: slice
    output: torch.Tensor

    def forward(self):
        self.output = enter(super().forward(), self.axis)[:, self.part]
        return self.output


class HeadNorm(nn.Module):
    """Mixin for a norm that treats every head by itself, or what heads are made from: whole weights, on what this rank
    goes on with.

    Attribute: `axis`.
    """

    axis: Axis

    def forward(self, *args: Any, **kwargs: Any):
        with entered_weights(self, self.axis):
            return super().forward(*args, **kwargs)


class SharedHead(SharedEntry):
    """Mixin for a projection of which several ranks need the same features: those of a key head, or latent ones.

    The features are computed divided, gathered, and each rank goes on with those it needs.

    Attributes: `needed`, the features of this rank: a slice or their numbers.
    """

    needed: slice | torch.Tensor

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, enters: bool):
        part = super().multiply(x, bias, enters)
        whole = functional.all_gather(part.flatten(0, -2).t(), self.axis, self.counts).t()
        return whole[:, self.needed].contiguous().unflatten(0, part.shape[:-1])


def split_attention(plan: Plan, module: torch.nn.Module) -> None:
    """Attention with its projection back; leaves alone what is none."""
    found = plan.attentions.heads(module)
    if found is not None and found.out:
        _split_projections(plan, module, found, module.get_submodule(found.out))


def split_bert_attention(plan: Plan, module: Any) -> None:
    """Attention whose projection back is in `output`; leaves alone what is none."""
    if not hands_on(module, "self", "output", several=True) or not takes_it_alone(module.output):
        return
    found, out = plan.attentions.heads(module.self), module.output.dense
    if found is not None and not found.out and out.in_features == found.heads * found.width:
        _split_projections(plan, module.self, found, out)


def _split_projections(plan, module, found, out):
    ranks = plan.axis.size
    on_box = plan.box and found.key_heads >= ranks and all(_on_box(each, found) for each in found.projections)
    if on_box:
        queries, keys = heads_on_box(plan, found.heads, found.key_heads)
    else:
        queries, keys = zip(*(grouped_heads(found.heads, found.key_heads, ranks, rank) for rank in range(ranks)))
    if not (found.may_be_none or all(part.stop > part.start for part in queries)):
        return
    layers = [getattr(module, projection.name) for projection in found.projections]
    if any(plan.is_shared(layer.weight) for layer in (*layers, out)) or any(map(is_hooked, module.children())):
        return
    if on_box:
        entered, group = Entered(plan.grid, over_tokens=False), found.heads // found.key_heads
        for projection, layer in zip(found.projections, layers):
            fused, width = _widths(projection, found)
            split_up(plan, layer, entered, fused, width * (group if projection.layout == "queries" else 1))
        split_down(plan, out, entered, group * found.width)
        enclose(plan, module, entered, layers)
    else:
        for projection, layer in zip(found.projections, layers):
            _split_projection(plan, projection, layer, found, queries, keys)
        parts = [slice(part.start * found.width, part.stop * found.width) for part in queries]
        split_linear(plan, out, by_output=False, parts=parts, enters=False)
        outer = [(projection, layer) for projection, layer in zip(found.projections, layers) if not projection.inner]
        apart = _may_attend_to_others(module)
        of_queries = [layer for projection, layer in outer if apart and projection.layout == "queries"]
        others = [layer for _, layer in outer if layer not in of_queries]
        share_entry(plan, module, [of_queries, others])
    for name in (*found.norms, *found.biases):
        child = getattr(module, name)
        if name in found.norms:
            plan.whole(child)
            plan.swap_class(child, HeadNorm, axis=plan.axis)
        elif not hasattr(module, "compute_bias"):
            plan.whole(child)
            plan.swap_class(child, HeadBias, axis=plan.axis, part=queries[plan.axis.rank])
    mixin = BiasedAttention if hasattr(module, "compute_bias") else SplitAttention
    divide_heads(plan, module, queries, keys, found.key_heads, mixin)
    part, kept = queries[plan.axis.rank], keys[plan.axis.rank]
    plan.change(module, **local_attributes(module, found, part.stop - part.start, kept.stop - kept.start))


def _may_attend_to_others(module) -> bool:
    """Whether keys and values may be made from another sequence, as of an encoder."""
    _, _, *others = inspect.signature(type(module).forward).parameters
    return any(name.endswith("states") for name in others)


def _split_projection(plan, projection, layer, found, queries, keys):
    """By heads, where every feature is for one rank and those of a rank lie together; else all of it to all ranks."""
    heads, key_heads, axis = found.heads, found.key_heads, plan.axis
    fused, width = _widths(projection, found)
    mixin: type[SplitLinear] = SplitLinear if projection.inner else SharedEntry
    how: dict[str, Any] = {"by_output": True, "leaves": False, "enters": not projection.inner}
    if width and (projection.layout == "queries" or key_heads >= axis.size):
        whole = queries if projection.layout == "queries" else keys
        parts = [slice(part.start * width, part.stop * width) for part in whole]
        split_matrix(plan, layer, mixin, 0, 1, parts=parts, fused=fused, **how)
        return
    split_matrix(plan, layer, SharedHead, 0, 1, **how)
    rows = projection.rows(queries[axis.rank], keys[axis.rank], heads, key_heads)
    together = len(rows) and len(rows) == int(rows[-1] - rows[0]) + 1
    plan.change(layer, needed=slice(int(rows[0]), int(rows[-1]) + 1) if together else rows)


def _widths(projection, found) -> tuple[int, int]:
    """Of a projection whose features are each for one head, or group of them: matrices in one, and features of a head;
    0 of others."""
    layout, group = projection.layout, found.heads // found.key_heads
    if layout == "thirds":
        return (3, projection.width) if group == 1 else (1, 0)
    return 1, {"queries": 1, "keys": 1, "groups": group + 2}.get(layout, 0) * projection.width


def _on_box(projection, found) -> bool:
    return not projection.inner and _widths(projection, found)[1] > 0


def heads_on_box(plan: Plan, heads: int, key_heads: int) -> tuple[list[slice], list[slice]]:
    """Query and key heads of every rank, cut over x, then y, then z."""
    keys = [part for (part,) in plan.blocks(Layout.of((key_heads,), {0: ("x", "y", "z")}))]
    group = heads // key_heads
    return [slice(part.start * group, part.stop * group) for part in keys], keys


def divide_heads(
    plan: Plan, module: torch.nn.Module, parts: list[slice], keys: list[slice], key_heads: int,
    mixin: type = SplitAttention,
) -> None:  # fmt: skip
    """The module works on some of its heads, `parts` by rank, and of its `key_heads` on `keys`."""
    counts, rank = tuple(part.stop - part.start for part in parts), plan.axis.rank
    plan.swap_class(
        module, mixin, axis=plan.axis, grid=plan.grid, all_heads=sum(counts), part=parts[rank], counts=counts,
        key_heads=key_heads, key_part=keys[rank],
        arguments=list(inspect.signature(type(module).forward).parameters)[1:],
    )  # fmt: skip
    if plan.sequence.size > 1:
        plan.context_attention.add(module)
        use_context_attention(plan, module)


def grouped_heads(heads: int, key_heads: int, ranks: int, rank: int) -> tuple[slice, slice]:
    """The query heads of a rank, and the key heads that they attend with.

    Whole groups of query heads where there are enough key heads; otherwise several ranks share one key head and divide
    its group.

    >>> [grouped_heads(8, 2, 4, rank)[0] for rank in range(4)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None), slice(6, 8, None)]
    >>> grouped_heads(8, 2, 4, 3)[1]
    slice(1, 2, None)
    """
    group = heads // key_heads
    if key_heads >= ranks:
        keys = split(key_heads, ranks, rank)
        return slice(keys.start * group, keys.stop * group), keys
    sharing = split_sizes(ranks, key_heads)
    first = 0
    for key, count in enumerate(sharing):
        if rank < first + count:
            queries = subsplit(slice(key * group, (key + 1) * group), count, rank - first)
            # no query heads, no key heads
            return queries, slice(key, key + (queries.stop > queries.start))
        first += count
    raise AssertionError(f"rank {rank} of {ranks}")
