"""The executor: every schedule gives the loss and the gradients of serial accumulation over the same microbatches."""

import pytest
import torch
from comm_checks import complete, started

from hpctrain import Grid, RngKey
from hpctrain.layers import Linear, SplitBackward, Tokens
from hpctrain.pipeline import NAMES, Executor, schedule
from hpctrain.pipeline.executor import MOST_EDGES
from hpctrain.pipeline.pool import Pool

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4, 6, 8)]

WIDTH = 6
EXACT = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
ROUNDING = ("chimera", "dualpipe", "dualpipev")


@pytest.mark.ranks(1)
def test_tags_of_the_last_edge(world):
    """Below 32766, of sums over the holders of tied weights, and 32767, of collectives."""
    assert (2 * (MOST_EDGES - 1), 2 * (MOST_EDGES - 1) + 1) == (32764, 32765)


class Layer(torch.nn.Module):
    """One stage: x + tanh(W x + b), the last followed by a loss; weights that depend on the stage alone."""

    def __init__(self, grid, stage):
        super().__init__()
        self.product = Linear(grid, WIDTH, WIDTH, to="inner", key=RngKey(stage), dtype=torch.float64)
        torch.nn.init.constant_(self.product.bias, 0.01 * stage)

    def forward(self, x, tokens):
        return x + self.product(x, tokens).tanh()


def rows(m):
    """Microbatches of unequal sizes."""
    return 3 + m % 3


def data(m):
    generator = torch.Generator().manual_seed(m)
    return torch.randn(rows(m), WIDTH, generator=generator, dtype=torch.float64)


class Chain:
    """The stages of one rank."""

    def __init__(self, grid, made):
        self.last, self.grid = made.graph.stages - 1, grid
        mine = sorted({stage for (_, stage), rank in made.placement.items() if rank == grid.pipeline.rank})
        self.layers = torch.nn.ModuleDict({str(stage): Layer(grid, stage) for stage in mine})

    def message_spec(self, action):
        return (rows(action.microbatch), WIDTH), torch.float64, torch.device("cpu")

    def forward(self, action, inputs):
        x = inputs[0] if inputs else data(action.microbatch)
        y = self.layers[str(action.stage)](x, Tokens.of(self.grid, 1, len(x)))
        return y.square().sum() if action.stage == self.last else y


def serial(stages, microbatches):
    """Losses by microbatch and gradients by stage, accumulated microbatch after microbatch by autograd alone."""
    from mpi4py import MPI

    alone = Grid(comm=MPI.COMM_SELF)
    layers = torch.nn.ModuleList(Layer(alone, stage) for stage in range(stages))
    losses = []
    for m in range(microbatches):
        x = data(m)
        for layer in layers:
            x = layer(x, Tokens.of(alone, 1, len(x)))
        loss = x.square().sum()
        loss.backward()
        losses.append(loss.detach())
    return losses, [[p.grad for p in layer.parameters()] for layer in layers]


def run(grid, name, microbatches, **options):
    made = schedule(name, grid.pipeline.size, microbatches, **options)
    chain = Chain(grid, made)
    split_backward = SplitBackward(chain.layers) if made.splits else None
    executor = Executor(grid.pipeline, made, split_backward)
    return made, chain, executor, executor.run(chain)


COUNTS = {3: (1, 3, 17), 4: (1, 3, 4, 17), 6: (1, 9), 8: (3, 9)}  # of microbatches; on fewer ranks many more
EVEN = pytest.mark.ranks(2, 4, 6, 8)  # as chimera takes an even number of ranks


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=EVEN) if name in ("chimera", "dualpipe") else name for name in EXACT + ROUNDING]
)
def test_equals_serial(world, name, synchronous):
    """Losses and gradients, bit for bit where there is one replica of each stage; with MPI_Ssend too."""
    grid = Grid(pipeline=world.size)
    grid.transport.synchronous = synchronous
    for microbatches in COUNTS.get(world.size, (1, 2, 3, 4, 5, 8, 17)):
        made, chain, _, losses = run(grid, name, microbatches)
        expected_losses, expected = serial(made.graph.stages, microbatches)
        everything = [loss for part in world.allgather(losses) for loss in part]
        for stage, layer in chain.layers.items():
            gradients = [p.grad for p in layer.parameters()]
            if name in EXACT:
                assert all(torch.equal(*pair) for pair in zip(gradients, expected[int(stage)], strict=True))
            else:
                holders = [rank for (_, s), rank in made.placement.items() if s == int(stage)]
                assert len(holders) == made.replicas
            if made.replicas == 1:
                torch.testing.assert_close(gradients, expected[int(stage)], rtol=1e-12, atol=1e-14)
        if made.replicas > 1:
            check_sum_of_replicas(world, made, chain, expected)
        assert len(everything) == microbatches
        torch.testing.assert_close(sorted(everything), sorted(expected_losses), rtol=1e-12, atol=0)
        if name in EXACT and losses:
            assert all(torch.equal(*pair) for pair in zip(losses, expected_losses, strict=True))


def test_frozen_weights_get_no_gradient(world):
    """Nor where weight gradients are put off: an optimizer would take it for one to follow."""
    grid = Grid(pipeline=world.size)
    made = schedule("zb-h1", world.size, 3)
    chain = Chain(grid, made)
    for layer in chain.layers.values():
        layer.product.weight.requires_grad_(False)
    Executor(grid.pipeline, made, SplitBackward(chain.layers)).run(chain)
    for layer in chain.layers.values():
        assert layer.product.weight.grad is None
        assert layer.product.bias.grad is not None


def test_nothing_is_under_way_after_a_run(world, monkeypatch):
    """An activation may be freed, or its memory used again, once the step is over."""
    works = started(monkeypatch)
    for name in ("1f1b", "zb-v"):
        run(Grid(pipeline=world.size), name, 5)
    assert (world.size > 1) == bool(works)
    assert complete(works)


def check_sum_of_replicas(world, made, chain, expected):
    """What the replicas of a stage have adds up to the serial gradients."""
    parts = world.allgather({int(s): [p.grad for p in layer.parameters()] for s, layer in chain.layers.items()})
    for stage, wanted in enumerate(expected):
        holders = [part[stage] for part in parts if stage in part]
        assert len(holders) == made.replicas
        for number, gradient in enumerate(wanted):
            summands = [holder[number] for holder in holders if holder[number] is not None]
            torch.testing.assert_close(sum(summands), gradient, rtol=1e-12, atol=1e-14)


# For each number of ranks the buffers of each rank, of three sizes: about as many as messages it holds at once.
BUFFERS = {
    "1f1b": {1: [0], 2: [3, 3], 4: [3, 7, 6, 3]},
    "zb-v": {1: [0], 2: [3, 6], 4: [3, 18, 12, 9]},
    "interleaved": {1: [0], 2: [6, 9], 4: [9, 16, 15, 12]},
}


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("microbatches", [17, 35])
@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_are_used_again(world, name, microbatches):
    """However many microbatches there are; and the second pass needs no others."""
    grid = Grid(pipeline=world.size)
    _, chain, executor, _ = run(grid, name, microbatches)
    counts = [len(buffers) for buffers in executor.pool.buffers.values()]
    executor.run(chain)
    assert [len(buffers) for buffers in executor.pool.buffers.values()] == counts
    assert sum(counts) <= BUFFERS[name][world.size][world.rank]


@pytest.mark.ranks(1)
def test_buffers_of_many_shapes(world):
    """Are not kept for ever, but where somebody has one."""
    pool = Pool()
    kept = pool.take((1000,), torch.float32, None)
    for length in range(1, 200):
        pool.take((length,), torch.float32, None)
    assert len(pool.buffers) <= 16
    assert pool.take((1000,), torch.float32, None).data_ptr() != kept.data_ptr()


def test_the_backward_before_a_sum_is_announced(world):
    """Once for each stage of whole backwards, before its last one."""
    grid = Grid(pipeline=world.size)
    for microbatches in (1, 4):
        made = schedule("interleaved", world.size, microbatches)
        chain, told = Chain(grid, made), []
        executor = Executor(grid.pipeline, made)
        executor.run(chain, told.append)
        told = [(a.replica, a.stage, a.microbatch) for a in told]
        assert told == [(*place, microbatches - 1) for place in executor.last_backwards]
        assert sorted(told) == [(0, int(stage), microbatches - 1) for stage in chain.layers]


@pytest.mark.ranks(1, 2)
def test_refusals(world):
    axis = Grid(pipeline=world.size).pipeline
    with pytest.raises(ValueError, match=f"is for {world.size + 1} ranks"):
        Executor(axis, schedule("1f1b", world.size + 1, 2))
    with pytest.raises(ValueError, match="splits backwards: give the executor split_backward="):
        Executor(axis, schedule("zb-h1", world.size, 2))
    with pytest.raises(ValueError, match="has no hpctrain.layers.Linear"):
        SplitBackward(torch.nn.Linear(2, 2))
    assert set(EXACT + ROUNDING) < set(NAMES)
