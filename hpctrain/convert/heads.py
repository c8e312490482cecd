"""Attention of Hugging Face's models and of timm's, of whatever class: how its projections lie, in heads.

What a module's layers are called gives candidates; `head_twins` tells by running them which of these it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hpctrain.convert.plain import altered, is_hooked, is_of_diffusers, is_of_huggingface, is_plain

_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("q_lin", "k_lin", "v_lin"),
    ("to_q", "to_k", "to_v"),
)  # fmt: skip
_FUSED = ("query_key_value", "qkv_proj", "Wqkv", "qkv")
_LATENT = ("kv_a_proj_with_mqa", "kv_b_proj")
_OUT = ("o_proj", "out_proj", "dense", "o", "proj", "out_lin", "Wo", "to_out.0")
_WIDTH = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
# Attributes that forwards may read
HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
# All that forwards of others than Hugging Face's may take
_ARGUMENTS = {"x", "attn_mask", "mask", "is_causal"}


@dataclass(frozen=True)
class Projection:
    """A linear layer that makes heads.

    Attributes:
        name: of the layer.
        layout: of its output features. "queries" or "keys": head by head; "groups": for each key head its query heads,
            the key, the value; "thirds": all queries, all keys, all values; "latent": what all heads are made from.
        width: output features of a head.
        inner: takes what a latent one gives, and not the module's input.
    """

    name: str
    layout: str
    width: int
    inner: bool = False

    def rows(self, queries: slice, keys: slice, heads: int, key_heads: int) -> torch.Tensor:
        """The output features for these query heads, and these key heads, of so many."""
        width, group = self.width, heads // key_heads

        def of(part, start=0):
            return torch.arange(start + part.start * width, start + part.stop * width)

        if self.layout == "queries":
            return of(queries)
        if self.layout == "keys":
            return of(keys)
        if self.layout == "thirds":
            return torch.cat([of(queries), of(keys, heads * width), of(keys, (heads + key_heads) * width)])
        if self.layout == "groups":
            found = []
            for key in range(keys.start, keys.stop):
                first = key * (group + 2)
                low, high = max(queries.start, key * group), min(queries.stop, (key + 1) * group)
                found += [of(slice(first + low - key * group, first + high - key * group))]
                found += [of(slice(first + group, first + group + 2))]
            return torch.cat([torch.empty(0, dtype=torch.int64), *found])
        return torch.arange(width)


@dataclass(frozen=True)
class Heads:
    """How an attention is made.

    Attributes:
        projections: the layers that make queries, keys and values.
        out: name of the layer after them; "" where that is in another module.
        width: features of a head before that layer.
        heads, key_heads: how many there are.
        norms: names of modules whose weights are those of one head's features, or of latent ones.
        biases: names of modules that give what is added to the scores, (1, heads, queries, keys).
        may_be_none: whether it works with no heads at all, which some ranks may have.
    """

    projections: tuple[Projection, ...]
    out: str
    width: int
    heads: int
    key_heads: int
    norms: tuple[str, ...]
    biases: tuple[str, ...]
    may_be_none: bool = False


def candidates(module: nn.Module) -> Iterator[Heads]:
    """What the module may be, by the names and sizes of its layers."""
    children = dict(module.named_children())
    own = any(value is not None for value in module._parameters.values())
    known = is_of_huggingface(module) or is_of_diffusers(module) or _takes_known(module)
    if own or altered(module) or not known:
        return
    out = next((path for path in _OUT if _is_linear(_inner(module, path))), "")
    holder = children.pop(out.partition(".")[0]) if "." in out else None
    if holder is not None and any(type(other) is not nn.Dropout for other in [*holder.children()][1:]):
        return
    for projections, heads, key_heads, width in _projections(module, children, out):
        linears = [*(projection.name for projection in projections), *([out] if out in children else [])]
        others = {n: c for n, c in children.items() if n not in linears and type(c) is not nn.Dropout}
        biases = tuple(name for name, child in others.items() if _is_bias(name, child))
        norms = tuple(n for n, c in others.items() if n not in biases and any(True for _ in c.parameters()))
        plain = all(_is_linear(children[name]) for name in linears)
        if plain and all(_is_norm(child) for name, child in others.items() if name not in biases):
            yield Heads(tuple(projections), out, width, heads, key_heads, norms, biases)


def _takes_known(module) -> bool:
    return _ARGUMENTS.issuperset([*inspect.signature(type(module).forward).parameters][1:])


def _projections(module, children, out):
    """(projections, heads, key heads, features of a head before `out`) that the sizes allow."""
    names = next((names for names in _SEPARATE if all(name in children for name in names)), None)
    sizes = {name: child.out_features for name, child in children.items() if isinstance(child, nn.Linear)}
    width, heads = (_number(module, each) for each in (_WIDTH, HEADS))
    if not width and heads and names and names[0] in sizes:
        width = sizes[names[0]] // heads
    fused = next((name for name in _FUSED if name in sizes), None)
    last = getattr(_inner(module, out), "in_features", None) if out else None
    if all(name in sizes for name in _LATENT) and last:
        yield from _latent(module, sizes, last)
    elif names and width and all(name in sizes for name in names):
        queries, keys, values = (sizes[name] for name in names)
        if keys == values and last in (None, queries) and _fits(queries, keys, width):
            layouts = zip(names, ("queries", "keys", "keys"))
            projections = [Projection(name, layout, width) for name, layout in layouts]
            yield projections, queries // width, keys // width, width
    elif fused and width:
        queries = last or sizes[fused] // 3
        keys = (sizes[fused] - queries) // 2
        if queries + 2 * keys == sizes[fused] and _fits(queries, keys, width):
            for layout in ("groups", "thirds"):
                yield [Projection(fused, layout, width)], queries // width, keys // width, width


def _latent(module, sizes, last):
    heads = _number(module, HEADS)
    query = "q_b_proj" if "q_b_proj" in sizes else "q_proj"
    if not heads or query not in sizes or any(n % heads for n in (sizes[query], sizes["kv_b_proj"], last)):
        return
    projections = [
        Projection("kv_a_proj_with_mqa", "latent", sizes["kv_a_proj_with_mqa"]),
        Projection("kv_b_proj", "queries", sizes["kv_b_proj"] // heads, inner=True),
        Projection(query, "queries", sizes[query] // heads, inner=query == "q_b_proj"),
    ]
    if query == "q_b_proj":
        projections.append(Projection("q_a_proj", "latent", sizes["q_a_proj"]))
    yield projections, heads, heads, last // heads


def _fits(queries, keys, width) -> bool:
    return keys > 0 and queries % keys == 0 == keys % width


def _number(module, names) -> int:
    """The first of these attributes that is a whole number; 0 where there is none."""
    return next((getattr(module, name) for name in names if isinstance(getattr(module, name, None), int)), 0)


def _inner(module, path):
    """The module there, or None."""
    for name in path.split("."):
        module = None if module is None else module._modules.get(name)
    return module


def _is_linear(child) -> bool:
    return is_plain(child, nn.Linear) or (is_plain(child, "FalconLinear") and not is_hooked(child))


def _is_norm(child) -> bool:
    """Its weights are of features, or it has none."""
    no_buffers = not any(True for _ in child.buffers())
    return no_buffers and all(p.dim() == 1 for p in child.parameters()) and not list(child.children())


def _is_bias(name, child) -> bool:
    return name in ("relative_position_bias", "relative_attention_bias") and not altered(child) and not is_hooked(child)
