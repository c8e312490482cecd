"""State dicts of layers: parts of this rank, and whole tensors of all."""

import pytest
import torch
from layer_checks import DOUBLE, KEY

import hpctrain as ht
from hpctrain.layers import Attention, BatchNorm2d, Linear, Mixture, image_block

pytestmark = pytest.mark.mpi


def made(grid, name):
    return torch.nn.ModuleDict(
        {
            "attention": Attention(grid, 6, 3, qk_norm=True, key=KEY / name, **DOUBLE),
            "mixture": Mixture(grid, 6, 4, 3, 2, scores="sigmoid", key=KEY / name / "mixture", **DOUBLE),
            "head": Linear(grid, 6, 7, bias=False, to="inner", key=KEY / name / "head", **DOUBLE),
            "norm": BatchNorm2d(grid, 5, **DOUBLE),
        }
    )


def whole_state(model, grid):
    return grid.comm.bcast(ht.gather_state_dict(model, grid))


@pytest.mark.ranks(2, 4)
def test_whole_tensors_are_loaded_on_any_grid(world):
    """Running statistics among them, of which a rank has those of its channels."""
    n = world.size
    source = ht.Grid(tensor=(2, n // 2, 1))
    others = [ht.Grid(tensor=box) for box in ((n, 1, 1), (1, n, 1), (1, 1, n))] + [ht.Grid(data=n, expert=n)]
    model, images = made(source, "source"), torch.arange(4 * 5 * 3.0).view(4, 5, 3, 1).sin().double()
    model["norm"](images[image_block(source, *images.shape)])
    expected = whole_state(model, source)
    torch.testing.assert_close(expected["norm.running_mean"], images.mean((0, 2, 3)) * 0.1, rtol=1e-12, atol=1e-15)
    for grid in others:
        other = made(grid, "other")
        other.load_state_dict(expected)
        found = whole_state(other, grid)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name
        parts = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        other.load_state_dict(parts)
        assert all(torch.equal(tensor, parts[name]) for name, tensor in other.state_dict().items())


@pytest.mark.ranks(2)
def test_tensors_of_other_sizes_are_refused(world):
    model = made(ht.Grid(tensor=2), "model")
    with pytest.raises(RuntimeError, match="size mismatch for head.weight"):
        model.load_state_dict(model.state_dict() | {"head.weight": torch.zeros(8, 6)})
