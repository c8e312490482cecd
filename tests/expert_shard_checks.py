"""A toy mixture on a grid and by itself: a dense layer, then experts, of which token t takes number t modulo them.

No token is sent: the ranks that hold all experts between them know the same tokens, and each computes the loss of those
that its own experts take, of ranks that divide an expert each of its own features. So every gradient is the partial sum
that it is in a real mixture.
"""

import dataclasses
import functools

import pytest
import torch
from training_checks import by_messages

from hpctrain import Grid
from hpctrain.config import DataParallelConfig
from hpctrain.data_parallel import MixedDataParallel, make
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.parameter import annotate
from hpctrain.pipeline import Edge, Network, StageGraph, schedule
from hpctrain.shard import Shard, expert_shard, split, subsplit
from hpctrain.train.trainer import Trainer

WIDTH, TOKENS, STEPS, MICROBATCHES, CLIP = 3, 11, 3, 2, 0.2
RNG = torch.Generator().manual_seed(4)
X, Y = (torch.randn(STEPS, TOKENS, WIDTH, generator=RNG, dtype=torch.float64) for _ in range(2))


def initial(experts):
    """The whole weights."""
    generator = torch.Generator().manual_seed(experts)
    shapes = {"dense": (WIDTH, WIDTH), "weight": (experts, WIDTH, WIDTH), "bias": (experts, WIDTH)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


class Dense(torch.nn.Module):
    def __init__(self, grid, experts):
        super().__init__()
        whole = Shard((WIDTH, WIDTH), (slice(0, WIDTH), slice(0, WIDTH)), replicated=("x", "y", "z"))
        self.dense = parameter(initial(experts)["dense"], whole)

    def forward(self, x):
        return torch.tanh(x @ self.dense)


class Experts(torch.nn.Module):
    """The loss of this rank's experts."""

    def __init__(self, grid, experts):
        super().__init__()
        self.experts = experts
        for name in ("weight", "bias"):
            whole = initial(experts)[name]
            shard = expert_shard(tuple(whole.shape), grid.expert.size, grid.expert.rank, grid.expert_tensor, -1)
            self.register_parameter(name, parameter(whole, shard))
        self.first, self.features = shard.slices[0].start, shard.slices[-1]

    def forward(self, x, target):
        y, tokens = target
        loss = 0.0 * (x.sum() + self.weight.sum() + self.bias.sum())  # backward reaches every layer on every rank
        for number, (weight, bias) in enumerate(zip(self.weight, self.bias), self.first):
            mine = tokens % self.experts == number
            loss = loss + (x[mine] @ weight + bias - y[mine][:, self.features]).square().sum() / TOKENS
        return loss


def parameter(whole, shard):
    return annotate(torch.nn.Parameter(whole[shard.slices].clone()), shard=shard)


class Whole(torch.nn.Module):
    """Both, under the names that a `Network` gives them."""

    def __init__(self, grid, experts):
        super().__init__()
        self.stage = torch.nn.ModuleDict({"0": Dense(grid, experts), "1": Experts(grid, experts)})

    def forward(self, batch):
        x, target = batch
        return self.stage["1"](self.stage["0"](x), target)


def batches(grid, step, servers=0):
    """This rank's part of the tokens, which is that of all with which it has all experts; `servers` have none."""
    working = grid.copies.size * (grid.data.size - servers) // grid.data.size
    mine = split(TOKENS, working, grid.copies.rank) if grid.copies.rank < working else slice(0, 0)
    made = []
    for m in range(MICROBATCHES):
        part = subsplit(mine, MICROBATCHES, m)
        made.append((X[step, part], (Y[step, part], torch.arange(part.start, part.stop))))
    return made


def optimizer_of(parameters, kind="adamw"):
    if kind == "sgd":
        return torch.optim.SGD([{"params": list(parameters)}], lr=1e-2, momentum=0.9)
    return torch.optim.AdamW([{"params": list(parameters)}], lr=1e-2, weight_decay=0.1)


class Run:
    """A toy in training."""

    def __init__(self, grid, experts, method="ddp", clip=CLIP, optimizer="adamw", pipeline="1f1b", **options):
        self.grid, order, loss = grid, None, None
        if grid.pipeline.size == 1:
            self.model, loss = Whole(grid, experts), lambda model, batch: model(batch)
        else:
            graph = StageGraph(2, [Edge(0, 1, (TOKENS, WIDTH), "float64")])
            order = dataclasses.replace(schedule(pipeline, 2, MICROBATCHES), graph=graph)
            makers = [functools.partial(kind, grid, experts) for kind in (Dense, Experts)]
            self.model = Network(grid, order, makers)
        self.optimizer = optimizer_of(self.model.parameters(), optimizer)
        if method == "mixed":
            self.strategy = MixedDataParallel(self.model.parameters(), grid, self.optimizer)
        else:
            self.strategy = make(DataParallelConfig(method=method, **options), self.model, grid, self.optimizer)
        self.trainer = Trainer(
            self.model, grid, self.optimizer, order, loss=loss, max_norm=clip, strategy=self.strategy
        )

    def steps(self, first=0, last=STEPS, servers=0):
        """(loss, norm) of each."""
        return [self.trainer.step(batches(self.grid, step, servers)) for step in range(first, last)]

    def weights(self):
        """On the first rank, by the last part of their names."""
        with self.strategy.full_weights():
            found = {name: whole.clone() for name, whole in whole_parameters(self.model, self.grid)}
        return {name.rpartition(".")[2]: whole for name, whole in found.items()}


@dataclasses.dataclass
class Serial:
    losses: list
    norms: list
    gradients: list  # of each step, by name
    weights: dict


@functools.cache
def serial(experts, clip=CLIP, kind="adamw"):
    """The same on whole batches, one token after another."""
    weights = {name: whole.clone().requires_grad_() for name, whole in initial(experts).items()}
    optimizer = optimizer_of(weights.values(), kind)
    found = Serial([], [], [], weights)
    for step in range(STEPS):
        loss = torch.zeros((), dtype=torch.float64)
        for t in range(TOKENS):
            expert = t % experts
            out = torch.tanh(X[step, t] @ weights["dense"]) @ weights["weight"][expert] + weights["bias"][expert]
            loss = loss + (out - Y[step, t]).square().sum() / TOKENS
        optimizer.zero_grad()
        loss.backward()
        found.gradients.append({name: weight.grad.clone() for name, weight in weights.items()})
        found.losses.append(loss.item())
        found.norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), clip or float("inf")).item())
        optimizer.step()
    return found


def check(run, got, expected):
    """Losses, norms and weights of all steps are those of one rank."""
    assert [loss for loss, _ in got] == pytest.approx(expected.losses, rel=1e-12)
    assert [norm for _, norm in got] == pytest.approx(expected.norms, rel=1e-12)
    weights = run.weights()
    if run.grid.rank == 0:
        assert weights.keys() == expected.weights.keys()
        for name, weight in expected.weights.items():
            torch.testing.assert_close(weights[name], weight.detach(), rtol=1e-11, atol=1e-13)


# (data, pipeline, tensor, expert, expert_tensor) by number of ranks. Of 5 experts and 3, the ranks hold different
# numbers or none.
GRIDS = {
    1: [(1, 1, 1, 1)],
    2: [(2, 1, 1, 2), (1, 1, (1, 2, 1), 2, 2), ((1, 2, 1), 1, 1, 2), (2, 1, 1, 1), (1, 1, 2, 1)],
    3: [(3, 1, 1, 3)],
    4: [
        (4, 1, 1, 4), (4, 1, 1, 2), (2, 1, (1, 1, 2), 2), (2, 1, (1, 2, 1), 4, 2), ((1, 1, 2), 1, 2, 4, 4),
        (2, 2, 1, 2), (1, 2, 2, 2, 2), (2, 1, 2, 1),
    ],
    6: [(2, 1, 3, 2), (2, 1, (3, 1, 1), 3)],
    8: [((2, 2, 1), 1, (1, 1, 2), 4), (8, 1, 1, 8), (2, 2, 2, 4, 2), (2, 2, (1, 2, 1), 2)],
}  # fmt: skip


def grid_of(shape, messages=False):
    grid = Grid(*shape)
    if messages:
        by_messages(grid)
    return grid
