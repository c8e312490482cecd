"""Feed-forward blocks of any class are recognised by what they compute, and only those."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from parallelize_checks import compare, numbers, tensor_grids
from test_parallelize_refusals import on_every_rank
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hpctrain as ht
from hpctrain.convert.box import BoxUp
from hpctrain.shard import split_sizes

pytestmark = pytest.mark.mpi


class Block(nn.Module):
    """Linear layers `a`, `b` of 4 features to 7 and `out` back, a dropout of hidden features, one of others, a norm."""

    def __init__(self, forward, fused=1):
        super().__init__()
        self.out, self.a, self.b = nn.Linear(7, 4), nn.Linear(4, 7 * fused), nn.Linear(4, 7 * fused)
        self.inner, self.outer = nn.Dropout(0.3), nn.Dropout(0.4)
        self.kind = forward


def block(forward, fused=1, layers="a b out", **parts):
    def make():
        made = Block(None, fused)
        for name in {"a", "b", "out", "inner", "outer"} - {*layers.split(), "inner", "outer"}:
            delattr(made, name)
        for name, part in parts.items():
            made.add_module(name, part())
        made.__class__ = type("Custom", (Block,), {"forward": forward})
        return made

    return make


BLOCKS = {  # what: (module, the names of the layers that stay divided between)
    "one up": (block(lambda m, x: m.out(m.a(x).relu()), layers="a out"), ["a"]),
    "gated": (block(lambda m, x: m.out(F.silu(m.a(x)) * m.b(x))), ["a", "b"]),
    "dropouts": (block(lambda m, x: m.outer(m.out(m.inner(m.a(x).tanh()))), layers="a out"), ["a"]),
    "gate of one layer": (
        block(lambda m, x: m.out(m.a(x).chunk(2, -1)[0] * m.a(x).chunk(2, -1)[1].sigmoid()), 2, "a out"),
        ["a"],
    ),
    "of an activation of one's own": (
        block(lambda m, x: m.out(m.act(m.a(x))), layers="a out", act=lambda: nn.Softplus()),
        ["a"],
    ),
    "with the input added": (block(lambda m, x: x + m.out(m.a(x).relu()), layers="a out"), []),
    "times the input": (block(lambda m, x: m.out(m.a(x).relu()) * x, layers="a out"), ["a"]),
    "gated, times the input": (block(lambda m, x: m.out(m.a(x) * m.b(x)) * x), ["a", "b"]),
    "with its own bias twice": (block(lambda m, x: m.out(m.a(x).relu()) + m.out.bias, layers="a out"), []),
    "with hidden features that meet": (block(lambda m, x: m.out(m.a(x).softmax(-1)), layers="a out"), []),
    "with a norm of hidden features": (
        block(lambda m, x: m.out(m.norm(m.a(x))), layers="a out", norm=lambda: nn.LayerNorm(7)),
        [],
    ),
    "with a functional dropout": (block(lambda m, x: m.out(F.dropout(m.a(x), 0.2, m.training)), layers="a out"), []),
    "that adds the input in evaluation": (
        block(lambda m, x: m.out(m.a(x).relu()) + (0 if m.training else x), layers="a out"),
        [],
    ),
    "with a random activation": (block(lambda m, x: m.out(m.act(m.a(x))), layers="a out", act=lambda: nn.RReLU()), []),
    "of interleaved gates": (block(lambda m, x: m.out(m.a(x)[..., ::2] * m.a(x)[..., 1::2]), 2, "a out"), []),
    "that scales": (block(lambda m, x: m.out(m.a(x).relu()) * 2, layers="a out"), ["a"]),
    "with a weight read": (block(lambda m, x: m.out(m.a(x).relu() + m.a.weight.sum()), layers="a out"), []),
    "with a hidden bias twice": (block(lambda m, x: m.out(m.a(x).relu() + m.a.bias), layers="a out"), []),
    "of the layers in turn": (block(lambda m, x: m.out(m.b(m.out(m.a(x))))), []),
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("case", BLOCKS)
def test_blocks(world, case):
    make, divided = BLOCKS[case]
    for grid in tensor_grids(world):
        model = compare(make, grid, [numbers(2, 3, 4)])
        assert [name for name in ("a", "b") if not getattr(getattr(model, name, None), "leaves", True)] == divided


RESIDUALS = {  # of blocks that are given what they add
    "added": (block(lambda m, x, r: r + m.outer(m.out(m.a(x).relu())), layers="a out"), ["a"]),
    "normed": (block(lambda m, x, r: m.out(F.silu(m.a(x)) * m.b(x)) + F.layer_norm(r, (4,))), ["a", "b"]),
    "within": (block(lambda m, x, r: m.out(m.a(x + r).relu()), layers="a out"), []),
    "in the hidden features": (block(lambda m, x, r: m.out(m.a(x) * r.sum(-1, keepdim=True)), layers="a out"), []),
    "three": (block(lambda m, x, r, s=0.0: r + m.out(m.a(x).relu()) + s, layers="a out"), []),
}


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("case", RESIDUALS)
def test_residuals(world, case):
    make, divided = RESIDUALS[case]
    for grid in tensor_grids(world):
        model = compare(make, grid, [numbers(2, 3, 4), numbers(2, 3, 4, seed=5)])
        assert [name for name in ("a", "b") if not getattr(getattr(model, name, None), "leaves", True)] == divided


def encoder():
    return nn.TransformerEncoderLayer(4, 2, 7, dropout=0.0)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("make", "path"), [(BLOCKS["gated"][0], "b"), (encoder, "linear1"), (encoder, "linear2")])
def test_hooks_on_layers(world, make, path):
    """Registered before, they are shown what they would be; afterwards they are refused."""

    def hooked():
        made = make()
        # of squares: the sum of what a norm gives is 0 to rounding, and its sign would decide what relu lets pass
        made.get_submodule(path).register_forward_hook(lambda module, arguments, y: y * arguments[0].square().sum())
        return made

    for grid in tensor_grids(world):
        compare(hooked, grid, [numbers(2, 3, 4)])
    torch.manual_seed(3)
    model = ht.parallelize(nn.Sequential(make()), ht.Grid(tensor=world.size))
    model.get_submodule(f"0.{path}").register_forward_hook(lambda module, arguments, y: None)
    with pytest.raises(
        ValueError, match=rf"^a hook on 0\.{path}, which ht.parallelize divided together with others, wo"
    ):
        model(torch.ones(2, 3, 4))


def encoder_of_modules():
    return nn.TransformerEncoderLayer(4, 2, 7, dropout=0.1, activation=nn.GELU())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("path", ["activation", "dropout"])
def test_hooks_between_layers(world, path):
    """On what is no linear layer: the same."""
    seen = []

    def note(module, arguments, y):
        seen.append(y.shape[-1])

    def hooked():
        made = encoder_of_modules()
        made.get_submodule(path).register_forward_hook(note)
        return made

    compare(hooked, ht.Grid(tensor=world.size), [numbers(2, 3, 4)])
    assert set(seen) == {7}
    model = ht.parallelize(nn.Sequential(encoder_of_modules()), ht.Grid(tensor=world.size))
    model.get_submodule(f"0.{path}").register_forward_hook(note)
    with pytest.raises(ValueError, match=r"^a hook on .*, which ht.parallelize divided together with others, would be"):
        model(torch.ones(2, 3, 4))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("register", ["forward", "forward_pre", "full_backward"])
def test_hooks_on_all_modules(world, register):
    """Of one's own they are refused; torch's, which count, are let alone."""
    model = ht.parallelize(BLOCKS["gated"][0](), ht.Grid(tensor=world.size))
    with FlopCounterMode(display=False):
        model(torch.ones(2, 3, 4)).sum().backward()
    hook = getattr(nn.modules.module, f"register_module_{register}_hook")(lambda *given: None)
    try:
        if world.size == 1:
            model(torch.ones(2, 3, 4))
            return
        with pytest.raises(ValueError, match=r"on all modules would be shown parts of the activations"):
            model(torch.ones(2, 3, 4))
    finally:
        hook.remove()


@pytest.mark.ranks(1, 2)
def test_a_layer_exchanged_afterwards(world):
    """As LoRA does: what it adds is whole, and what it is added to is not."""
    torch.manual_seed(3)
    make, _ = BLOCKS["gated"]
    model = ht.parallelize(nn.Sequential(make()), ht.Grid(tensor=world.size))
    model[0].a = nn.Sequential(model[0].a)
    with pytest.raises(
        ValueError, match="^layers of 0, which ht.parallelize divided together, were exchanged or added"
    ):
        model(torch.ones(2, 4))


README = Path(ht.__file__).parent / "convert/README.md"


@pytest.fixture
def rules(monkeypatch):
    made = {}
    monkeypatch.setattr("hpctrain.convert.rules._RULES", made)
    return made


@pytest.fixture
def attention(rules):
    """That of the README, whose rule is registered."""
    blocks = README.read_text(encoding="utf-8").split("```python")
    (program,) = (block for block in blocks if "ht.register_rule(" in block)
    names = {"nn": nn, "torch": torch, "ht": ht}
    exec(program.partition("```")[0], names)
    return names["Attention"]


@pytest.mark.ranks(1, 2, 3, 4)
def test_rule(world, attention):
    for grid in tensor_grids(world):
        model = compare(lambda: nn.Sequential(nn.Linear(8, 8), attention()), grid, [numbers(2, 5, 8)])
        assert model[1].heads == split_sizes(3, world.size)[grid.tensor.rank]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("split", "text"),
    [
        (lambda a: None, r"its rule must give an hpctrain\.convert\.Split, got None"),
        (lambda a: ht.convert.Split([a.qkv], []), "must name nn.Linear layers as columns and as rows"),
        (lambda a: ht.convert.Split([a.qkv], [a.back], unit=5), "12 features in units of 5, which do not divide"),
        (lambda a: ht.convert.Split([a.qkv], [a.back], unit=0), "units of at least 1 feature, got unit=0"),
        (lambda a: ht.convert.Split([a.qkv], [a.back], 2, ["heads"]), "says that heads is 6, the number of units"),
        (lambda a: ht.convert.Split([a.qkv], [a.back, a.qkv]), "rows that do not all take 12 features"),
        (lambda a: ht.convert.Split([a.qkv], [a.back], dropouts=[a.qkv]), "nn.Dropout layers as dropouts"),
    ],
)
def test_rules_that_do_not_fit(world, attention, rules, split, text):
    rules[attention] = split
    on_every_rank(world, lambda: nn.Sequential(attention()), rf"divide 0 \(Attention\): .*{text}")


@pytest.mark.ranks(1, 2)
def test_rules_that_leave_weights_out(world, attention):
    def make():
        made = attention()
        made.gate = nn.Linear(2, 2)
        return made

    on_every_rank(world, make, r"itself \(Attention\): its rule does not say what becomes of gate\.weight")


@pytest.mark.ranks(1)
def test_registering(attention):
    with pytest.raises(ValueError, match="kind must be a type of modules, got 'Attention'"):
        ht.register_rule("Attention", lambda module: None)
    with pytest.raises(ValueError, match="Attention has a rule already"):
        ht.register_rule(attention, lambda module: None)


class GatedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 14)

    def forward(self, x):
        x, gate = self.proj(x).chunk(2, -1)
        return x * F.gelu(gate)


class Deep(nn.Module):
    """As the feed-forward blocks of diffusers, whose layers are called in turn."""

    __module__ = "diffusers.models.attention"

    def __init__(self, first=GatedLayer, p=0.2):
        super().__init__()
        self.net = nn.ModuleList([first(), *[nn.Dropout(p)] * (p > 0), nn.Linear(7, 4), nn.Dropout(0.1)])

    def forward(self, x, *arguments, **options):
        for module in self.net:
            x = module(x)
        return x


class NormedLayer(GatedLayer):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(7)

    def forward(self, x):
        return self.norm(super().forward(x))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(("first", "divided"), [(GatedLayer, True), (NormedLayer, False)])
def test_layers_of_layers(world, first, divided):
    for grid in tensor_grids(world):
        model = compare(lambda: Deep(first), grid, [numbers(2, 3, 4)])
        assert model.net[0].proj.leaves != divided


@pytest.mark.ranks(4)
def test_layers_of_layers_on_a_box(world):
    model = compare(lambda: Deep(p=0.0), ht.Grid(tensor=(1, 2, 2)), [numbers(2, 3, 4)], shard_activations=True)
    assert isinstance(model.net[0].proj, BoxUp)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("path", ["net.0", "net.1", "net.0.proj"])
def test_hooks_on_layers_of_layers(world, path):
    model = ht.parallelize(nn.Sequential(Deep(), nn.LayerNorm(4)), ht.Grid(tensor=2))
    model[0].get_submodule(path).register_forward_hook(lambda module, arguments, y: None)
    with pytest.raises(ValueError, match=r"^a hook on .* which ht.parallelize divided together with others, would be"):
        model(torch.ones(2, 3, 4))


@pytest.mark.ranks(2)
def test_arguments_that_nobody_knows(world):
    model = ht.parallelize(nn.Sequential(Deep(), nn.LayerNorm(4)), ht.Grid(tensor=2), check_steps=0)
    model[0](torch.ones(2, 3, 4), scale=None)
    for given, named in (((2.0,), {}), ((), {"scale": 2.0})):
        with pytest.raises(ValueError, match="0 of a parallelized model takes no arguments but x; list it in rep"):
            model[0](torch.ones(2, 3, 4), *given, **named)
