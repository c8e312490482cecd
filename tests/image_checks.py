"""A layer of images on this grid against torch's own layer on whole images: outputs and all gradients, in float64."""

import copy
import functools
import math

import torch

from hpctrain import Grid, RngKey
from hpctrain.grid_shape import all_grids
from hpctrain.layers import image_block

KEY = RngKey(5, "images")
DOUBLE = {"dtype": torch.float64}


def tensor_grids(world):
    """All (x, y, z) boxes of the ranks, made once: their shared memory takes longer than most tests."""
    return _boxes(world.size)


@functools.cache
def _boxes(ranks):
    return [Grid(tensor=box) for data, pipeline, box in all_grids(ranks) if data == pipeline == 1]


def whole(shape, name="x"):
    """Numbers that every rank knows whole."""
    return (KEY / name).normal(0, math.prod(shape)).view(shape)


def block(grid, tensor):
    """This rank's part of whole images, as a leaf."""
    return tensor.detach()[image_block(grid, *tensor.shape)].clone()


def assembled(grid, shard, part):
    """The whole tensor, of which each rank brings its slice; slices held by several ranks are summed."""
    tensor = torch.zeros(shard.global_shape, dtype=torch.float64)
    tensor[shard.slices] = part
    grid.comm.Allreduce(tensor.clone().numpy(), total := tensor.numpy())
    return torch.from_numpy(total)


def copied_weights(grid, ours, theirs):
    """`theirs`, torch's modules, with the weights of `ours`, whose vectors are first made to differ by element."""
    theirs = theirs.double()
    for name, parameter in theirs.named_parameters():
        mine = ours.get_parameter(name)
        assert mine.shard.global_shape == parameter.shape
        with torch.no_grad():
            if parameter.dim() == 1:
                mine.copy_(whole(parameter.shape, name)[mine.shard.slices])
            owned = mine if mine.shard.owned(grid.coords) else torch.zeros_like(mine)
            parameter.copy_(assembled(grid, mine.shard, owned))
    return theirs


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def check(grid, ours, theirs, shape, offset=0.0):
    """One forward and backward of both; returns torch's module."""
    theirs = copied_weights(grid, ours, copy.deepcopy(theirs))
    x = (whole(shape) + offset).requires_grad_()
    expected = theirs(x)
    seed = whole(expected.shape, "seed")
    expected.backward(seed)

    mine = block(grid, x).requires_grad_()
    y = ours(mine)
    close(y, block(grid, expected))
    y.mul_(2).backward(block(grid, seed) / 2)  # in place, which torch refuses of an autograd function's views
    close(mine.grad, block(grid, x.grad))
    for name, parameter in theirs.named_parameters():
        held = ours.get_parameter(name)
        total = assembled(grid, held.shard, held.grad)
        scale = max(1.0, float(parameter.grad.abs().max()))  # a sum of many terms: relative to the largest
        torch.testing.assert_close(total / scale, parameter.grad / scale, rtol=1e-12, atol=1e-12)
    return theirs
