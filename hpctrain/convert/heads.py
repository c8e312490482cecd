"""Attention of Hugging Face's models, of whatever class: recognised by what it computes, and divided by heads.

A tiny twin of the module, with random numbers in the place of its projections, is run with all of its heads and with
two parts of them. It is what it is taken for if its queries, keys and values reach Hugging Face's attention interface
once, head by head, and if what the parts give adds up to the whole.
"""

from __future__ import annotations

import copy
import inspect
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from hpctrain.convert.plain import altered, is_plain
from hpctrain.convert.twins import TwinLinear
from hpctrain.layers.softmax_attention import softmax_attention

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("query_key_value",))
_OUT = ("o_proj", "out_proj", "dense")
_WIDTH = ("head_dim", "attention_head_size", "head_size")
HEADS = ("num_heads", "num_attention_heads")  # attributes that forwards may read
_GROUPS = (slice(0, 1), slice(1, 3))  # key heads of the twin: 3, in two parts
_FEATURES = 10  # of its input and output


@dataclass(frozen=True)
class Heads:
    """How an attention is made.

    Attributes:
        projections: names of the layers for queries, keys and values; or of the one for all three, head by head.
        out: name of the layer after it; "" where that is in another module.
        width: features of a head.
        groups: query heads that share a key head.
        norms: names of modules that treat every head by itself, with the same weights.
        dropout: of the probabilities.
        may_be_none: whether it works with no heads at all, which some ranks may have.
    """

    projections: tuple[str, ...]
    out: str
    width: int
    groups: int
    norms: tuple[str, ...]
    dropout: float = 0.0
    may_be_none: bool = False


def find_heads(module: nn.Module) -> Heads | None:
    """None where it is no such attention."""
    children: Mapping[str, nn.Module] = dict(module.named_children())
    projections = next((names for names in _PROJECTIONS if all(name in children for name in names)), None)
    width = next((getattr(module, name) for name in _WIDTH if isinstance(getattr(module, name, None), int)), None)
    own = any(value is not None for value in (*module._parameters.values(), *module._buffers.values()))
    if projections is None or width is None or own or altered(module) or not hasattr(module, "config"):
        return None
    out = next((name for name in _OUT if name in children), "")
    linears = [*projections, *([out] if out else [])]
    others = {name: child for name, child in children.items() if name not in linears and type(child) is not nn.Dropout}
    norms = [name for name, child in others.items() if any(True for _ in child.parameters())]
    if not all(is_plain(children[name], nn.Linear) for name in linears) or not all(
        _treats_heads(child, width) for child in others.values()
    ):
        return None
    groups = getattr(module, "num_key_value_groups", 1)
    first, *rest = (children[name].out_features for name in projections)
    sizes = [first // groups] * 2 if rest else []
    if first % (width * groups * (1 if rest else 3)) or rest != sizes:
        return None
    if out and children[out].in_features != (first if rest else first // 3):
        return None
    return _probe(module, Heads(projections, out, width, groups, tuple(norms)))


def _treats_heads(child, width) -> bool:
    """Its weights are those of one head's features, or it has none."""
    no_buffers = not any(True for _ in child.buffers())
    return no_buffers and all(p.shape == (width,) for p in child.parameters()) and not list(child.children())


def _probe(module, found):
    """`found` and what there is to be found by running it, where the twin is what it should be; else None."""
    children = dict(module.named_children())
    features, chance = _FEATURES, torch.Generator().manual_seed(0)
    key_heads = _GROUPS[-1].stop

    def numbers(*shape):
        return torch.randn(shape, generator=chance, dtype=torch.float64)

    rows = [found.groups * found.width, found.width, found.width] if len(found.projections) > 1 else [3 * found.width]
    weights = {
        name: (numbers(key_heads, n, features), numbers(key_heads, n)) for name, n in zip(found.projections, rows)
    }
    leaves = _FEATURES if found.out else 0
    last = numbers(leaves, key_heads, found.groups * found.width)
    norms = {name: {key: numbers(found.width) for key, _ in children[name].named_parameters()} for name in found.norms}
    arguments = {"hidden_states": numbers(2, 4, features), "others": numbers(2, 5, features)}
    turned = numbers(2, 4, getattr(module, "rotary_ndims", found.width))
    arguments["position_embeddings"] = (turned.cos(), turned.sin())
    calls: list[tuple] = []

    def run(part, training=True):
        layers = {name: TwinLinear(*(w[part].flatten(0, 1) for w in weights[name])) for name in found.projections}
        if found.out:
            layers[found.out] = TwinLinear(last[:, part].flatten(1), None)
        heads = (part.stop - part.start) * found.groups
        calls.clear()
        y = _run(_twin(module, layers, norms, heads, calls, training), arguments)
        width = leaves or heads * found.width
        well = len(calls) == 1 and calls[0][0] == (2, heads, 4, found.width)
        return y if well and isinstance(y, torch.Tensor) and y.shape == (2, 4, width) else None

    state = torch.get_rng_state()
    with torch.no_grad():
        try:
            whole, in_evaluation = (run(slice(0, key_heads), training) for training in (True, False))
            parts = [run(part) for part in _GROUPS]
            dropout = calls[0][1] if calls else 0.0
        except Exception:  # whatever it does with its layers, it is not this
            return None
        finally:
            torch.set_rng_state(state)  # what draws random numbers does not add up
    if any(y is None for y in (whole, in_evaluation, *parts)) or not torch.equal(whole, in_evaluation):
        return None
    together = sum(parts) if found.out else torch.cat(parts, -1)
    if not torch.allclose(together, whole, rtol=1e-9, atol=1e-9):
        return None
    with torch.no_grad():
        try:
            none = run(slice(0, 0))
        except RuntimeError:  # of shapes that do not follow from nothing
            none = None
    return replace(found, dropout=float(dropout), may_be_none=none is not None)


def _run(twin, given):
    """The first output; of attention to other tokens where it wants these."""
    known = inspect.signature(type(twin).forward).parameters
    arguments = {}
    for name, parameter in list(known.items())[1:]:
        if name in ("hidden_states", "position_embeddings"):
            arguments[name] = given[name]
        elif name == "encoder_hidden_states":
            arguments[name] = given["others"]
        elif parameter.default is inspect.Parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            arguments[name] = None
    result = twin(**arguments)
    return result[0] if isinstance(result, tuple) and len(result) == 2 else None


def _twin(module, layers, norms, heads, calls, training):
    """The module with other layers; nothing that it does reaches the module itself."""
    children = {}
    for name, child in module.named_children():
        if name in layers:
            children[name] = layers[name]
        elif name in norms:
            children[name] = copy.copy(child)
            weights = {key: nn.Parameter(value) for key, value in norms[name].items()}
            children[name].__dict__ = {**vars(child), "_parameters": weights, "training": training}
        elif type(child) is nn.Dropout:
            children[name] = nn.Dropout(child.p).eval()  # of the output, or read for its probability
        else:
            children[name] = copy.deepcopy(child).train(training)
    twin = copy.copy(module)
    config = copy.copy(module.config)
    config._attn_implementation_internal = "hpctrain-probe"
    _interface().register("hpctrain-probe", _recorder(calls))
    own = {name: heads for name in HEADS if isinstance(getattr(module, name, None), int)}
    twin.__dict__ = {**vars(module), **own, "config": config, "_modules": children, "training": training}
    return twin


def _recorder(calls):
    """In the place of Hugging Face's attention functions."""

    def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
        calls.append((tuple(query.shape), dropout))
        mixed, _ = softmax_attention(query, key, value, None, scale=scaling)
        return mixed.transpose(1, 2).contiguous(), None

    return attend


def _interface():
    return sys.modules["transformers"].AttentionInterface
