"""Replicas of hot experts: who gets which, and that nothing but the work of the ranks changes."""

import pytest
import torch
from experts_checks import block_of, check, close, mixture, spread, tokens_on
from layer_checks import whole
from test_mixtral import DEEPSEEK
from training_checks import check_strategy, fitting, made, serial

from hpctrain import Grid
from hpctrain.layers import Experts, SplitBackward
from hpctrain.layers.experts import experts, replicas
from hpctrain.layers.experts.replicas import Replica, chosen_replicas
from hpctrain.layers.recompute import recomputed

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]

# One expert that all tokens choose, and the next ones, of a router whose scores are all alike
TIES = {"std": 0.0, "replicate_hot": 3}


@pytest.fixture
def always(monkeypatch):
    """Replicas of few tokens too; gives, of each dispatch with any, the tokens of each rank's experts before, this
    rank's pairs of each expert and replica after, and the replicas."""
    monkeypatch.setattr(replicas, "_PAYS", 1)
    works = []

    class Counted(replicas.Replicas):
        def numbered(self, experts, table):
            numbers = super().numbered(experts, table)
            counts = torch.bincount(numbers.flatten(), minlength=sum(self.of_rank) + 1)[: sum(self.of_rank)]
            works.append((table, counts, self))
            return numbers

    monkeypatch.setattr(experts, "Replicas", Counted)
    return works


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("load", "of_rank", "most", "expected"),
    [
        ([400, 0], [1, 1], 1, [Replica(0, 0, 1, 200)]),
        ([400, 0], [1, 1], 0, []),
        ([400, 340], [1, 1], 5, []),  # 30 tokens are not worth it
        # the hottest of the busiest rank goes to the idlest, until neither is off the mean
        ([100, 500, 100, 100, 0, 0], [2, 2, 2], 2, [Replica(0, 1, 1, 66), Replica(0, 1, 2, 266)]),
        ([0, 0, 0, 900], [2, 2, 0], 3, [Replica(1, 3, 0, 300), Replica(1, 3, 2, 300)]),
        ([900, 0, 600, 0], [2, 0, 1, 1], 9, [Replica(0, 0, 1, 375), Replica(0, 0, 3, 150), Replica(2, 2, 3, 225)]),
        ([900, 0, 600, 0], [2, 0, 1, 1], 2, [Replica(0, 0, 1, 375), Replica(2, 2, 3, 225)]),
        ([0, 0], [1, 1], 3, []),
    ],
)
def test_who_gets_a_replica(world, load, of_rank, most, expected):
    assert chosen_replicas(load, of_rank, most) == expected


@pytest.mark.parametrize("dispatch", ["all_to_all", "gather", "once"])
@pytest.mark.parametrize("way", ["shared memory", "messages"])
def test_equals_one_rank(world, always, way, dispatch):
    """With several replicas of an expert, of several experts on a rank, of ranks without experts, and dropped pairs."""
    for grid in spread(world.size, way)[:: 5 if world.size == 2 else 2]:
        for options in ({"top_k": 1}, {"experts": 7, "top_k": 2, "capacity": 2.5}, {"experts": 2, "top_k": 1}, {}):
            check(grid, 6, 8, {"dispatch": dispatch, **TIES, **options})
    for table, counts, plan in always:
        totals = grid.world.comm.allreduce(counts.numpy())
        assert totals.sum() == table.sum()
        work = [part.sum() for part in torch.from_numpy(totals).split(plan.of_rank)]
        before = [part.sum() for part in table.sum(0).split(plan._own)]
        assert max(work) < max(before)
    assert max(len(plan.listed) for _, _, plan in always) > (world.size > 2)


def test_put_off_and_computed_once_more(world, always):
    grid = spread(world.size)[0]
    tokens, results = tokens_on(grid, 6, 8), []
    for how in ("plain", "put off", "once more"):
        layer = mixture(grid, top_k=1, std=0.0, replicate_hot=0 if how == "plain" else 3)
        split = SplitBackward(layer)
        x = block_of(grid, tokens, whole((48, 7), "x", False)).clone().requires_grad_()
        y = recomputed(layer, x, tokens) if how == "once more" else layer(x, tokens)
        if how == "put off":
            with split as products:
                y.square().sum().backward()
            assert layer.experts.up.grad is None
            with torch.no_grad():
                for product in products:
                    product()
        else:
            y.square().sum().backward()
        results.append((y.detach(), x.grad, layer.experts.up.grad, layer.experts.down.grad))
    for other in results[1:]:
        for ours, expected in zip(other, results[0]):
            close(ours, expected)
    assert always


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("method", ["ddp", "zero3"])
def test_training(world, always, method):
    """Gradients of weights in buckets, and weights that are not always there."""
    shape = fitting(DEEPSEEK, 1)
    with Grid(world.size, expert=2) as grid:
        model = made(grid, shape)
        for module in model.modules():
            if isinstance(module, Experts):
                module.replicate_hot = 2
        check_strategy(method, model, grid, shape, 2, serial(shape, 1.0))
    assert always
