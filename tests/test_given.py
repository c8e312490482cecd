"""Wrong types and swapped arguments of public functions: an error that names the argument."""

import pytest
import torch
from torch import nn

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]


def loss(model, batch):
    return model(batch).sum()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m, g, o: ht.parallelize(g, m), "model must be of type Module, got Grid"),
        (lambda m, g, o: ht.parallelize([m], g), "model must be of type Module, got list"),
        (lambda m, g, o: ht.parallelize(nn.Linear, g), "model must be of type Module, got the class Linear"),
        (lambda m, g, o: ht.parallelize(nn.Linear(2, 2), 2), "grid must be of type Grid, got int"),
        (lambda m, g, o: ht.Trainer(m, o, g, loss=loss), "grid must be of type Grid, got SGD"),
        (
            lambda m, g, o: ht.Trainer(m, g, torch.optim.SGD, loss=loss),
            "must be of type Optimizer, got the class SGD",
        ),
        (lambda m, g, o: ht.Trainer(m, g, o, loss="mse"), "loss must be of type Callable, got str"),
        (
            lambda m, g, o: ht.Trainer(m, g, o, loss=loss, strategy=ht.data_parallel.Zero1),
            "strategy must be of type DataParallelStrategy, got the class Zero1",
        ),
        (
            lambda m, g, o: ht.Trainer(m, g, o, loss=loss).message_driven,
            "message_driven is of a Trainer",
        ),
        (lambda m, g, o: ht.data_parallel.Zero1(m.parameters(), o, g), "grid must be of type Grid, got SGD"),
        (lambda m, g, o: ht.checkpoint.load("here", m, o), "strategy must be of type DataParallelStrategy, got SGD"),
        (lambda m, g, o: ht.checkpoint.save("here", 1, m, o), "strategy must be of type DataParallelStrategy, got SGD"),
        (lambda m, g, o: ht.plan.for_model(nn.Linear(4, 4), g, 1, 2), "machine must be of type Machine, got int"),
        (lambda m, g, o: ht.pipeline.gpipe("2", 2), "ranks must be of type Integral, got str"),
        (lambda m, g, o: ht.pipeline.schedule("1f1b", 2, 2.5), "microbatches must be of type Integral, got float"),
        (lambda m, g, o: ht.pipeline.partition("dp", [1.0], 1, 1), "costs must be of type LayerCosts, got list"),
        (
            lambda m, g, o: ht.pipeline.list_schedule(ht.pipeline.StageGraph(1), {(-1, 0): 0}, 1),
            "stage 0 of replica 0 is placed on no rank",
        ),
        (lambda m, g, o: ht.gather_state_dict(None), "model must be of type Module, got NoneType"),
        (lambda m, g, o: ht.gather_state_dict(m, 3), "grid must be of type Grid, got int"),
        (lambda m, g, o: ht.gather_optimizer_state(m, None), "optimizer must be of type Optimizer, got NoneType"),
        (lambda m, g, o: ht.load_optimizer_state(m, o, None), "state must be of type dict, got NoneType"),
        (lambda m, g, o: ht.clip_grad_norm_(m, -1.0), "max_norm must be a number from 0 on, got -1.0"),
        (lambda m, g, o: ht.clip_grad_norm_(m, "1"), "max_norm must be a number from 0 on, got '1'"),
        (lambda m, g, o: ht.register_rule(nn.Bilinear, None), "rule must be of type Callable, got NoneType"),
        (
            lambda m, g, o: ht.load_config(["run.steps=3"]),
            r"path must be a file's, got \['run.steps=3'\]; settings are",
        ),
        (lambda m, g, o: ht.load_config(overrides=[3]), "override must be of type str, got int"),
    ],
)
def test_wrong_types(world, call, said):
    torch.manual_seed(3)
    grid = ht.Grid(tensor=world.size)
    model = ht.parallelize(nn.Linear(4, 4), grid)
    with pytest.raises(ValueError, match=said):
        call(model, grid, torch.optim.SGD(model.parameters(), 0.1))
