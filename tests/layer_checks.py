"""A grid-parallel layer against a serial function of whole matrices, forward and gradients."""

import functools
import math

import torch
from matmul_checks import last_rank_elsewhere

from hpctrain import Grid, RngKey
from hpctrain.data_parallel import DataParallel
from hpctrain.grid_shape import all_grids
from hpctrain.layers import Tokens
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.shard import split, subsplit

KEY = RngKey(11, "layers")
DOUBLE = {"dtype": torch.float64}


def tensor_grids(world, way="shared memory"):
    """All (x, y, z) boxes of the ranks; by "messages", as if no two of them shared memory, with sends that wait;
    with "last rank elsewhere", as if all but the last did."""
    return _boxes(world.size, way)


@functools.cache  # a grid makes several communicators
def _boxes(ranks, way):
    grids = [Grid(tensor=box) for data, pipeline, box in all_grids(ranks) if data == pipeline == 1]
    for grid in grids if way == "messages" else ():
        grid.transport.synchronous = True
        for axis in (grid.tensor.x, grid.tensor.y, grid.tensor.z):
            axis.one_node = False
    for grid in grids if way == "last rank elsewhere" else ():
        last_rank_elsewhere(grid)
    return grids


def whole(shape, name, requires_grad=True):
    """A matrix that every rank knows whole."""
    numbers = (KEY / name).normal(0, math.prod(shape)).view(shape)
    return numbers.requires_grad_(requires_grad)


class Layout:
    """Cuts whole (rows, features) matrices into this rank's blocks, by the definition of the two layouts."""

    def __init__(self, grid, sequences, length, unit=1, step=0):
        self.grid, self.unit = grid, unit
        self.tokens = Tokens.of(grid, sequences, length, step=step)
        z = split(sequences, grid.tensor.z.size, grid.tensor.z.rank)
        self.block = slice(z.start * length, z.stop * length)

    def residual(self, matrix):
        t = self.grid.tensor
        return matrix[subsplit(self.block, t.x.size, t.x.rank), split(matrix.shape[1], t.y.size, t.y.rank)]

    def inner(self, matrix):
        t = self.grid.tensor
        columns = split(matrix.shape[1], t.x.size, t.x.rank, self.unit)
        return matrix[self.block, subsplit(columns, t.y.size, t.y.rank, self.unit)]


def gradients_over(grid, module):
    """Completed gradients, whole, by name."""
    replicas = DataParallel(module.parameters(), grid)
    for parameter in module.parameters():
        parameter.grad_sync.view.copy_(parameter.grad)
        parameter.grad = parameter.grad_sync.view
    replicas.finish_grad_sync()
    for parameter in module.parameters():
        parameter.data = parameter.grad
    return dict(whole_parameters(module, grid))


def weights_of(grid, module):
    """Whole weights by name, on every rank, as leaves."""
    held = {name: tensor for name, tensor in whole_parameters(module, grid)}
    return {name: tensor.requires_grad_() for name, tensor in grid.comm.bcast(held).items()}


def randomise(module):
    """Give every vector, such as a bias, values that tell its elements apart; matrices have them already."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            parameter.data.copy_(whole(parameter.shard.global_shape, name, False)[parameter.shard.slices])
    return module


def check(layout, layer, serial, x, into, out_of):
    """`layer` on this grid against `serial(weights, x)` on whole matrices."""
    grid = layout.grid
    weights = weights_of(grid, layer)
    expected = serial(weights, x)
    seed = whole(expected.shape, "seed", False)
    expected.backward(seed)

    block = into(x.detach()).clone().requires_grad_()
    y = layer(block, layout.tokens)
    torch.testing.assert_close(y, out_of(expected).detach(), rtol=1e-12, atol=1e-12)
    y.backward(out_of(seed))
    torch.testing.assert_close(block.grad, into(x.grad), rtol=1e-12, atol=1e-12)
    for name, gradient in gradients_over(grid, layer).items():
        if grid.rank == 0:
            torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-11, atol=1e-12)
