"""Networks of any stage graph: equal to plain autograd that goes through the stages one after another."""

import dataclasses
import functools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hpctrain import Grid, RngKey
from hpctrain.layers import Linear, SplitBackward, Tokens
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.pipeline import Edge, Executor, Network, StageGraph, list_schedule, schedule
from hpctrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi

WIDTH = 6
# Of seeds 2, 4, 7, 9, 11: 1, 4, 6, 8, 8 stages; 0, 5, 8, 13, 12 edges; 0, 2, 3, 5, 4 users of an output at most.
WHOLE = [(seed, count, False) for seed, count in ((2, 1), (4, 17), (7, 2), (9, 5), (11, 17))]
SPLIT = [(seed, count, True) for seed, count in ((2, 5), (4, 1), (7, 17), (9, 2), (11, 5))]


class Stage(nn.Module):
    """tanh(W sum of the inputs), or tanh of the sum; the same tensor for all its users, or one for each; or a loss."""

    def __init__(self, users, weights, own_output, product):
        super().__init__()
        self.users, self.own_output = users, own_output
        self.product = product() if weights else nn.Identity()

    def forward(self, *inputs):
        if not self.users:
            *inputs, target = inputs
        y = self.product(functools.reduce(torch.add, inputs)).tanh()
        if not self.users:
            return (y - target).square().sum()
        return [y * (1 + 0.3 * i) for i in range(self.users)] if self.own_output else y


class OurProduct(nn.Module):
    """A Linear of hpctrain, whose weight gradients can be put off."""

    def __init__(self, grid):
        super().__init__()
        self.grid, self.linear = grid, Linear(grid, WIDTH, WIDTH, to="inner", dtype=torch.float64)

    def forward(self, x):
        return self.linear(x, Tokens.of(self.grid, 1, len(x)))


def plain(grid):
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def random_network(seed, kind=plain):
    """(graph, function grid -> the stages' functions): skips, joins, several first and last stages."""
    draw = random.Random(seed)
    stages = draw.randint(1, 8)
    edges = [(a, b) for b in range(stages) for a in range(b) if draw.random() < 0.55]
    draw.shuffle(edges)
    graph = StageGraph(stages, [Edge(*edge, (9, WIDTH), "float64") for edge in edges])
    options = [
        {"users": len(graph.out[s]), "weights": s == 0 or draw.random() < 0.8, "own_output": draw.random() < 0.3}
        for s in range(stages)
    ]
    return graph, lambda grid: [functools.partial(Stage, **o, product=functools.partial(kind, grid)) for o in options]


def random_placement(seed, stages, ranks):
    draw = random.Random(seed)
    placement = {(0, stage): draw.randrange(ranks) for stage in range(stages)}
    return {**placement, (0, stages - 1): ranks - 1}  # so that the schedule has all ranks


def microbatch(m):
    generator = torch.Generator().manual_seed(m)
    return tuple(torch.randn(3 + m % 3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))


def serial_stages(graph, stages):
    from mpi4py import MPI

    alone = Grid(comm=MPI.COMM_SELF)
    everything = list_schedule(graph, random_placement(0, graph.stages, 1), 1)
    network = Network(alone, everything, stages(alone), key=RngKey(3))
    return [network.stage[str(stage)] for stage in range(graph.stages)]


def serial(graph, stages, microbatches):
    """Losses by microbatch; the gradients are left on the stages. All edges lead to higher numbers."""
    losses = []
    for m in microbatches:
        x, target = microbatch(m)
        given, ends = {}, []
        for number, stage in enumerate(stages):
            inputs = [given[edge] for edge, _ in graph.into[number]] or [x]
            if not graph.out[number]:
                ends.append(stage(*inputs, target))
                continue
            y = stage(*inputs)
            for i, (edge, _) in enumerate(graph.out[number]):
                given[edge] = y if isinstance(y, torch.Tensor) else y[i]
        sum(ends).backward()
        losses += [end.detach() for end in ends]
    return losses


@pytest.mark.parametrize(("seed", "count", "split"), WHOLE + SPLIT)
def test_random_graphs_equal_plain_autograd(world, seed, count, split):
    """Losses and every gradient, bit for bit; with MPI_Ssend too."""
    grid = Grid(pipeline=world.size)
    graph, stages = random_network(seed, OurProduct if split else plain)
    placement = random_placement(seed, graph.stages, world.size)
    made = list_schedule(graph, placement, count, split=split)
    network = Network(grid, made, stages(grid), key=RngKey(3))
    split_backward = SplitBackward(network, grid.pipeline) if split else None
    executor = Executor(grid.pipeline, made, split_backward)
    reference = serial_stages(graph, stages)
    expected = serial(graph, reference, range(count))
    for grid.transport.synchronous in (False, True):
        network.zero_grad()
        losses = executor.run(network.work([microbatch(m) for m in range(count)]))
        assert sorted(loss for part in world.allgather(losses) for loss in part) == sorted(expected)
        for number in network.stages:
            gradients = [p.grad for p in network.stage[str(number)].parameters()]
            wanted = [p.grad for p in reference[number].parameters()]
            assert all(torch.equal(*pair) for pair in zip(gradients, wanted, strict=True))


def test_training_equals_plain_torch(world):
    """Three updates and an evaluation: exact on a pipeline alone, to rounding with replicas."""
    for data, pipeline in {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(1, 4), (2, 2)]}[world.size]:
        grid, count, seed = Grid(data=data, pipeline=pipeline), 5, 9
        graph, stages = random_network(seed)
        made = list_schedule(graph, random_placement(seed, graph.stages, pipeline), count)
        network = Network(grid, made, stages(grid), key=RngKey(3))
        weights = list(network.parameters())  # may be none
        trainer = Trainer(network, grid, torch.optim.SGD([{"params": weights}], 1e-3, momentum=0.9), made)
        reference = nn.ModuleList(serial_stages(graph, stages))
        optimizer = torch.optim.SGD(reference.parameters(), 1e-3, momentum=0.9)
        mine = range(grid.data.rank * count, (grid.data.rank + 1) * count)
        for _ in range(3):
            optimizer.zero_grad()
            expected = sum(serial(graph, reference, range(data * count)))
            optimizer.step()
            loss, _ = trainer.step([microbatch(m) for m in mine])
            assert loss == pytest.approx(expected.item(), rel=1e-12)
        after = {f"stage.{name}": weight for name, weight in reference.named_parameters()}
        names = set()
        for name, whole in whole_parameters(network, grid):
            names.add(name)
            if grid.rank == 0 and data == 1:
                assert torch.equal(whole, after[name])
            elif grid.rank == 0:
                torch.testing.assert_close(whole, after[name], rtol=1e-12, atol=1e-14)
        assert names == set(after)
        expected = sum(serial(graph, reference, range(data * count)))
        assert trainer.evaluate([[microbatch(m) for m in mine]]) == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.ranks(2, 4)
def test_two_replicas_of_each_stage(world):
    """Chimera on plain modules: gradients are summed over the ranks that hold a stage."""
    grid, graph = Grid(pipeline=world.size), StageGraph.chain(world.size, (9, WIDTH), "float64")
    made = dataclasses.replace(schedule("chimera", world.size, 4), graph=graph)

    def stages(grid):
        return [functools.partial(Stage, len(out), True, False, functools.partial(plain, grid)) for out in graph.out]

    network = Network(grid, made, stages(grid), key=RngKey(3))
    trainer = Trainer(network, grid, torch.optim.SGD(network.parameters(), 0.0), made)
    reference = serial_stages(graph, stages)
    expected = serial(graph, reference, range(4))
    loss, _ = trainer.step([microbatch(m) for m in range(4)])
    assert loss == pytest.approx(sum(expected).item(), rel=1e-12)
    for number in network.stages:
        for parameter, other in zip(network.stage[str(number)].parameters(), reference[number].parameters()):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-14)


class Deep(nn.Linear):
    """Left out at random, as torchvision's StochasticDepth does it."""

    def forward(self, x):
        keep = torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(0.5) if self.training else 1
        return x + keep * super().forward(x)


class Dropping(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", [Deep, Dropping])
def test_stages_that_draw(world, kind):
    """Their draws would be others on another grid: all ranks say so, before the first update."""
    grid, last = Grid(pipeline=world.size), world.size - 1
    made = list_schedule(StageGraph(2, [Edge(0, 1, (4, 2))]), {(0, 0): 0, (0, 1): last}, 1)
    pair = torch.ones(4, 2), torch.ones(4, 2)
    for functions, stage in (([lambda: kind(2, 2), nn.MSELoss], 0), ([lambda: nn.Linear(2, 2), lambda: Loss(kind)], 1)):
        network = Network(grid, made, functions)
        before = [p.detach().clone() for p in network.parameters()]
        trainer = Trainer(network, grid, torch.optim.SGD([{"params": list(network.parameters())}], 0.1), made)
        trainer.evaluate([[pair]])
        for _ in range(2):  # however often it is tried
            with pytest.raises(ValueError) as refused:
                trainer.step([pair])
            assert str(refused.value).startswith(f"stage {stage} draws random numbers from the generator of torch in ")
            assert len(set(world.allgather(str(refused.value)))) == 1
        assert all(torch.equal(p, q) for p, q in zip(network.parameters(), before))


class Returning(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, *given):
        return self.what


class Loss(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(2, 2)

    def forward(self, x, target):
        return (self.layer(x) - target).square().sum()


@pytest.mark.ranks(1, 2)
def test_refusals(world):
    from mpi4py import MPI

    grid = Grid(pipeline=world.size)
    last = world.size - 1

    def made(edge):
        return list_schedule(StageGraph(2, [edge]), {(0, 0): 0, (0, 1): last}, 1)

    def network(edge, functions, **options):
        return Network(grid, made(edge), functions, **options)

    ready, module = Edge(0, 1, (4, 2)), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="one function for each of 2 stages, got 1"):
        network(ready, [nn.Identity])
    with pytest.raises(ValueError, match="must be functions that make modules, got a Linear; put lambda: before"):
        network(ready, [nn.Identity, module])
    with pytest.raises(ValueError, match="key must be an RngKey, such as .* got 0"):
        network(ready, [nn.Identity] * 2, key=0)
    with pytest.raises(ValueError, match="needs a shape such as"):
        network((0, 1), [nn.Identity] * 2)
    with pytest.raises(ValueError, match="must be of floating point numbers"):
        network(Edge(0, 1, (4, 2), "int64"), [nn.Identity] * 2)
    with pytest.raises(ValueError, match="pipedream cuts microbatches or keeps several versions"):
        Network(grid, schedule("pipedream", world.size, 2), [nn.Identity] * world.size)
    if world.size == 1:
        with pytest.raises(ValueError, match="stages 0 and 1 share weight; make them one stage"):
            network(ready, [lambda: module] * 2)
    else:
        with pytest.raises(ValueError, match=f"weight of stage 0 is of plain torch, and {world.size} tensor ranks"):
            Network(Grid(tensor=world.size), schedule("1f1b", 1, 1), [lambda: module])
    with pytest.raises(ValueError, match="has a Dropout of torch, whose masks depend on the grid; set p=0"):
        network(ready, [lambda: nn.Dropout(0.1), nn.Identity])
    if world.size > 1:
        alone = schedule("1f1b", 1, 1)
        with pytest.raises(ValueError, match=f"has a BatchNorm1d .* would be those of one of {world.size} replicas"):
            Network(Grid(data=world.size), alone, [lambda: nn.BatchNorm1d(2)])
    if world.size % 2 == 0:
        two, shape = schedule("chimera", world.size, 2), lambda edge, microbatch: (4, 2)
        with pytest.raises(ValueError, match="has a BatchNorm1d .* those of one of 2 replicas.* with one replica"):
            Network(Grid(pipeline=world.size), two, [lambda: nn.BatchNorm1d(2)] * two.graph.stages, shape=shape)
    one = network(ready, [lambda: nn.Linear(2, 2), nn.MSELoss])
    trainer = Trainer(one, grid, torch.optim.SGD([{"params": list(one.parameters())}], 0.1), made(ready))
    pair = torch.ones(4, 2), torch.ones(4, 2)
    for number in (0, 2):
        with pytest.raises(ValueError, match=f"is made for 1 microbatches on each replica, got {number}"):
            trainer.step([pair] * number)
        with pytest.raises(ValueError, match=f"is made for 1 microbatches on each replica, got {number}"):
            trainer.evaluate([[pair] * number])
    for batch, got in ((pair[0], "a Tensor"), ((*pair, 1), "a tuple of 3")):
        for use in (trainer.step, lambda batches: trainer.evaluate([batches])):
            with pytest.raises(ValueError, match=rf"of a Network is a pair \(input, target\), got {got}"):
                use([batch])
    if grid.rank == 0:
        batch = torch.ones(3, 2), None
        with pytest.raises(ValueError, match=r"stage 0 gave \(3, 5\) of torch.float32 for .* where \(3, 2\)"):
            network_alone(ready, lambda: nn.Linear(2, 5))(0, [], batch)
        with pytest.raises(ValueError, match="stage 0 gave 2 tensors for 1 edges"):
            network_alone(ready, lambda: Stage(2, False, True, None))(0, [], batch)
        for nothing in (None, {"x": batch[0]}, (batch[0], 1)):
            with pytest.raises(ValueError, match=r"stage 0 must return a tensor, or a tuple of one for each edge, got"):
                network_alone(ready, lambda nothing=nothing: Returning(nothing))(0, [], batch)
        alone = list_schedule(StageGraph(1), {(0, 0): 0}, 1)
        for nothing, said in ((batch[0], r"one of shape \(3, 2\)"), (0.5, "0.5"), (None, "None")):
            head = Network(Grid(comm=MPI.COMM_SELF), alone, [lambda nothing=nothing: Returning(nothing)])
            with pytest.raises(ValueError, match=f"stage 0 must return the loss, a tensor of one number, got {said}"):
                head(0, [], batch)


def test_a_stage_that_changes_its_input_in_place(world):
    """Refused in evaluation too, where torch lets it pass: other stages of its rank have the same input."""

    class Relu(nn.Module):
        def forward(self, x, target):
            return x.relu_().sum()

    network = network_alone(Edge(0, 1, (4, 2)), nn.Identity, Relu)
    with torch.no_grad(), pytest.raises(ValueError, match=r"stage 1 changes its input in place.*ReLU\(inplace=False"):
        network(1, [torch.ones(4, 2)], (torch.ones(4, 2), None))


@pytest.mark.ranks(2)
def test_a_stage_that_cannot_be_made_is_everybodys(world):
    def broken():
        raise ValueError("no such stage")

    graph = StageGraph(2, [Edge(0, 1, (4, 2))])
    with pytest.raises(ValueError, match="no such stage"):
        Network(Grid(pipeline=2), list_schedule(graph, {(0, 0): 0, (0, 1): 1}, 1), [lambda: nn.Linear(2, 2), broken])


def network_alone(edge, first, second=nn.Identity):
    from mpi4py import MPI

    made = list_schedule(StageGraph(2, [edge]), {(0, 0): 0, (0, 1): 0}, 1)
    return Network(Grid(comm=MPI.COMM_SELF), made, [first, second])
