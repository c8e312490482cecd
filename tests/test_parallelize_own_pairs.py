"""Pairs of linear layers that a module of many layers calls one after the other, whatever it is named."""

import functools

import pytest
import torch
import torch.nn.functional as F
from parallelize_checks import compare, held_once, numbers, tensor_grids
from torch import nn

import hpctrain as ht
from hpctrain.convert.box import BoxDown

pytestmark = pytest.mark.mpi
WIDTH, HIDDEN = 4, 9


class Layer(nn.Module):
    """As Bart's."""

    def __init__(self, drops=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act, self.drop, self.activation_dropout, self.gate = nn.GELU(), nn.Dropout(drops), drops, nn.Linear(2, 2)

    def forward(self, x):
        residual = x
        x = self.act(self.up(x))
        x = F.dropout(x, p=self.activation_dropout, training=self.training)
        x = self.down(x)
        return self.norm(residual + x)


class InOneLine(Layer):
    def forward(self, x):
        return self.norm(x + self.down(torch.tanh(self.up(x))))


class LineByLine(Layer):
    """As Albert's, in a method of its own and by several names, in a branch."""

    def forward(self, x):
        return self.norm(x + self.run(x, True))

    def run(self, x, runs):
        if runs:
            made = self.up(x)
            acted = self.drop(F.gelu(made, approximate="tanh"))
            x = self.down(acted)
        else:
            x = x + 1
        return x


def decorated(method):
    @functools.wraps(method)
    def call(*args):
        return method(*args)

    return call


class Decorated(Layer):
    forward = decorated(Layer.forward)


class Summed(Layer):
    def forward(self, x):
        added = x.clone()
        y = F.relu(self.up(x))
        added += self.down(y)
        return self.norm(added)


class Dropped(Layer):
    __init__ = functools.partialmethod(Layer.__init__, 0.2)


class DroppedInOneLine(LineByLine):
    __init__ = functools.partialmethod(Layer.__init__, 0.2)


class DroppedTwice(Layer):
    __init__ = functools.partialmethod(Layer.__init__, 0.2)

    def forward(self, x):
        y = self.drop(F.gelu(self.up(x)))
        return self.norm(self.drop(x) + self.down(y))


class DroppedOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = DroppedInOneLine()
        self.drop = self.layer.drop

    def forward(self, x):
        return self.drop(self.layer(x))


class Normed(Layer):
    def forward(self, x):
        y = self.up(x)
        y = F.softmax(y, -1)
        return self.norm(self.down(y))


class Measured(Layer):
    def forward(self, x):
        y = self.up(x)
        z = F.gelu(y)
        return self.norm(self.down(z)) + y.mean()


class MeasuredLater(Layer):
    def forward(self, x):
        mean = lambda: y.mean()  # noqa: E731
        y = self.up(x)
        return self.norm(self.down(y)) + mean()


class MeasuredBeside(Layer):
    def forward(self, x):
        y = self.up(x)
        return self.norm(self.down(y) + y.mean())


class Multiplied(Layer):
    def forward(self, x):
        y = self.up(x)
        y = F.gelu(y * y.sum(-1, keepdim=True))
        return self.norm(self.down(y))


class OfItself(Layer):
    """Its activation is another one in this method."""

    def forward(self, x):
        gelu = functools.partial(F.softmax, dim=-1)
        y = gelu(self.up(x))
        return self.norm(self.down(y))


class Twice(Layer):
    def forward(self, x):
        x = self.down(F.gelu(self.up(x)))
        return self.norm(self.down(F.gelu(self.up(x))))


class InALoop(Layer):
    def forward(self, x):
        for _ in range(2):
            x = self.down(F.gelu(self.up(x)))
        return self.norm(x)


class Another(Layer):
    """What it makes is dropped, and the layer is given something else."""

    def forward(self, x):
        other = x[..., :1].expand(*x.shape[:-1], HIDDEN)
        y = self.up(x)
        y = F.gelu(other)
        return self.norm(self.down(y))


gelu = F.gelu
TAKEN = [Layer, InOneLine, LineByLine, Decorated, Summed]
LEFT = [
    Dropped, DroppedTwice, Normed, Measured, MeasuredLater, MeasuredBeside, Multiplied, OfItself,
    Twice, InALoop, Another,
]  # fmt: skip


def stays_divided(model):
    return not model.up.leaves


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("case", [*TAKEN, DroppedInOneLine])
def test_pairs(world, case):
    for grid in tensor_grids(world):
        model = compare(case, grid, [numbers(2, 3, WIDTH)])
        held_once(model, grid)
        assert stays_divided(model)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("case", LEFT)
def test_what_is_no_pair(world, case):
    assert not stays_divided(compare(case, ht.Grid(tensor=world.size), [numbers(2, 3, WIDTH)]))


@pytest.mark.ranks(2)
def test_a_dropout_that_is_changed_later(world):
    def run(model, x):
        model.drop.p = 0.5
        return model(x)

    assert stays_divided(compare(LineByLine, ht.Grid(tensor=world.size), [numbers(2, 3, WIDTH)], run))


@pytest.mark.ranks(2)
def test_a_dropout_that_others_have_too(world):
    model = compare(DroppedOutside, ht.Grid(tensor=world.size), [numbers(2, 3, WIDTH)])
    assert not stays_divided(model.layer)


@pytest.mark.ranks(2)
def test_a_dropout_that_others_call(world):
    """Refused where it drops anything; one that is to stay whole leaves the pair alone."""
    grid = ht.Grid(tensor=world.size)
    model = ht.parallelize(DroppedInOneLine().double(), grid)
    with pytest.raises(ValueError, match=r"drop was called by itself, .* call .*run, or list 'drop' in replicate"):
        model.drop(numbers(2, 3, WIDTH))
    torch.testing.assert_close(model.eval().drop(numbers(2, 3, WIDTH)), numbers(2, 3, WIDTH))
    assert not stays_divided(compare(DroppedInOneLine, grid, [numbers(2, 3, WIDTH)], replicate=["drop"]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("case", "name"), [(InOneLine, ""), (LineByLine, "drop"), (Layer, "activation_dropout")])
def test_a_dropout_of_nothing_that_drops_later(world, case, name):
    """Its mask would be one of this rank's features. In evaluation nothing is dropped, whatever p is."""
    grid = ht.Grid(tensor=world.size)
    torch.manual_seed(0)
    model = ht.parallelize(case().double(), grid, replicate=["drop"])
    assert stays_divided(model)
    model.drop.p = model.activation_dropout = 0.5
    x = numbers(2, 3, WIDTH)
    model.eval()(x)
    model.train()
    if not name:
        model(x)
        return
    with pytest.raises(ValueError, match=f"{'p' if name == 'drop' else name}=0.5 of .* drops features before down"):
        model(x)


@pytest.mark.ranks(4)
def test_dropouts_on_a_box(world):
    model = compare(DroppedInOneLine, ht.Grid(tensor=(1, 2, 2)), [numbers(2, 3, WIDTH)], shard_activations=True)
    assert not isinstance(model.down, BoxDown)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", TAKEN)
def test_on_a_box(world, case):
    model = compare(case, ht.Grid(tensor=(1, 2, 2)), [numbers(2, 3, WIDTH)], shard_activations=True)
    assert isinstance(model.down, BoxDown)


@pytest.mark.ranks(2)
def test_hooks_that_come_later(world):
    """Would see this rank's features."""
    torch.manual_seed(0)
    model = ht.parallelize(Layer(), ht.Grid(tensor=world.size))
    model.act.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(ValueError, match="hook"):
        model(numbers(2, 3, WIDTH).float())


@pytest.mark.ranks(2)
def test_layers_that_stay_whole(world):
    for path, divided in (("norm", True), ("gate", True), ("up", False), ("down", False)):
        model = compare(Layer, ht.Grid(tensor=2), [numbers(2, 3, WIDTH)], replicate=[path])
        assert getattr(model.up, "leaves", True) != divided
