"""Feed-forward pairs of BERT's kind, in two modules that a third hands on from one to the other."""

import types

import pytest
from parallelize_checks import compare, held_once, numbers, tensor_grids
from torch import nn

import hpctrain as ht
from hpctrain.convert.box import BoxDown

pytestmark = pytest.mark.mpi
WIDTH, HIDDEN = 4, 9


class Intermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.act = nn.Linear(WIDTH, HIDDEN), nn.GELU()

    def forward(self, x):
        return self.act(self.dense(x))


class Dropped(Intermediate):
    def __init__(self):
        super().__init__()
        self.act = nn.Dropout(0.2)


class Drawn(Intermediate):
    def forward(self, x):
        return nn.functional.dropout(self.dense(x), 0.2, self.training)


class Met(Intermediate):
    def forward(self, x):
        return self.dense(x).softmax(-1)


class AcrossTokens(Intermediate):
    def forward(self, x):
        return self.dense(x) - self.dense(x).mean(1, keepdim=True)


class KeepsMade(Intermediate):
    def forward(self, x):
        self.kept = self.dense(x)
        return self.act(self.kept)


class Output(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm, self.drop = nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.3)

    def forward(self, hidden, residual):
        return self.norm(self.drop(self.dense(hidden)) + residual)


class Normed(Output):
    def __init__(self):
        super().__init__()
        self.before = nn.LayerNorm(HIDDEN)

    def forward(self, hidden, residual):
        return super().forward(self.before(hidden), residual)


class Remembered(Output):
    def forward(self, hidden, residual):
        return super().forward(hidden, residual) + hidden.mean(-1, keepdim=True)


class KeepsGiven(Output):
    def forward(self, hidden, residual):
        self.kept = hidden
        return super().forward(hidden, residual)


class Layer(nn.Module):
    def __init__(self, intermediate=Intermediate, output=Output):
        super().__init__()
        self.intermediate, self.output = intermediate(), output()

    def forward(self, x):
        made = self.intermediate(x)
        x = self.output(made, x)
        return x


class OneName(Layer):
    def forward(self, x):
        residual = x
        x = self.intermediate(x)
        x = self.output(x, residual)
        return 2 * x


class InAMethod(Layer):
    def forward(self, x):
        return self.run(x)

    def run(self, x):
        made = self.intermediate(x)
        return self.output(made, x)


class Between(Layer):
    def forward(self, x):
        made = self.intermediate(x)
        made = made.cumsum(-1)
        return self.output(made, x)


class Twice(Layer):
    def forward(self, x):
        made = self.intermediate(x)
        x = self.output(made, x)
        return x + made.mean()


class Both(Layer):
    def forward(self, x):
        made = self.intermediate(x)
        made = self.output(made, self.intermediate(x)[..., :WIDTH])
        return made


class Again(Layer):
    def forward(self, x):
        for _ in range(2):
            made = self.intermediate(x)
            x = self.output(made, x)
        return x


class Elsewhere(Layer):
    def forward(self, x):
        made = self.intermediate(x)  # noqa: F841
        x = self.output(x[..., :1].expand(*x.shape[:-1], HIDDEN), x)
        return x


class OfAnHeir(InAMethod):
    pass


TAKEN = {"a layer": Layer, "of one name": OneName, "in a method": InAMethod, "of an heir": OfAnHeir}
LEFT = {
    **{kind.__name__: lambda kind=kind: Layer(kind) for kind in (Dropped, Drawn, Met, KeepsMade)},
    **{kind.__name__: lambda kind=kind: Layer(output=kind) for kind in (Normed, Remembered, KeepsGiven)},
    **{kind.__name__: kind for kind in (Between, Twice, Both, Again, Elsewhere)},
}


def stays_divided(model):
    return not model.intermediate.dense.leaves


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("case", TAKEN)
def test_pairs(world, case):
    for grid in tensor_grids(world):
        model = compare(TAKEN[case], grid, [numbers(2, 3, WIDTH)])
        held_once(model, grid)
        assert stays_divided(model)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("case", LEFT)
def test_what_is_no_pair(world, case):
    grid = ht.Grid(tensor=world.size)
    assert not stays_divided(compare(LEFT[case], grid, [numbers(2, 3, WIDTH)]))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("intermediate", [Intermediate, AcrossTokens])
def test_on_a_box(world, intermediate):
    """Each rank has some tokens between the layers, unless tokens meet there."""
    grid = ht.Grid(tensor=(1, 2, 2))
    model = compare(lambda: Layer(intermediate), grid, [numbers(2, 3, WIDTH)], shard_activations=True)
    assert isinstance(model.output.dense, BoxDown) == (intermediate is Intermediate)


@pytest.mark.ranks(2)
def test_bytes(world):
    """One sum forward, of the output, and one backward, of the gradient of the input."""
    grid = ht.Grid(tensor=world.size)
    model = ht.parallelize(Layer().eval(), grid, check_steps=0)
    x = numbers(5, 2, WIDTH).float().requires_grad_()
    model(x).sum().backward()
    grid.transport.traffic.clear()
    model(x).sum().backward()
    assert grid.transport.traffic.total("received") == 2 * 2 * 10 * WIDTH * 4 // world.size


@pytest.mark.ranks(2)
@pytest.mark.parametrize("path", ["intermediate", "intermediate.act"])
def test_hooks_that_come_later(world, path):
    """Would see this rank's features."""
    model = ht.parallelize(Layer(), ht.Grid(tensor=world.size))
    model.get_submodule(path).register_forward_hook(lambda module, args, output: None)
    with pytest.raises(ValueError, match="hook"):
        model(numbers(2, 3, WIDTH).float())


@pytest.mark.ranks(2)
def test_a_method_of_an_object(world):
    """Nobody knows what it does with what lies between."""

    def forward(layer, x):
        made = layer.intermediate(x)
        return layer.output(made, x) + made.mean()

    def make():
        layer = InAMethod()
        layer.run = types.MethodType(forward, layer)
        return layer

    assert not stays_divided(compare(make, ht.Grid(tensor=2), [numbers(2, 3, WIDTH)]))


@pytest.mark.ranks(2)
def test_one_that_stays_whole(world):
    make = lambda: nn.Sequential(nn.LayerNorm(WIDTH), Layer())  # noqa: E731
    model = compare(make, ht.Grid(tensor=2), [numbers(2, 3, WIDTH)], replicate=["1.output.norm"])
    assert stays_divided(model[1])
    model = compare(make, ht.Grid(tensor=2), [numbers(2, 3, WIDTH)], replicate=["1.output.dense"])
    assert not stays_divided(model[1])
