"""Units with a part exchanged: nothing is taken over that does more than what torch put there."""

import copy

import pytest
import torch
import torch.nn.functional as F
from parallelize_checks import compare, numbers, tensor_grids
from torch import nn

import hpctrain as ht

pytestmark = pytest.mark.mpi


class Adapted(nn.Module):
    """A layer with another beside it, as LoRA puts into the place of one."""

    def __init__(self, base, inner, outer):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(inner, 2), nn.Linear(2, outer)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Magnitude(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.norm(dim=1) + 0.3)


class Dora(nn.Module):
    """As peft's DoRA: it reads the whole weight and bias of the layer, and of those beside it the product."""

    def __init__(self, base):
        super().__init__()
        self.base, self.magnitude = base, Magnitude(base.weight.detach())
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        eye = torch.eye(self.down.weight.shape[1], dtype=self.down.weight.dtype)
        norm = torch.linalg.norm(self.base.weight + self.up(self.down(eye)).T.detach(), dim=1).detach()
        scale = (self.magnitude.weight / norm).view(1, -1)
        result = self.base(x)
        return result + (scale - 1) * (result - self.base.bias) + scale * self.up(self.down(x))


class Doubled(nn.Dropout):
    def forward(self, x):
        return 2 * super().forward(x)


EXCHANGED = {
    "activation of all features": lambda: {"activation": lambda x: x.softmax(-1)},
    "activation with a weight": lambda: {"activation": nn.PReLU()},
    "first": lambda: {"linear1": Adapted(nn.Linear(12, 17), 12, 17)},
    "second": lambda: {"linear2": Adapted(nn.Linear(17, 12), 17, 12)},
    "first, as by DoRA": lambda: {"linear1": Dora(nn.Linear(12, 17))},
    "both, as by DoRA": lambda: {"linear1": Dora(nn.Linear(12, 17)), "linear2": Dora(nn.Linear(17, 12))},
    "dropout": lambda: {"dropout": Doubled(0.2)},
    "no dropout": lambda: {"dropout": nn.Identity()},
}


@pytest.mark.parametrize("case", EXCHANGED)
def test_encoder_layer_with_a_part_exchanged(world, case):
    def make():
        layer = nn.TransformerEncoderLayer(12, 3, 17)
        for name, part in EXCHANGED[case]().items():
            setattr(layer, name, part)
        return layer

    for grid in tensor_grids(world):
        compare(make, grid, [numbers(5, 2, 12)])


def test_weights_computed_from_others(world):
    """They are left whole, be it by themselves."""

    def make():
        return nn.Sequential(nn.Linear(4, 5), nn.utils.spectral_norm(nn.Linear(5, 3)), nn.Linear(3, 2))

    for grid in tensor_grids(world):
        for replicate in ([], ["1"]):
            compare(make, grid, [numbers(2, 4)], replicate=replicate)


class Feed(nn.Module):
    """A block of its own, whose function may drop hidden features."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.act, self.p = nn.Linear(12, 17), nn.Linear(17, 12), F.gelu, 0.0

    def forward(self, x):
        return self.down(F.dropout(self.act(self.up(x)), self.p, self.training))


class Named(Feed):
    """Whose chance nobody can read."""

    def forward(self, x):
        options = {"p": self.p, "training": self.training}
        return self.down(F.dropout(self.act(self.up(x)), **options))


class Outside(Feed):
    """Whose outputs are dropped too, by a module."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(super().forward(x))


class LocalName(Feed):
    """One chance can be read, the other cannot."""

    def forward(self, x):
        p = self.p
        hidden = F.dropout(self.act(self.up(x)), p, self.training)
        return F.dropout(self.down(hidden), self.p, self.training)


class Shared(nn.Module):
    """One dropout of hidden features and of outputs, as in Swin's blocks."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(12, 17), nn.Linear(17, 12), nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(self.down(self.drop(F.gelu(self.up(x)))))


class SharedFirst(Shared):
    def forward(self, x):
        return self.down(self.drop(F.gelu(self.up(self.drop(x)))))


class Pair(Feed):
    """A pair beside something else."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        return self.norm(x + self.down(F.dropout(self.act(self.up(x)), self.p, self.training)))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.act, self.p = nn.Linear(12, 17), F.gelu, 0.0

    def forward(self, x):
        return F.dropout(self.act(self.dense(x)), self.p, self.training)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(17, 12), nn.LayerNorm(12)

    def forward(self, x, residual):
        return self.norm(self.dense(x) + residual)


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.intermediate, self.output = Inner(), Outer()

    def forward(self, x):
        made = self.intermediate(x)
        return self.output(made, x)


def softmax(x):
    return x.softmax(-1)


def layer():
    return nn.TransformerEncoderLayer(12, 3, 17, dropout=0.0)


LATER = {
    "activation of an encoder layer": (layer, "", {"activation": softmax}),
    "dropout of an encoder layer": (layer, "", {"dropout": nn.Dropout(0.5)}),
    "second of an encoder layer": (layer, "", {"linear2": Adapted(nn.Linear(17, 12), 17, 12)}),
    "activation of a block": (Feed, "", {"act": softmax}),
    "activation beside others": (Pair, "", {"act": softmax}),
    "second beside others": (Pair, "", {"down": nn.Linear(17, 12)}),
    "activation of BERT's kind": (Bert, "intermediate", {"act": softmax}),
    "first of BERT's kind": (Bert, "", {"intermediate": Inner()}),
    "second of BERT's kind": (Bert, "output", {"dense": nn.Linear(17, 12)}),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", LATER)
def test_parts_exchanged_afterwards(world, case):
    """They would meet parts of activations."""
    make, path, parts = LATER[case]
    torch.manual_seed(0)
    model = ht.parallelize(make(), ht.Grid(tensor=world.size))
    x = torch.ones(5, 2, 12)
    model(x)
    for name, part in parts.items():
        setattr(model.get_submodule(path), name, copy.deepcopy(part))
    with pytest.raises(ValueError, match="exchanged"):
        model(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("make", "path"), [(Feed, ""), (Pair, ""), (Bert, "intermediate")])
def test_functions_that_drop_later(world, make, path):
    """Each rank would draw the mask of its features. In evaluation nothing is dropped."""
    torch.manual_seed(0)
    model = ht.parallelize(make(), ht.Grid(tensor=world.size))
    x = torch.ones(5, 2, 12)
    model(x)
    model.get_submodule(path).p = 0.5
    model.eval()(x)
    with pytest.raises(ValueError, match=r"p=0.5 of \w+ drops features before \w*"):
        model.train()(x)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("make", "divided"), [(Named, False), (LocalName, False), (Outside, True), (Shared, False), (SharedFirst, False)]
)
def test_dropouts_in_blocks(world, make, divided):
    """Blocks whose chances nobody can read, or whose dropout is used twice, are left to their layers."""
    model = compare(make, ht.Grid(tensor=world.size), [numbers(5, 2, 12)])
    assert getattr(model.up, "leaves", True) != divided


@pytest.mark.ranks(2)
def test_a_dropout_of_outputs_that_drops_later(world):
    """Its features are whole, whatever its p is when the block is divided."""

    def make():
        model = Outside()
        model.drop.p = 0.0
        return model

    def run(model, x):
        model.drop.p = 0.3
        return model(x)

    assert not compare(make, ht.Grid(tensor=world.size), [numbers(5, 2, 12)], run).up.leaves
