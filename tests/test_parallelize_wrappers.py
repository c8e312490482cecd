"""torch's replicas around a parallelized model: refused on all ranks, before anything is overwritten."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]


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
        with pytest.raises(ValueError, match=r"Parallel would .*; for replicas use the data axis .*tensor=4\), zero=0"):
            DistributedDataParallel(wrapped)
    assert all(torch.equal(p.detach(), q) for p, q in zip(model.parameters(), before))
    holder = DistributedDataParallel(Holder(model))
    with pytest.raises(ValueError, match=r"MASTER_ADDR or WORLD_SIZE are set: unset them"):
        holder(torch.ones(1, 8))
    model(torch.ones(1, 8))  # by itself


def test_ddp_of_other_models(world, process_group):
    DistributedDataParallel(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("shards", [False, True])
def test_compiled_batches_of_several_sizes(world, shards):
    """The code between the sharded modules is compiled."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.norm = nn.Embedding(9, 6), nn.LayerNorm(6)
            self.body = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))

        def forward(self, ids):
            return self.norm(self.body(self.table(ids)).relu() * 2).cumsum(-1)

    torch.manual_seed(0)
    serial = Network().double()
    model = ht.parallelize(copy.deepcopy(serial), ht.Grid(tensor=world.size), shard_activations=shards)
    compiled = torch.compile(model, backend="eager")
    expected = None
    for m in (serial, compiled):
        optimizer, losses = torch.optim.SGD(m.parameters(), 0.01), []
        for length in (4, 7, 3):
            loss = m(torch.arange(length)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        expected = expected or losses
    assert losses == pytest.approx(expected, rel=1e-12)
