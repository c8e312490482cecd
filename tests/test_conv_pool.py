"""Pooling and flattening against torch's, on every tensor grid of the ranks there are."""

import warnings

import pytest
import torch
from image_checks import assembled, block, check, close, tensor_grids, whole

from hpctrain import Grid
from hpctrain.layers import AdaptiveAvgPool2d, AvgPool2d, Flatten, MaxPool2d, Tokens
from hpctrain.shard import Shard, split, subsplit

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def grids(world):
    return tensor_grids(world)


WINDOWS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 1, "padding": 1},
    {"kernel_size": 1, "stride": 3},
    {"kernel_size": (4, 2), "stride": (1, 3), "padding": (2, 1)},
]
SIZES = [(8, 8), (11, 6), (4, 5)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", [*WINDOWS, {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": (1, 2)}])
def test_max(grids, window, size):
    for grid in grids:
        # far below zero: a padding of zeros would win
        check(grid, MaxPool2d(grid, **window), torch.nn.MaxPool2d(**window), (3, 5, *size), offset=-100.0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("pads", [True, False])
def test_average(grids, window, size, pads):
    for grid in grids:
        options = {**window, "count_include_pad": pads}
        check(grid, AvgPool2d(grid, **options), torch.nn.AvgPool2d(**options), (3, 5, *size))


@pytest.mark.parametrize("size", [*SIZES, (1, 1)])
@pytest.mark.parametrize("output", [1, (3, 2), 7])
def test_adaptive(grids, output, size):
    for grid in grids:
        check(grid, AdaptiveAvgPool2d(grid, output), torch.nn.AdaptiveAvgPool2d(output), (3, 5, *size))


@pytest.mark.parametrize("make", [MaxPool2d, AvgPool2d, lambda *window: AvgPool2d(*window, count_include_pad=False)])
def test_images_smaller_than_the_window_are_refused(grids, make):
    for grid in grids:
        for size, dim in [((9, 3), "width is 3"), ((3, 9), "height is 3")]:
            with pytest.raises(
                ValueError, match=rf"kernel_size \(4, 4\) .* does not fit images whose {dim}; use larger"
            ):
                make(grid, 4)(block(grid, torch.zeros(3, 5, *size)))


@pytest.mark.parametrize(("size", "dim"), [((1, 5), "height is 1"), ((5, 1), "width is 1")])
def test_windows_of_padding_alone_are_refused(grids, size, dim):
    """Beside images narrower than the dilation; the backward of torch's own writes past the gradient there."""
    for grid in grids:
        layer = MaxPool2d(grid, 2, padding=1, dilation=2)
        with pytest.raises(ValueError, match=f"has a window of padding alone in images whose {dim}; use larger images"):
            layer(block(grid, torch.zeros(3, 5, *size)))


def test_bytes(grids):
    n, channels, height, width = 8, 8, 16, 6
    for grid in grids:
        px, py, pz = (grid.shape[axis] for axis in "xyz")
        row = n // pz * channels // px * width
        above, below = grid.coords["y"] > 0, grid.coords["y"] < py - 1
        for layer, elements in (
            (MaxPool2d(grid, 2), 0),  # the windows lie on the rows of one rank
            (MaxPool2d(grid, 3, 2, 1), row * (above + below)),  # a row from above, its gradient from below
            (AvgPool2d(grid, 3, 1, 1), 2 * row * (above + below)),
            (AdaptiveAvgPool2d(grid, 8), 2 * (py - 1) * row * 8 // width * 8 // py),
        ):
            x = block(grid, whole((n, channels, height, width))).requires_grad_()
            grid.transport.traffic.clear()
            y = layer(x)
            y.backward(torch.ones_like(y))
            assert grid.transport.traffic.total("received") == 8 * (elements + py - 1), (grid.shape, layer)
            assert grid.transport.traffic.total("received") == grid.transport.traffic.total("received", axes=("y",))


@pytest.mark.parametrize("shape", [(4, 4, 4, 3), (3, 5, 2, 2), (2, 3, 1, 1), (1, 7, 5, 2)])
def test_flatten(grids, shape):
    batch, channels, height, width = shape
    features = channels * height * width
    for grid in grids:
        t = grid.tensor
        expected = whole(shape).flatten(1)
        rows = subsplit(split(batch, t.z.size, t.z.rank), t.x.size, t.x.rank)
        residual = rows, split(features, t.y.size, t.y.rank)
        assert len(range(*rows.indices(batch))) == len(Tokens.of(grid, batch, 1).residual_rows()[0])

        x = block(grid, whole(shape)).requires_grad_()
        y = Flatten(grid, channels)(x)
        assert torch.equal(y, expected[residual])
        assert torch.equal(assembled(grid, Shard((batch, features), residual), y.detach()), expected)
        seed = whole(shape, "seed")
        y.backward(seed.flatten(1)[residual])
        close(x.grad, block(grid, seed))


@pytest.mark.ranks(2)
def test_flatten_warns_of_nothing(grids):
    """On ranks with one row each of images of one column; torch says most of its warnings once in a process."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for grid in grids:
                Flatten(grid, 3)(block(grid, whole((2, 3, 2, 1))))
    finally:
        torch.set_warn_always(False)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: MaxPool2d(g, 3, padding=2), r"padding must be at most half of kernel_size \(3, 3\), got \(2, 2\)"),
        (lambda g: AvgPool2d(g, 2.5), "kernel_size must be an integer of at least 1, or a pair of them, got 2.5"),
        (lambda g: AdaptiveAvgPool2d(g, None), "output_size must be an integer of at least 1, or a pair of them, got"),
    ],
)
def test_bad_options(world, make, message):
    with pytest.raises(ValueError, match=message):
        make(Grid(tensor=world.size))
