"""Every optimizer on divided weights equals torch's plain implementation on whole ones."""

import pytest
import torch
from replica_checks import ROWS, STEPS, X, Y, grid_of, layers_on, train

from hpctrain import Grid
from hpctrain.choices import OPTIMIZERS
from hpctrain.data_parallel import DataParallel, ParameterServer
from hpctrain.grid_shape import all_grids
from hpctrain.train.optimizer import make_optimizer

pytestmark = pytest.mark.mpi

# torch's own class and settings, unfused; decoupled weight decay where the name says so
PLAIN = {
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95)}),
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.95)}),
    "nadam": (torch.optim.NAdam, {"betas": (0.9, 0.95), "decoupled_weight_decay": True}),
    "radam": (torch.optim.RAdam, {"betas": (0.9, 0.95), "decoupled_weight_decay": True}),
    "adamax": (torch.optim.Adamax, {"betas": (0.9, 0.95)}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.8}),
    "sgd": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
}
LR, DECAY = 0.01, 0.3


def made(name):
    def of(parameters):
        optimizer = make_optimizer(parameters, DECAY, name, 0.8)
        for group in optimizer.param_groups:
            group["lr"] = LR
        return optimizer

    return of


def serial(name):
    """Weights after, and losses of, training on whole matrices."""
    from mpi4py import MPI

    weights = [p.detach().clone().requires_grad_() for p in layers_on(Grid(comm=MPI.COMM_SELF)).parameters()]
    kind, settings = PLAIN[name]
    optimizer = kind(
        [
            {"params": [w for w in weights if w.dim() == 2], "weight_decay": DECAY},
            {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
        ],
        lr=LR, foreach=False, **settings,
    )  # fmt: skip
    losses = []
    for x, y in zip(X, Y):
        h = torch.tanh(torch.nn.functional.linear(x, *weights[:2]))
        loss = (torch.nn.functional.linear(h, *weights[2:]) - y).square().sum() / ROWS
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(losses) == STEPS
    return [w.detach() for w in weights], losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_divided_weights(world, name):
    """On tensor grids and on replicas, and in slices on a parameter server."""
    whole, losses = serial(name)
    places = [(data, tensor, DataParallel) for data, pipeline, tensor in all_grids(world.size) if pipeline == 1]
    if world.size > 1:
        places.append((world.size, 1, ParameterServer))
    for data, tensor, method in places:
        grid = grid_of(data, tensor)
        weights, got, *_ = train(grid, method, made(name))
        assert got == pytest.approx(losses, rel=1e-11)
        for expected, mine, parameter in zip(whole, weights.values(), layers_on(grid).parameters()):
            torch.testing.assert_close(mine, expected[parameter.shard.slices], rtol=1e-10, atol=1e-12)
