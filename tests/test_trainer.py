"""ht.Trainer's two kinds of models: whole ones with a loss, and those that are cut into stages."""

import dataclasses
import math

import ampnet_checks
import pytest
import torch
from torch import nn
from training_checks import UNEVEN, batches, fitting, microbatches, train_on

import hpctrain as ht
from hpctrain.data_parallel import DataParallel
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.pipeline import AMPNet, forward_only, one_f_one_b, schedule
from hpctrain.pipeline.ampnet import MessageNetwork
from hpctrain.pipeline.network import Network

pytestmark = pytest.mark.mpi

X = torch.arange(8, dtype=torch.float64).view(4, 2)


def square(model, x):
    return model(x).square().sum()


def line(grid):
    """y = 2 a + 3 b, without bias."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    model.weight.data.copy_(torch.tensor([[2.0, 3.0]]))
    return ht.parallelize(model, grid)


def test_forward_backward_then_update(world):
    """The loss is 3² + 13² + 23² + 33² on each replica; weights change with the update alone."""
    grid = ht.Grid(data=world.size)
    model = line(grid)
    trainer = ht.Trainer(model, grid, torch.optim.SGD(model.parameters(), 0.25), loss=square, max_norm=1.0)
    loss, norm, overflow = trainer.forward_backward([X[:2], X[2:]])
    assert (loss, overflow) == (1796.0 * world.size, False)
    # 2 Σ y a = 2 (0·3 + 2·13 + 4·23 + 6·33) = 632, 2 Σ y b = 2 (3 + 3·13 + 5·23 + 7·33) = 776
    assert norm == pytest.approx((632**2 + 776**2) ** 0.5 * world.size, rel=1e-14)
    assert model.weight.tolist() == [[2.0, 3.0]]
    trainer.update(norm)
    expected = torch.tensor([[2 - 0.25 * 632 * world.size / norm, 3 - 0.25 * 776 * world.size / norm]])
    torch.testing.assert_close(model.weight.detach(), expected.double(), rtol=1e-6, atol=0)


def test_evaluation_of_a_whole_model(world):
    """Over all batches and replicas; none where all are told to stop."""
    grid = ht.Grid(data=world.size)
    model = line(grid)
    trainer = ht.Trainer(model, grid, torch.optim.SGD(model.parameters(), 0.25), loss=square)
    assert trainer.evaluate([[X[:2]], [X[2:3], X[3:]]]) == 1796.0 * world.size
    assert trainer.evaluate([[X]], lambda: True) is None


def test_the_grid_of_a_trainer_is_watched(world):
    """By one watchdog, also where there are several trainers."""
    grid = ht.Grid(data=world.size)
    model = ht.layers.Linear(grid, 2, 2, to="inner", key=ht.RngKey(0))  # parallelize has a watchdog of its own
    found = []
    for _ in range(2):
        ht.Trainer(model, grid, torch.optim.SGD(model.parameters(), 0.25), loss=square)
        found.append(grid.transport.watchdog)
    assert (found[0] is not None) == (world.size > 1)
    assert found[1] is found[0]


def test_the_grid_of_a_network_is_watched(world):
    """Before the functions that make its modules, one of which may fail where others communicate."""
    found = []

    def made(grid, make):
        def module():
            found.append(grid.transport.watchdog)
            return make()

        return module

    grid, size = ht.Grid(pipeline=world.size), world.size
    Network(grid, one_f_one_b(size, 1), [made(grid, nn.Tanh)] * size, shape=lambda edge, batch: (1, 2))
    grid, graph = ht.Grid(pipeline=size), ampnet_checks.chain()
    graph.nodes["tanh"].make = made(grid, nn.Tanh)
    MessageNetwork(grid, graph, dict.fromkeys(graph.nodes, grid.pipeline.rank))
    assert [each is not None for each in found] == [size > 1] * 2


def test_what_is_missing_is_said(world):
    grid = ht.Grid(data=world.size)
    model = line(grid)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="Linear is not cut into pipeline stages: give the Trainer loss="):
        ht.Trainer(model, grid, optimizer)
    with pytest.raises(ValueError, match="schedule is for a model that is cut into pipeline stages"):
        ht.Trainer(model, grid, optimizer, 2, loss=square)


@pytest.mark.ranks(2, 4)
def test_a_loss_of_the_whole_model_meets_a_pipeline(world):
    grid = ht.Grid(pipeline=world.size)
    model = GPT2(grid, GPT2Shape(world.size, 4, 1, 4, 8), key=ht.RngKey(0))
    with pytest.raises(ValueError, match=f"pipeline={world.size} and a loss of the whole model: use pipeline=1"):
        ht.Trainer(model, grid, torch.optim.SGD(model.parameters(), 0.1), loss=square)


def test_a_weight_that_the_loss_does_not_depend_on(world, caplog):
    grid = ht.Grid(data=world.size)
    torch.manual_seed(0)
    model = ht.parallelize(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), grid)
    trainer = ht.Trainer(
        model, grid, torch.optim.SGD(model.parameters(), 0.1), loss=lambda model, x: model[0](x).square().sum()
    )
    for _ in range(2):
        trainer.step([X.float()])
    warned = "the loss does not depend on 1.weight, 1.bias: their gradients are taken as zero"
    assert caplog.text.count(warned) == (grid.data.rank == 0)


@pytest.mark.ranks(2)
def test_a_second_replica_of_the_stages_without_work(world, caplog):
    """Of one microbatch chimera's second pipeline has none: the other has the gradient of the same weights."""
    train_on(ht.Grid(pipeline=2), fitting(UNEVEN, 2), 1, 0.0, steps=1, pipeline="chimera")
    assert "does not depend on" not in caplog.text


class Normalised(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_plain_module_is_divided_first(world, axis):
    """Its optimizer may be there before: it gets the parameters that are trained. The statistics are of all batches."""
    from mpi4py import MPI

    trained = []
    for grid in (ht.Grid(comm=MPI.COMM_SELF), ht.Grid(**{axis: world.size})):
        torch.manual_seed(0)
        model = Normalised().double()
        optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
        trainer = ht.Trainer(model, grid, optimizer, loss=square)
        batch = X.view(grid.data.size, -1, 2)[grid.data.rank]
        trained.append([*(trainer.step([batch]) for _ in range(3)), *ht.gather_state_dict(model).values()])
    for got, expected in zip(*trained[::-1], strict=True) if world.rank == 0 else []:
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_what_a_trainer_cannot_take(world):
    grid = ht.Grid(data=world.size)

    def trainer(made_for=grid, model=None, loss=square, **options):
        model = model or line(made_for)
        return ht.Trainer(model, grid, torch.optim.SGD(model.parameters(), 0.1), loss=loss, **options)

    for number in (-1.0, math.nan, "1", True):
        with pytest.raises(ValueError, match="max_norm must be a number from 0 on, got "):
            trainer(max_norm=number)
    for loss, got in ((lambda model, x: model(x), r"shape \(4, 1\)"), (lambda model, x: 0.5, "0.5")):
        with pytest.raises(ValueError, match=f"a scalar tensor that depends on the weights, got {got}"):
            trainer(loss=loss).step([X])
    for use in (trainer().step, lambda batch: trainer().evaluate([batch])):  # every row would be a batch
        with pytest.raises(ValueError, match=r"batches must be a list, such as \[batch\], got a Tensor"):
            use(X)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="Linear is not cut into pipeline stages: give the Trainer loss="):
        ht.Trainer(model, grid, optimizer)
    assert not hasattr(model.weight, "shard"), "divided before the error"
    model(X.float()).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="Linear is a plain module, and its optimizer has states of whole weights"):
        ht.Trainer(model, grid, optimizer, loss=square)
    if world.size > 1:
        other = ht.Grid(tensor=world.size)
        message = rf"for data 1 × pipeline 1 × tensor \({world.size}, 1, 1\), and the Trainer got data {world.size}"
        with pytest.raises(ValueError, match=message):
            trainer(made_for=other)


@pytest.mark.ranks(1, 2)
def test_a_strategy_is_of_the_same_optimizer_and_grid(world):
    grid, other = ht.Grid(data=world.size), ht.Grid(data=world.size)
    model = line(grid)
    optimizer, another = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    cases = [
        (DataParallel(model.parameters(), grid, another), "the optimizer of the Trainer, got a DataParallel of"),
        (DataParallel(model.parameters(), grid), "DataParallel was made without the optimizer that is to update"),
    ]
    if world.size > 1:
        of_another = DataParallel(model.parameters(), ht.Grid(tensor=world.size), optimizer)
        cases.append((of_another, "the grid of the Trainer, got a DataParallel of"))
    for strategy, message in cases:
        with pytest.raises(ValueError, match=message):
            ht.Trainer(model, grid, optimizer, loss=square, strategy=strategy)
    of_same_shape = DataParallel(model.parameters(), other, optimizer)
    loss, _ = ht.Trainer(model, grid, optimizer, loss=square, strategy=of_same_shape).step([X])
    assert loss == 1796.0 * world.size


@pytest.mark.ranks(2)
def test_what_is_refused_leaves_an_earlier_trainer_alone(world):
    grid, shape = ht.Grid(pipeline=2), dataclasses.replace(fitting(UNEVEN, 2), tied=False)
    model = GPT2(grid, shape, key=ht.RngKey(0))
    given = model, grid, torch.optim.SGD(model.parameters(), 0.1)
    trainer = ht.Trainer(*given, 2)
    for message, order, options in (
        (r"pipedream .*train\.clip=0", schedule("pipedream", 2, 2), {"max_norm": 1.0}),
        (r"AMPNet .*train\.clip=0", AMPNet(), {"max_norm": 1.0}),
        ("places the stages as", schedule("ampnet", 4, 8), {}),
        ("places the stages as", schedule("zb-v", 2, 2), {}),
        ("terapipe is made for 2 slices", schedule("terapipe", 2, 2), {}),
    ):
        with pytest.raises(ValueError, match=message):
            ht.Trainer(*given, order, **options)
    assert math.isfinite(trainer.step(microbatches(grid, batches(shape, 1)[0], 0, 2))[0])


@pytest.mark.ranks(2)
def test_what_is_no_schedule_of_the_model(world):
    grid = ht.Grid(pipeline=2)
    model = GPT2(grid, GPT2Shape(2, 4, 1, 4, 8, tied=False), key=ht.RngKey(0))

    def refused(message, schedule, **options):
        with pytest.raises(ValueError, match=message):
            ht.Trainer(model, grid, torch.optim.SGD(model.parameters(), 0.1), schedule, **options)

    evaluates = forward_only(2, 1, model.placement)
    for given, got in ((0, "0"), (-1, "-1"), (True, "True"), ("1f1b", "'1f1b'"), (evaluates, "'forward_only'")):
        refused(f"schedule must be a number of microbatches from 1 on, .* got {got}; use", given)
    refused("the schedule ampnet places the stages as .*; make the model with placement=", schedule("ampnet", 4, 8))
    pipedream = schedule("pipedream", 2, 2)
    for given, options in ((AMPNet(), {}), (schedule("ampnet", 4, 8), {}), (pipedream, {}), (None, {"loss": square})):
        refused(r"slices=\[2, 2\]: only a pipelined model of ht.models, without loss=", given, slices=[2, 2], **options)
