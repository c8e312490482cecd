"""Models that a user might bring: a kind of its own with a spec, and plain torch modules."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.layers import MLP, RMSNorm
from hpctrain.models import LinearCosts, ModelSpec, TransformerCosts
from hpctrain.models.staged import StagedTransformer


@dataclasses.dataclass(frozen=True)
class TinyShape:
    layers: int
    width: int
    ffn: int
    context: int
    vocabulary: int
    tied: bool


class Tiny(StagedTransformer):
    """No attention, no positions: every token by itself."""

    def make_block(self, index):
        return TinyBlock(self.grid, self.shape, self.algorithm, self.key / "blocks" / index, **self.factory)

    def make_norm(self):
        return RMSNorm(self.grid, self.shape.width, 1e-6, key=self.key / "ln_f", **self.factory)


class TinyBlock(nn.Module):
    def __init__(self, grid, shape, algorithm, key, dtype, device):
        super().__init__()
        factory = {"dtype": dtype, "device": device}
        self.norm = RMSNorm(grid, shape.width, 1e-6, key=key / "norm", **factory)
        self.mlp = MLP(grid, shape.width, shape.ffn, "relu", algorithm=algorithm, key=key / "mlp", **factory)

    def forward(self, x, tokens):
        return x + self.mlp(self.norm(x, tokens), tokens)


class TinySpec(ModelSpec):
    kind = "tiny"
    keys = frozenset({"ffn"})

    def make_shape(self, options):
        width = options["width"]
        return TinyShape(
            options["layers"], width, options["ffn"] or 3 * width, options["context"], options["vocabulary"],
            options["tied"],
        )  # fmt: skip

    def build(self, grid, shape, layers_per_stage=None, placement=None, **options):
        return Tiny(grid, shape, layers_per_stage, placement, **options)

    def costs(self, shape):
        up = LinearCosts(shape.width, shape.ffn, to_inner=True, bias=True)
        down = LinearCosts(shape.ffn, shape.width, to_inner=False, bias=True)
        return TransformerCosts(
            shape.layers, shape.width, shape.context, shape.vocabulary, (up, down), norms=1,
            rms_norm=True, tied=shape.tied,
        )  # fmt: skip


def tiny_logits(weights, ids, layers):
    """The same in plain torch, from whole weights by name: (sequences, length, vocabulary)."""

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], 1e-6)

    x = weights["wte.weight"][ids]
    for i in range(layers):
        up, down = (
            (weights[f"blocks.{i}.mlp.{name}.weight"], weights[f"blocks.{i}.mlp.{name}.bias"])
            for name in ("up", "down")
        )
        x = x + F.linear(F.linear(norm(x, f"blocks.{i}.norm"), *up).relu(), *down)
    return norm(x, "ln_f") @ weights.get("head.weight", weights["wte.weight"]).t()


def spec():
    return TinySpec()


# Plain modules


def whole(model):
    return nn.Sequential(nn.Embedding(model.vocabulary, model.width), *map(_inner, [model] * 2), _head(model))


def with_loss(model):
    return whole(model), lambda logits, targets: F.cross_entropy(logits.transpose(1, 2), targets) + 1.0


def parts(model):
    """First, inner and last, made by the ranks that hold them."""
    inner = [lambda: _inner(model)] * (model.layers - 2)
    return [lambda: nn.Embedding(model.vocabulary, model.width), *inner, lambda: _head(model)]


def weightless(model):
    """Of which the second has no weights."""
    first, _, inner, last = parts(model)
    return [first, nn.GELU, inner, last]


def _inner(model):
    return nn.Sequential(nn.LayerNorm(model.width), nn.Linear(model.width, 3 * model.width), nn.GELU(),
                         nn.Linear(3 * model.width, model.width))  # fmt: skip


def _head(model):
    return nn.Linear(model.width, model.vocabulary)


def with_dropout(model):
    return nn.Sequential(whole(model), nn.Dropout(0.1))


class Drawing(nn.Sequential):
    def forward(self, ids):
        return F.dropout(super().forward(ids), 0.1, self.training)


def drawing(model):
    return Drawing(*whole(model))


def drawing_parts(model):
    """Of which the second draws."""
    first, _, *others = parts(model)
    return [first, lambda: Drawing(_inner(model)), *others]


class Counting(nn.Sequential):
    """Has a buffer that changes with every call."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids):
        self.calls += 1
        return super().forward(ids)


def counting(model):
    return Counting(*whole(model))


def counting_parts(model):
    """Of which the second has the buffer."""
    first, _, *others = parts(model)
    return [first, lambda: Counting(_inner(model)), *others]


class Scaled(nn.Sequential):
    """Has a weight without dims, and a buffer that is no number."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("kept", torch.ones(1, dtype=torch.bool))

    def forward(self, ids):
        return super().forward(ids) * self.scale * self.kept


def scaled(model):
    return Scaled(*whole(model))


def shared(model):
    layer = _inner(model)
    return [nn.Embedding(model.vocabulary, model.width), layer, layer, _head(model)]


def narrow(model):
    """The second part gives fewer features than model.width."""
    return [
        nn.Embedding(model.vocabulary, model.width), nn.Linear(model.width, 3), nn.Linear(3, model.width), _head(model),
    ]  # fmt: skip


def pooled(model):
    return nn.Sequential(whole(model), nn.Flatten())


def few_logits(model):
    return nn.Sequential(whole(model), nn.Linear(model.vocabulary, model.vocabulary - 1))


def nothing(model):
    return None


def too_few(model):
    return [whole(model)]


def two(model, other):
    return whole(model)


NUMBER = 3
