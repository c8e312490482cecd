"""AMPNet: one instance at a time is serial SGD to the bit; any number ends on any graph; a recorded run comes again."""

import math
from collections import Counter

import ampnet_checks as checks
import pytest
import torch

from hpctrain import Grid, RngKey
from hpctrain.pipeline import AMPNet
from hpctrain.pipeline.ampnet import MessageNetwork, Record
from hpctrain.train.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.002, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
}


def chain_of(world, synchronous=False):
    grid = checks.chain_of_ranks(world.size)
    grid.transport.synchronous = synchronous
    return grid


def trainer_of(grid, graph, placement, options, optimizer="sgd"):
    network = MessageNetwork(grid, graph, placement, key=RngKey(7))
    made = OPTIMIZERS[optimizer]([{"params": list(network.parameters())}])
    return Trainer(network, grid, made, options)


def modules_of(graph):
    """Those of all nodes, with the weights that they have on any grid."""
    from mpi4py import MPI

    return MessageNetwork(Grid(comm=MPI.COMM_SELF), graph, key=RngKey(7)).node


def serially(shape, instances, every, optimizer, steps):
    """A plain program: (modules, losses of the steps). Every node is updated after `every` instances that came to it,
    and at the end of a step."""
    graph, _, loss_of = checks.SHAPES[shape]
    node, means = modules_of(graph()), []
    made = {name: OPTIMIZERS[optimizer](m.parameters()) for name, m in node.items() if list(m.parameters())}
    visited = set()
    for name in made:
        node[name].register_forward_hook(lambda *_, name=name: visited.add(name))
    for _ in range(steps):
        losses, came = [], Counter()
        for number, instance in enumerate(instances):
            visited.clear()
            found = loss_of(node, instance, number)
            sum(found).backward()
            losses += [loss.detach() for loss in found]
            for name in made:
                came[name] += name in visited
                if came[name] == every or (came[name] and number + 1 == len(instances)):
                    made[name].step()
                    made[name].zero_grad()
                    came[name] = 0
        updates = math.ceil(len(instances) / every)
        means.append(torch.stack([loss / updates for loss in losses]).sum())
    return node, means


def same_weights(network, node):
    for name, p in network.node.named_parameters():
        assert torch.equal(p, node.get_parameter(name)), name


@pytest.mark.parametrize(("every", "optimizer", "synchronous"), [(1, "sgd", False), (3, "adam", True)])
@pytest.mark.parametrize("shape", checks.SHAPES)
def test_one_key_is_serial_sgd_to_the_bit(world, shape, every, optimizer, synchronous):
    """Weights and losses, wherever the nodes are; 7 instances, so that the last update is of one of them alone."""
    graph, instances_of, _ = checks.SHAPES[shape]
    instances = instances_of(7)
    node, losses = serially(shape, instances, every, optimizer, steps=2)
    for seed in range(2):
        grid = chain_of(world, synchronous)
        made = graph()
        placement = checks.random_placement(seed, made, world.size)
        trainer = trainer_of(grid, made, placement, AMPNet(1, every), optimizer)
        for loss in losses:
            assert trainer.step(instances)[0] == pytest.approx(loss.item(), rel=1e-14)
        same_weights(trainer.model, node)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("shape", ["branch", "loop"])
def test_the_norm_is_of_the_gradients_of_all_nodes(world, shape):
    """Wherever they are. With one update a step it is that of autograd; in the second step, of one instance, "branch"
    has a node that no message comes to."""
    graph, instances_of, loss_of = checks.SHAPES[shape]
    steps = [instances_of(4), instances_of(1)]
    node, expected = modules_of(graph()), []
    optimizer = OPTIMIZERS["sgd"](node.parameters())
    for instances in steps:
        optimizer.zero_grad()
        sum(loss for i, instance in enumerate(instances) for loss in loss_of(node, instance, i)).backward()
        expected.append(math.hypot(*(p.grad.norm().item() for p in node.parameters() if p.grad is not None)))
        optimizer.step()
    for seed in range(2):
        made = graph()
        trainer = trainer_of(chain_of(world), made, checks.random_placement(seed, made, world.size), AMPNet(1, 9))
        assert [trainer.step(instances)[1] for instances in steps] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", checks.SHAPES)
def test_many_keys_with_one_update_a_step_are_serial(world, shape):
    """To rounding: no gradient is stale, and they are added in another order."""
    graph, instances_of, _ = checks.SHAPES[shape]
    instances = instances_of(7)
    node, losses = serially(shape, instances, 7, "sgd", steps=2)
    made = graph()
    trainer = trainer_of(chain_of(world), made, checks.random_placement(2, made, world.size), AMPNet(4, 999))
    for loss in losses:
        assert trainer.step(instances)[0] == pytest.approx(loss.item(), rel=1e-12)
    for name, p in trainer.model.node.named_parameters():
        torch.testing.assert_close(p, node.get_parameter(name), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.ranks(*([1, 2] if seed % 2 else [2, 4]))) for seed in range(20)]
)
def test_random_graphs_end(world, seed):
    """Loops within branches within loops, by MPI_Issend: every instance comes back, and nothing is left anywhere."""
    grid = chain_of(world, synchronous=True)
    graph = checks.random_graph(seed)
    placement = checks.random_placement(seed, graph, world.size)
    keys = 1 + seed % 5
    trainer = trainer_of(grid, graph, placement, AMPNet(keys, 1 + seed % 3))
    instances = checks.chain_instances(9)
    loss, _ = trainer.step(instances)
    assert math.isfinite(loss)
    assert trainer.evaluate([instances]) == len(instances)  # one for every loss that was computed
    left = {name: node.waiting() for name, node in graph.nodes.items()}
    assert left == dict.fromkeys(graph.nodes, 0)


@pytest.mark.parametrize("shape", ["branch", "loop", "tree"])
def test_a_recorded_run_comes_again_to_the_bit(world, shape, tmp_path):
    graph, instances_of, _ = checks.SHAPES[shape]
    instances, results = instances_of(12), []
    record, path = Record(), tmp_path / f"{world.rank}.json"
    for replay in (False, True):
        made = graph()
        grid = chain_of(world)
        placement = checks.random_placement(1, made, world.size)
        trainer = trainer_of(grid, made, placement, AMPNet(5, 2), "adam")
        passes = trainer.message_driven
        if replay:
            record.save(path)
            passes.replay = Record.load(path)
            passes.record = again = Record()
        else:
            passes.record = record
        results.append([trainer.step(instances) for _ in range(2)])
        results.append([p.clone() for p in trainer.model.parameters()])
    assert results[0] == results[2]
    assert all(torch.equal(a, b) for a, b in zip(results[1], results[3], strict=True))
    assert again.runs == record.runs
    assert len(record.runs) == 2
    with pytest.raises(ValueError, match="replay has 2 steps, and all were repeated; take no more"):
        trainer.step(instances)
    assert passes.replay.runs == record.runs


def test_stale_gradients_are_counted_and_slow_the_update(world):
    """4 keys in a chain of one node a rank: the first node's gradients are older than the last one's."""
    grid = chain_of(world)
    graph = checks.chain()
    names = list(graph.nodes)
    placement = {name: i * world.size // len(names) for i, name in enumerate(names)}
    trainer = trainer_of(grid, graph, placement, AMPNet(4, 1))
    trainer.step(checks.chain_instances(40))
    report = trainer.report()
    stale = report["nodes"]["a"]["staleness"]
    assert sum(stale) == 40
    assert len(stale) <= 40
    assert report["nodes"]["b"]["staleness"] == [40]  # its gradients follow at once
    assert len(report["occupancy"]) == world.size
    assert all(0 < part <= 1 for part in report["occupancy"])
    assert report["nodes"]["a"]["queue"] >= 1
    assert report["nodes"]["b"]["messages"] == 40
    if world.size == 1:
        assert stale == [40]  # gradients first
    assert trainer.report()["nodes"]["b"]["messages"] == 0  # since the last report


def test_an_error_in_a_node_is_everybodys(world):
    """In the middle of a run, on the rank of the head alone."""
    grid = Grid(pipeline=world.size)  # whose messages are not all received
    graph = checks.loop()
    trainer = trainer_of(grid, graph, checks.random_placement(3, graph, world.size), AMPNet(3))
    instances = checks.loop_instances(9)
    instances[5] = instances[5][0], torch.zeros(2, 3, dtype=torch.float64)  # no target for WIDTH outputs
    with pytest.raises(RuntimeError, match="size of tensor"):
        trainer.step(instances)
