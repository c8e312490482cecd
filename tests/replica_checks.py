"""A little network trained on replicas of a grid."""

import functools

import torch

from hpctrain import Grid, RngKey
from hpctrain.layers import Linear, Tokens
from hpctrain.shard import split
from hpctrain.train.trainer import Trainer

ROWS, STEPS = 5, 6  # rows over 2, 3, 4, ... replicas are uneven, over 8 some have none
RNG = torch.Generator().manual_seed(2)
X, Y = (torch.randn(STEPS, ROWS, 6, generator=RNG, dtype=torch.float64) for _ in range(2))


@functools.cache  # a grid makes several communicators
def grid_of(data, tensor=1):
    return Grid(data, 1, tensor)


def layers_on(grid):
    return torch.nn.ModuleList(
        [
            Linear(grid, 6, 10, to="inner", key=RngKey(1, "up"), dtype=torch.float64),
            Linear(grid, 10, 6, to="residual", key=RngKey(1, "down"), dtype=torch.float64),
        ]
    )


def train(grid, make, optimizer, max_norm=0.0):
    """The weights by name, the losses and the norms, of STEPS steps."""
    model = layers_on(grid)
    optimizer = optimizer(model.parameters())
    strategy = make(list(model.parameters()), grid, optimizer)
    workers = grid.data.size - getattr(strategy, "servers", 0)
    mine = split(ROWS, workers, grid.data.rank) if grid.data.rank < workers else slice(0, 0)
    tokens = Tokens.of(grid, mine.stop - mine.start, 1, mine.start)

    def loss(model, step):
        rows, columns = tokens.residual_rows()[0], split(6, grid.tensor.y.size, grid.tensor.y.rank)
        x, y = (t[step, rows.start : rows.stop, columns] for t in (X, Y))
        up, down = model
        return (down(torch.tanh(up(x, tokens)), tokens) - y).square().sum() / ROWS

    trainer = Trainer(model, grid, optimizer, loss=loss, max_norm=max_norm, strategy=strategy)
    results = [trainer.step([step]) for step in range(STEPS)]
    with trainer.strategy.full_weights():
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, *zip(*results), {name: p.detach().clone() for name, p in model.named_parameters()}
