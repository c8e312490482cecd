"""torch's replicas around a parallelized model: refused on all ranks, before anything is overwritten."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpctrain as ht

pytestmark = pytest.mark.mpi


@pytest.fixture
def process_group(world, tmp_path_factory):
    path = world.bcast(str(tmp_path_factory.mktemp("group") / "store"))
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=world.rank, world_size=world.size)
    yield
    dist.destroy_process_group()


class Holder(nn.Module):
    """As Lightning's module holds the model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def test_ddp(world, process_group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    ht.parallelize(model, ht.Grid(tensor=world.size))
    before = [p.detach().clone() for p in model.parameters()]
    for wrapped in (model, model[1]):
        with pytest.raises(ValueError, match=r"Parallel would .*; for replicas use the data axis .*ht\.sync"):
            DistributedDataParallel(wrapped)
    assert all(torch.equal(p.detach(), q) for p, q in zip(model.parameters(), before))
    holder = DistributedDataParallel(Holder(model))
    with pytest.raises(ValueError, match=r"MASTER_ADDR or WORLD_SIZE are set: unset them"):
        holder(torch.ones(1, 8))
    model(torch.ones(1, 8))  # by itself


def test_ddp_of_other_models(world, process_group):
    DistributedDataParallel(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
