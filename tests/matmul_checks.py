"""What the tests of `hpctrain.matmul` share."""

import functools

import torch

from hpctrain import Grid, matmul
from hpctrain.grid_shape import all_grids
from hpctrain.matmul.two_half_d_rows import TwoHalfDRows

ALGORITHMS = ("Cannon", "Summa", "TwoHalfD", "Agarwal")
CLASSES = {name: getattr(matmul, name) for name in ALGORITHMS} | {"TwoHalfDRows": TwoHalfDRows}  # the layers' own

# How operands and results travel: which axes are taken to lie on one node.
WAYS = {
    "shared memory": "xyz",
    "messages": "",
    "x across nodes": "yz",
    "last rank elsewhere": None,  # so that one axis lies on one node for some ranks, and not for others
}


def legal(algorithm, box):
    """The grids that each algorithm is for, written out once more."""
    x, y, z = box
    return {"Cannon": x == y and z == 1, "Summa": z == 1, "TwoHalfD": x == y, "Agarwal": True}[
        algorithm.removesuffix("Rows")
    ]


def grids(world, way):
    """Every box of the ranks, with sends that wait for their receivers where there are messages."""
    return _grids(world.size, way)


@functools.cache  # a grid makes several communicators
def _grids(ranks, way):
    made = [(box, Grid(tensor=box)) for data, pipeline, box in all_grids(ranks) if data == pipeline == 1]
    for _, grid in made:
        t = grid.tensor
        if way == "last rank elsewhere":
            last_rank_elsewhere(grid)
        else:
            for axis in (t.x, t.y, t.z):
                axis.one_node = axis.name in WAYS[way]
        grid.transport.synchronous = way == "messages"
    return made


def last_rank_elsewhere(grid):
    """As if all ranks but the last were on one node."""
    for axis in grid.axes():
        axis.nodes = tuple(int(rank == grid.size - 1) for rank in grid.members(axis.name))
        axis.one_node = len(set(axis.nodes)) == 1


def products(world, way, algorithms=ALGORITHMS):
    """(grid, product) for every algorithm on every grid that is legal for it."""
    for box, grid in grids(world, way):
        for algorithm in algorithms:
            if legal(algorithm, box):
                yield grid, CLASSES[algorithm](grid.tensor)


def whole(*shape, seed=0, dtype=torch.float64):
    """A matrix that every rank knows whole."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual, expected, tolerance=1e-12):
    """Equal to `tolerance` of the largest element, as rounding is relative to the terms of a sum, not to the sum."""
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(scale, 1.0))
