"""Ulysses, ring and both against dense attention: outputs and gradients, for every way to divide the ranks."""

import pytest
from context_checks import SEQUENCES, all_masks, check, grids, tensors

from hpctrain.layers.context.mask import Mask

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4)]

HEADS = [(4, 4), (4, 2), (3, 1), (6, 3), (5, 5)]


@pytest.mark.parametrize("one_node", [True, False])
@pytest.mark.parametrize("length", [103, 16, 7, 2, 1])
def test_lengths(world, length, one_node):
    for grid in grids(world, one_node):
        for mask in all_masks(length):
            check(grid, tensors(4, 2, length), [mask] * SEQUENCES, 1e-12)


@pytest.mark.parametrize("one_node", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_heads(world, heads, kv_heads, one_node):
    for grid in grids(world, one_node):
        check(grid, tensors(heads, kv_heads, 29), [Mask()] * SEQUENCES, 1e-12)
