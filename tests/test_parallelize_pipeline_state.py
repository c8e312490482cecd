"""A trunk cut into stages: what the ranks must have alike, and what beside weights belongs to a model's state."""

import pytest
import torch
from parallelize_checks import numbers
from torch import nn

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


class Counted(nn.Linear):
    """With a state of its own, that is no tensor."""

    calls = 3

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def loss(model, batch):
    return model(batch).square().sum()


def stages(grid, kind=nn.Linear):
    torch.manual_seed(0)
    return ht.parallelize(nn.Sequential(*(kind(4, 4) for _ in range(2))), grid, pipeline="")


@pytest.mark.ranks(4)
def test_one_rank_with_other_microbatches(world):
    """All ranks say so, those of a stage that was given the same ones too."""
    grid = ht.Grid(pipeline=2, tensor=2)
    model = stages(grid)
    trainer = ht.Trainer(model, grid, torch.optim.SGD(model.parameters(), 0.1), loss=loss)
    with pytest.raises(ValueError, match="rank 1 of the tensor axis has other microbatches than rank 0") as error:
        trainer.step([numbers(2, 4, seed=int(grid.pipeline.rank == 0 and grid.tensor.rank == 1)).float()])
    assert len(set(world.allgather(str(error.value)))) == 1


def test_extra_state(world):
    grid = ht.Grid(pipeline=2)
    gathered = ht.gather_state_dict(stages(grid, Counted))
    if grid.rank == 0:
        assert gathered["1._extra_state"] == gathered["0._extra_state"] == {"calls": 3}
        nn.Sequential(Counted(4, 4), Counted(4, 4)).load_state_dict(gathered)


@pytest.mark.parametrize("blocks", [0, 1])
def test_fewer_blocks_than_stages(world, blocks):
    torch.manual_seed(0)
    model = nn.ModuleDict({"enter": nn.Linear(4, 4), "blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))})
    with pytest.raises(ValueError, match=f"pipeline='blocks' names {blocks} blocks, and the grid has 2 stages"):
        ht.parallelize(model, ht.Grid(pipeline=2), pipeline="blocks")
