"""BatchNorm2d against torch.nn.BatchNorm2d, on every grid of the ranks there are, replicas included."""

import pytest
import torch
from image_checks import DOUBLE, KEY, assembled, block, check, close, tensor_grids, whole

from hpctrain import Grid
from hpctrain.grid_shape import all_grids
from hpctrain.layers import BatchNorm2d
from hpctrain.shard import split

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def grids(world):
    return tensor_grids(world)


def same_running_statistics(ours, theirs):
    part = ours.shard.slices
    close(ours.running_mean, theirs.running_mean[part])
    close(ours.running_var, theirs.running_var[part])
    assert ours.num_batches_tracked == theirs.num_batches_tracked


@pytest.mark.parametrize(
    ("shape", "momentum"), [((4, 8, 8, 3), 0.1), ((3, 5, 2, 4), None), ((2, 1, 1, 1), 0.1), ((1, 3, 5, 1), 0.3)]
)
def test_training_and_evaluation(grids, shape, momentum):
    for grid in grids:
        ours = BatchNorm2d(grid, shape[1], eps=1e-3, momentum=momentum, key=KEY, **DOUBLE)
        theirs = torch.nn.BatchNorm2d(shape[1], eps=1e-3, momentum=momentum)
        for _ in range(2):
            ours.zero_grad()
            theirs.zero_grad()
            theirs = check(grid, ours, theirs, shape)
            same_running_statistics(ours, theirs)
        ours.zero_grad()
        theirs.zero_grad()
        check(grid, ours.eval(), theirs.eval(), shape)
        same_running_statistics(ours, theirs)


def test_large_mean(grids):
    """A sum of squares would lose all digits of the variance."""
    for grid in grids:
        ours = BatchNorm2d(grid, 3, key=KEY, **DOUBLE)
        x = whole((4, 3, 8, 2)) + 1e8
        expected = torch.nn.BatchNorm2d(3).double()(x).detach()
        torch.testing.assert_close(ours(block(grid, x)).detach(), block(grid, expected), rtol=1e-6, atol=1e-6)


def test_replicas(world):
    """The batch is cut over the data axis, then over z: the statistics are those of all of it."""
    for data, pipeline, box in all_grids(world.size):
        if pipeline > 1:
            continue
        grid = Grid(data, pipeline, box)
        mine = split(7, grid.data.size, grid.data.rank)
        ours = BatchNorm2d(grid, 4, key=KEY, **DOUBLE)
        theirs = torch.nn.BatchNorm2d(4).double()
        x, seed = whole((7, 4, 3, 2)).requires_grad_(), whole((7, 4, 3, 2), "seed")
        expected = theirs(x)
        expected.backward(seed)
        held = block(grid, x[mine]).requires_grad_()
        y = ours(held)
        close(y, block(grid, expected[mine]))
        same_running_statistics(ours, theirs)
        y.backward(block(grid, seed[mine]))
        close(held.grad, block(grid, x.grad[mine]))
        close(assembled(grid, ours.shard, ours.weight.grad), theirs.weight.grad)
        close(assembled(grid, ours.shard, ours.bias.grad), theirs.bias.grad)


@pytest.mark.ranks(1, 2)
def test_gradcheck(world):
    layer = BatchNorm2d(Grid(comm=world.Split(world.rank)), 2, key=KEY, **DOUBLE)

    def function(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    inputs = whole((2, 2, 2, 3)).requires_grad_(), layer.weight, layer.bias
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_sixteen_bits(grids):
    """Statistics in float32: bfloat16's eight bits cannot hold a count or a sum."""
    x = whole((4, 2, 16, 16)).bfloat16()
    expected = torch.nn.functional.batch_norm(x.float(), None, None, training=True)
    for grid in grids:
        layer = BatchNorm2d(grid, 2, key=KEY)
        y = layer(block(grid, x).requires_grad_())
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), block(grid, expected), rtol=1e-2, atol=1e-2)
        y.sum().backward()


def test_bytes(world):
    for data, pipeline, box in all_grids(world.size):
        if pipeline > 1:
            continue
        grid = Grid(data, pipeline, box)
        layer = BatchNorm2d(grid, 8, key=KEY, **DOUBLE)
        x = block(grid, whole((8, 8, 8, 2))).requires_grad_()
        grid.transport.traffic.clear()
        y = layer(x)
        y.backward(torch.ones_like(y))
        channels = 8 // box[0]
        for axis, p in (("y+z", box[1] * box[2]), ("data", data)):
            elements = 2 * (p - 1) / p * (2 * channels + 1) + 2 * (p - 1) / p * 2 * channels
            assert grid.transport.traffic.total("received", axes=(axis,)) == 8 * elements
        assert grid.transport.traffic.total("received", axes=("x", "y", "z")) == 0


@pytest.mark.ranks(1, 2)
def test_one_number_a_channel_is_refused(world):
    grid = Grid(tensor=(1, 1, world.size))
    layer = BatchNorm2d(grid, 2, key=KEY)
    with pytest.raises(ValueError, match="more than one number a channel in training, got 1"):
        layer(block(grid, torch.zeros(1, 2, 1, 1)))
    assert layer.num_batches_tracked == 0
    layer.eval()(block(grid, torch.zeros(1, 2, 1, 1)))
