"""Conv2d against torch.nn.Conv2d with whole weights, on every tensor grid of the ranks there are."""

import math

import pytest
import torch
from image_checks import DOUBLE, KEY, block, check, tensor_grids, whole

from hpctrain import Grid
from hpctrain.layers import Conv2d

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4, 6)]


@pytest.fixture(scope="module")
def grids(world):
    return tensor_grids(world)


# in_channels, out_channels, image height and width, options
CASES = {
    "plain": (4, 8, (8, 8), {"kernel_size": 3, "padding": 1}),
    "kernel 1": (5, 3, (7, 4), {"kernel_size": 1}),
    "kernel 2": (3, 2, (9, 5), {"kernel_size": 2, "bias": False}),
    "kernel 5": (2, 3, (6, 7), {"kernel_size": 5, "padding": 2}),
    "gathered": (2, 9, (5, 6), {"kernel_size": 3, "padding": 1}),
    "stride 2": (3, 7, (11, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "stride 3, kernel 2": (4, 4, (10, 9), {"kernel_size": 2, "stride": 3}),
    "dilation": (3, 4, (9, 8), {"kernel_size": 3, "dilation": 2, "padding": 2}),
    "pairs": (3, 4, (9, 8), {"kernel_size": (5, 2), "stride": (1, 2), "padding": (3, 1), "dilation": (2, 1)}),
    "two rows": (3, 3, (2, 5), {"kernel_size": 3, "padding": 1}),
    "one row": (3, 4, (1, 3), {"kernel_size": 5, "padding": 2}),
    "one row made of five": (3, 4, (5, 5), {"kernel_size": 5}),
    "more padding than image": (2, 2, (2, 2), {"kernel_size": 3, "padding": 4, "stride": 2}),
    "one channel": (1, 1, (6, 6), {"kernel_size": 3}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [3, 1])
def test_against_torch(grids, case, batch):
    n_in, n_out, size, options = CASES[case]
    for grid in grids:
        ours = Conv2d(grid, n_in, n_out, **options, key=KEY, **DOUBLE)
        check(grid, ours, torch.nn.Conv2d(n_in, n_out, **options), (batch, n_in, *size))


@pytest.mark.parametrize(("n_in", "n_out", "groups"), [(8, 16, 8), (5, 5, 5), (16, 32, 8), (3, 3, 3)])
def test_groups(grids, n_in, n_out, groups):
    for grid in grids:
        options = {"kernel_size": 3, "padding": 1, "groups": groups}
        if groups % grid.tensor.x.size == 0 or groups == n_in == n_out:  # whole groups on every rank of x
            grid.transport.traffic.clear()
            ours = Conv2d(grid, n_in, n_out, **options, key=KEY, **DOUBLE)
            check(grid, ours, torch.nn.Conv2d(n_in, n_out, **options), (2, n_in, 6, 5))
            assert grid.transport.traffic.total("received", axes=("x",)) == 0


@pytest.mark.parametrize("case", ["gathered", "stride 2"])
def test_by_messages(grids, case):
    """As between nodes, where there is no shared memory; sends that wait for their receiver must not deadlock."""
    n_in, n_out, size, options = CASES[case]
    for box in (tuple(grid.shape[axis] for axis in "xyz") for grid in grids):
        grid = Grid(tensor=box)
        grid.transport.synchronous = True
        for axes in ("x",), ("y",), ("y", "z"):
            grid.plane(*axes).one_node = False
        ours = Conv2d(grid, n_in, n_out, **options, key=KEY, **DOUBLE)
        check(grid, ours, torch.nn.Conv2d(n_in, n_out, **options), (3, n_in, *size))


@pytest.mark.ranks(1, 2)
def test_gradcheck(world):
    """On one rank, where finite differences of the whole function can be taken."""
    grid = Grid(comm=world.Split(world.rank))
    layer = Conv2d(grid, 2, 3, 3, stride=2, padding=1, key=KEY, **DOUBLE)

    def function(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    arguments = whole((2, 2, 4, 5)).requires_grad_(), layer.weight, layer.bias
    assert torch.autograd.gradcheck(function, arguments)


def test_finite_differences_over_ranks(grids):
    """The derivative along one direction of everything, without torch's convolution as the judge of backward."""
    for grid in grids:
        layer = Conv2d(grid, 3, 4, 3, stride=2, padding=1, key=KEY, **DOUBLE)
        x = block(grid, whole((2, 3, 7, 5))).requires_grad_()
        leaves = [x, layer.weight, layer.bias]
        steps = [
            block(grid, whole((2, 3, 7, 5), "dx")),
            *(whole(p.shard.global_shape, "dp")[p.shard.slices] for p in leaves[1:]),
        ]

        (layer(x) ** 3).sum().backward()
        # every rank that holds a parameter has a summand of its gradient, and all take the same step
        slope = sum(float((leaf.grad.as_subclass(torch.Tensor) * step).sum()) for leaf, step in zip(leaves, steps))
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for leaf, step in zip(leaves, steps):
                    leaf += sign * 1e-5 * step
                values.append(grid.comm.allreduce(float((layer(x) ** 3).sum())))
                for leaf, step in zip(leaves, steps):
                    leaf -= sign * 1e-5 * step
        assert grid.comm.allreduce(slope) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-7)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(("n_in", "n_out", "gathered"), [(16, 16, False), (8, 32, True)])
def test_bytes_equal_the_formula(grids, n_in, n_out, gathered):
    batch, height, width, kernel = 8, 16, 4, 3
    for grid in grids:
        px, py, pz = (grid.shape[axis] for axis in "xyz")
        layer = Conv2d(grid, n_in, n_out, kernel, padding=1, bias=False, key=KEY, **DOUBLE)
        assert (layer.source is not None) == gathered
        x = block(grid, whole((batch, n_in, height, width))).requires_grad_()
        grid.transport.traffic.clear()
        y = layer(x)
        y.backward(torch.ones_like(y))

        n, h = batch // pz, height // py
        r = (grid.coords["y"] > 0) + (grid.coords["y"] < py - 1)  # one row from each neighbour
        reached = h + 2 * (py > 1)  # with the zeros above and below, where the halo brings them
        elements = {
            "y": 3 * n * (n_in // px) * r * width + (py - 1),
            "x": (px - 1) * (3 * n * n_in * reached if gathered else 2 * n * n_out * h) // px * width,
            "y+z": 3 * (1 - 1 / (py * pz)) * n_in * n_out * kernel**2 / px,
        }
        for axis, expected in elements.items():
            assert grid.transport.traffic.total("received", axes=(axis,)) == 8 * expected, (grid.shape, axis)
        assert grid.transport.traffic.total("received") == 8 * sum(elements.values())


def test_every_element_of_a_weight_lives_on_one_rank(grids):
    for grid in grids:
        for layer in (Conv2d(grid, 4, 16, 3, key=KEY), Conv2d(grid, 16, 5, (3, 2), key=KEY)):
            shard = layer.weight.shard
            assert layer.weight.shape == shard.shape
            count = torch.zeros(shard.global_shape)
            for slices in grid.comm.allgather(shard.slices):
                count[slices] += 1
            assert torch.equal(count, torch.ones_like(count))


def test_weights_do_not_depend_on_the_grid(grids, world):
    alone = Conv2d(Grid(comm=world.Split(world.rank)), 3, 5, (3, 2), key=KEY)
    for grid in grids:
        layer = Conv2d(grid, 3, 5, (3, 2), key=KEY)
        assert torch.equal(layer.weight, alone.weight[layer.weight.shard.slices])
    assert alone.weight.std().item() == pytest.approx(math.sqrt(1 / (3 * 3 * 3 * 2)), rel=0.3)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": 0}, "kernel_size must be an integer of at least 1, or a pair of them, got 0"),
        ({"kernel_size": 3, "stride": (1, 2, 3)}, "stride must be an integer of at least 1, or a pair"),
        ({"kernel_size": 3, "padding": "same"}, "padding must be an integer of at least 0, or a pair of them, got 's"),
        ({"kernel_size": 3, "groups": 3}, r"groups must be a positive integer that divides in_channels \(4\)"),
    ],
)
def test_bad_options(world, options, message):
    with pytest.raises(ValueError, match=message):
        Conv2d(Grid(tensor=world.size), 4, 6, key=KEY, **options)


@pytest.mark.ranks(2, 3, 4, 6)
def test_groups_cut_by_the_grid_are_refused(world):
    with pytest.raises(ValueError, match=f"groups must leave whole groups on each of the {world.size} ranks of x, got"):
        Conv2d(Grid(tensor=world.size), 15, 30, 3, groups=3 if world.size != 3 else 5, key=KEY)


@pytest.mark.ranks(1, 2)
def test_images_that_do_not_fit_are_refused(world):
    grid = Grid(tensor=(1, world.size, 1))
    layer = Conv2d(grid, 1, 1, 5, key=KEY)
    with pytest.raises(ValueError, match=r"kernel_size \(5, 5\) .* does not fit images whose height is 4; use larger"):
        layer(block(grid, torch.zeros(1, 1, 4, 9)))
    if world.size > 1:
        with pytest.raises(ValueError, match="images must be spread over y by image_block"):
            layer(torch.zeros(1, 1, 10 + world.rank, 9))
