"""Attention is recognised by what it computes, and divided by heads.

A tiny twin of the module, with random numbers in the place of its projections, is run with all of its heads and with
two parts of them. It is what it is taken for if what the parts give adds up to the whole, and if what its dropout is
given are probabilities, head by head, or the whole output.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from hpctrain.convert.heads import HEADS, KEY_HEADS, Heads, candidates
from hpctrain.convert.plain import is_plain
from hpctrain.convert.twins import Kept, TwinLinear, containers_of
from hpctrain.layers.softmax_attention import fused_attention, softmax_attention

_FEATURES = 10  # of the twin's input and output
_LENGTH = 4
INDEX = "layer_idx"  # by which Hugging Face's layers know their number
# Key heads of the twin; those of its parts, and how many query heads each has, of groups of g and of one group of 3.
_ALL = slice(0, 3)
_PARTS = (slice(0, 1), slice(1, 3))


def find_heads(module: nn.Module) -> tuple[Heads | None, bool]:
    """None where it is no such attention; and whether it asked for the number of its layer."""
    index = _Index(module)
    for found in candidates(module):
        for one_key in (False, True)[: 1 + (found.key_heads == 1)]:
            if (fitting := _probe(module, found, one_key, index)) is not None:
                return fitting, index.is_read
    return None, index.is_read


def local_attributes(module: nn.Module, found: Heads, heads: int, key_heads: int) -> dict:
    """What its forward may read that says how many heads there are, of so many. To cut "thirds" it needs a number, and
    where it has none, reads its configuration."""
    counts = {**dict.fromkeys(HEADS, heads), **dict.fromkeys(KEY_HEADS, key_heads)}
    counts["num_key_value_groups"] = heads // max(1, key_heads)
    counts["attn_dim"] = counts["all_head_size"] = heads * found.width
    own: dict[str, Any] = {name: n for name, n in counts.items() if isinstance(getattr(module, name, None), int)}
    config = getattr(module, "config", None)
    thirds = any(projection.layout == "thirds" for projection in found.projections)
    if config is not None and thirds and own.keys().isdisjoint(HEADS) and hasattr(config, "num_attention_heads"):
        own["config"] = copy.copy(config)
        own["config"].__dict__[config.attribute_map.get("num_attention_heads", "num_attention_heads")] = heads
    return own


class _Index:
    """Attributes: `kind`, the module's type, but that it notes that the number of the layer `is_read`."""

    def __init__(self, module: nn.Module):
        self.is_read, self.kind = False, type(module)
        if INDEX in vars(module):
            own = {"__module__": self.kind.__module__, INDEX: property(self._read)}
            self.kind = type(self.kind.__name__, (self.kind,), own)

    def _read(self, twin: nn.Module) -> Any:
        self.is_read = True
        return vars(twin)[INDEX]


def _probe(module, found, one_key, index):
    """`found`, and whether it works without heads, where the twin is what it should be; else None.

    Args:
        one_key: the twin has one key head, which all parts share.
    """
    known = inspect.signature(type(module).forward).parameters
    turned = "position_embeddings" in known
    ways = itertools.product(
        (None, "additive", "boolean") if known.keys() & {"attention_mask", "attn_mask", "mask"} else (None,),
        ("given", None) if "alibi" in known else (None,),
        ("pair", "alike", *(["complex"] if hasattr(module, "qk_rope_head_dim") else [])) if turned else ("pair",),
        (True, False) if "encoder_hidden_states" in known else (False,),
        (True, False) if "position_bias" in known else (False,),
    )
    fits, may_be_none, run = False, True, set[str]()
    state = torch.get_rng_state()
    for way in ways:
        twins = _Twins(module, index.kind, found, one_key, way)
        with torch.no_grad():
            try:
                whole, *others = [twins.run(_ALL, training) for training in (True, False)]
                others += [twins.run(part) for part in _PARTS]
            except Exception:  # whatever it does with its layers, it is not called in this way
                continue
            finally:
                torch.set_rng_state(state)  # what draws random numbers does not add up
            if not twins.add_up(whole, *others):
                return None
            fits, run = True, run | twins.ran
            try:
                may_be_none &= twins.run(slice(0, 0)) is not None
            except Exception:  # of shapes that do not follow from nothing
                may_be_none = False
    # of a norm that no way of calling runs nobody knows what it is given
    return replace(found, may_be_none=may_be_none) if fits and run >= {*found.norms} else None


class _Twins:
    """Twins of a module, of some of the heads, called in one way."""

    def __init__(self, module: nn.Module, kind: type, found: Heads, one_key: bool, way: tuple):
        self.module, self.kind, self.found, self.one_key, self.way = module, kind, found, one_key, way
        self.children = dict(module.named_children())
        self.ran: set[str] = set()  # norms
        self.kept = Kept()
        group = 1 if one_key else found.heads // found.key_heads
        self.group, self.key_heads = group, 1 if one_key else _ALL.stop
        self.heads = _ALL.stop * group
        chance = torch.Generator().manual_seed(0)

        def numbers(*shape):
            return torch.randn(shape, generator=chance, dtype=torch.float64)

        self.weights = {}
        for projection in found.projections:
            inputs = self.children[projection.name].in_features if projection.inner else _FEATURES
            rows = len(self._rows(projection, _ALL))
            self.weights[projection.name] = numbers(rows, inputs), numbers(rows)
        self.out = numbers(_FEATURES if found.out else 0, self.heads * found.width)
        self.norms = {
            name: {key: numbers(*p.shape) for key, p in self.children[name].named_parameters()} for name in found.norms
        }
        self.given = {name: numbers(2, _LENGTH, _FEATURES) for name in ("hidden_states", "residual")}
        self.given["x"] = self.given["hidden_states"]
        self.given["encoder_hidden_states"] = numbers(2, _LENGTH + 1, _FEATURES)
        self.scores = numbers(2, self.heads, _LENGTH, _LENGTH)  # what is added to them, by head
        self.angles = numbers(2, _LENGTH, 2 * found.width)

    def _parts(self, part):
        """Query heads and key heads."""
        if self.one_key:
            return part, slice(0, int(part.stop > part.start))
        return slice(part.start * self.group, part.stop * self.group), part

    def _rows(self, projection, part):
        return projection.rows(*self._parts(part), self.heads, self.key_heads)

    def run(self, part: slice, training: bool = True) -> torch.Tensor | None:
        """What it gives of these; None where that is not of the right shape."""
        found, (queries, keys) = self.found, self._parts(part)
        heads = queries.stop - queries.start
        layers = {}
        for projection in found.projections:
            rows, (weight, bias) = self._rows(projection, part), self.weights[projection.name]
            layers[projection.name] = TwinLinear(weight[rows], bias[rows])
        features = slice(queries.start * found.width, queries.stop * found.width)
        if found.out:
            layers[found.out] = TwinLinear(self.out[:, features], None)
        for name in found.biases:
            layers[name] = self._bias(name, queries)
        twin = self._twin(layers, heads, keys.stop - keys.start, training)
        known = list(inspect.signature(type(twin).forward).parameters.items())[1:]
        mode = _Neutral()
        with mode:
            result = self.kept.call(twin, **self._arguments(known, part, queries))
        result = (result, None) if isinstance(result, torch.Tensor) else result
        width = _FEATURES if found.out else heads * found.width
        shapes = {(2, heads, _LENGTH, found.width), *self.calls}
        well = isinstance(result, tuple) and 1 <= len(result) <= 3 and len(self.calls) <= 1
        if well and len(result) > 1 and result[-1] is not None:
            shapes.add(tuple(result[-1].shape))  # the weights
        well = well and all(shape[:3] == (2, heads, _LENGTH) for shape in shapes)
        well = well and all(s[:2] == (2, heads) and len(s) == 4 or s == (2, _LENGTH, _FEATURES) for s in mode.dropped)
        if not well or not isinstance(result[0], torch.Tensor) or result[0].shape != (2, _LENGTH, width):
            return None
        return result[0]

    def add_up(self, whole, in_evaluation, *parts) -> bool:
        if any(y is None for y in (whole, in_evaluation, *parts)) or not torch.equal(whole, in_evaluation):
            return False
        if not self.kept.are_alike():
            return False
        together = sum(parts) if self.found.out else torch.cat(parts, -1)
        return torch.allclose(together, whole, rtol=1e-9, atol=1e-9)

    def _arguments(self, known, part, queries):
        mask, alibi, turned, of_others, biased = self.way
        width = getattr(self.module, "rotary_ndims", getattr(self.module, "qk_rope_head_dim", self.found.width))
        angles = self.angles[..., :width]
        boolean = torch.arange(_LENGTH) <= torch.arange(_LENGTH).view(1, 1, -1, 1)
        masks = {None: None, "additive": self.scores[:, :1], "boolean": boolean.expand(2, 1, -1, -1)}
        given = {
            **self.given,
            "attention_mask": masks[mask],
            "mask": masks[mask],
            "attn_mask": masks[mask],
            "alibi": None if alibi is None else self.scores[:, queries, :1].flatten(0, 1),
            "position_ids": torch.arange(_LENGTH).unsqueeze(0),
            "position_embeddings": (angles.cos(), angles.sin()),
        }
        if turned == "alike":  # for all sequences
            given["position_embeddings"] = angles[0].cos(), angles[0].sin()
        if turned == "complex":
            given["position_embeddings"] = torch.polar(torch.ones_like(angles), angles)[..., ::2]
        if biased:
            given["position_bias"] = self.scores[:1, queries]
        if not of_others:  # which some take of the same length alone
            del given["encoder_hidden_states"]
        if part.start:  # what is added to the output is there once
            given["residual"] = torch.zeros_like(given["residual"])
        arguments = {name: given[name] for name, _ in known if name in given}
        for name, parameter in known:
            wanted = parameter.default is inspect.Parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if wanted and name not in arguments:
                arguments[name] = self.scores[0, queries] if name == "position_bias" else None
        return arguments

    def _bias(self, name, queries):
        """What gives some heads' part of what is added to the scores.

        Raises:
            ValueError: where the module's own is something else.
        """
        child, heads = self.children[name], self.found.heads
        if is_plain(child, nn.Embedding) and child.embedding_dim == heads:
            rows = child.num_embeddings
            table = self.scores[0].flatten(1).repeat(1, -(-rows // _LENGTH**2))[:, :rows].t()
            return nn.Embedding(rows, queries.stop - queries.start, _weight=table[:, queries].contiguous())
        if len(inspect.signature(type(child).forward).parameters) == 1 and child().shape[:2] == (1, heads):
            return _Gives(self.scores[:1, queries])
        raise ValueError(f"{name} gives no biases by head")

    def _twin(self, layers, heads, key_heads, training):
        """The module with other layers; nothing that it does reaches the module itself."""
        children = {}
        deeper = {id(self.module.get_submodule(path)): layer for path, layer in layers.items() if "." in path}
        for name, child in self.children.items():
            if name in layers:
                children[name] = layers[name]
            elif name in self.norms:
                children[name] = copy.copy(child)
                weights = {key: nn.Parameter(value) for key, value in self.norms[name].items()}
                hooks = OrderedDict({0: lambda *_, name=name: self.ran.add(name)})
                own = {"_parameters": weights, "training": training, "_forward_pre_hooks": hooks}
                children[name].__dict__ = {**vars(child), **own}
            else:
                children[name] = copy.deepcopy(child, deeper).train(training)
        twin: nn.Module = object.__new__(self.kind)
        own = local_attributes(self.module, self.found, heads, key_heads)
        self.calls: list[tuple] = []
        if hasattr(self.module, "config"):
            config = own.setdefault("config", copy.copy(self.module.config))
            config._attn_implementation_internal = "hpctrain-probe"
            sys.modules["transformers"].AttentionInterface.register("hpctrain-probe", _recorder(self.calls))
        own = {**containers_of(self.module), **own}
        twin.__dict__ = {**vars(self.module), **own, "_modules": children, "training": training}
        return twin


class _Gives(nn.Module):
    def __init__(self, value: torch.Tensor):
        super().__init__()
        self.value = value

    def forward(self):
        return self.value


class _Neutral(TorchFunctionMode):
    """Drops nothing, and computes in float64 what would be in float32.

    Attributes: `dropped`, the shapes of what would be.
    """

    def __init__(self):
        super().__init__()
        self.dropped: list[tuple] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if x is torch.float32 else x for x in args]  # a type is an argument of its own
        return func(*args, **{key: torch.float64 if x is torch.float32 else x for key, x in kwargs.items()})

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False):
        if training and p:
            self.dropped.append(tuple(input.shape))
        return input

    def _attend(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        return fused_attention(query, key, value, attn_mask, is_causal=is_causal, **options)


def _recorder(calls):
    """In the place of Hugging Face's attention functions."""

    def attend(module, query, key, value, attention_mask, scaling=None, position_bias=None, **kwargs):
        calls.append(tuple(query.shape))
        if position_bias is not None:
            masked = attention_mask is not None and attention_mask.dtype != torch.bool
            attention_mask = position_bias + attention_mask if masked else position_bias
        mixed, _ = softmax_attention(query, key, value, attention_mask, scale=scaling or query.shape[-1] ** -0.5)
        return mixed.transpose(1, 2).contiguous(), None

    return attend
