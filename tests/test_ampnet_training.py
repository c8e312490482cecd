"""GPT-2, Llama and networks of one's own by AMPNet: equal to the flushed pipeline with one key, saved and refused."""

import dataclasses
import resource
import signal
from types import SimpleNamespace

import ampnet_checks as checks
import pytest
import torch
from test_ampnet import chain_of, trainer_of
from torch import nn
from training_checks import UNEVEN, batches, fitting, made, microbatches

import hpctrain as ht
from hpctrain import Grid, RngKey
from hpctrain.config import load_config
from hpctrain.data_parallel import Zero1
from hpctrain.models.llama import LlamaShape
from hpctrain.pipeline import AMPNet, Network, schedule
from hpctrain.pipeline.ampnet import Loss, MessageGraph, MessageNetwork, Source, Transform
from hpctrain.train.message_order import MESSAGES, MessageOrder
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.sanity import Stopped
from hpctrain.train.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]

LLAMA = LlamaShape(layers=5, width=16, heads=4, kv_heads=2, ffn=24, head_width=4, context=8, vocabulary=23, tied=False)


def shapes(ranks):
    return {"gpt2": dataclasses.replace(fitting(UNEVEN, ranks), tied=False, dropout=0.2), "llama": LLAMA}


def trained(grid, shape, order, groups):
    """Weights and losses after steps of these groups of microbatches."""
    model = made(grid, shape, None, order.placement)
    trainer = Trainer(model, grid, make_optimizer(model.parameters(), 0.1), order)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e-2
    losses = [trainer.step(group)[0] for group in groups]
    return dict(model.named_parameters()), losses, trainer


def serially(shape, steps, every):
    """Weights, losses and validation of the whole model on one rank, by autograd and the optimizer alone."""
    from mpi4py import MPI

    alone = Grid(comm=MPI.COMM_SELF)
    model, means = made(alone, shape), []
    optimizer = make_optimizer(model.parameters(), 0.1)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    for step, batch in enumerate(steps):
        losses = []
        for number, microbatch in enumerate(microbatches(alone, batch, step, 3)):
            loss = model.loss(model(microbatch.ids, microbatch.tokens), microbatch.targets, microbatch.scale)
            loss.backward()
            losses.append(loss.item())
            if (number + 1) % every == 0 or number == 2:
                optimizer.step()
                optimizer.zero_grad()
        means.append(sum(losses) / -(-3 // every))
    model.eval()
    parts = microbatches(alone, steps[0], 0, 3)
    validation = sum(model.loss(model(m.ids, m.tokens), m.targets, m.scale).item() for m in parts)
    return dict(model.named_parameters()), means, validation


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_one_key_is_serial_sgd_to_the_bit(world, kind):
    """An update after all 3 microbatches of a step, after 2 and the last, and after each."""
    shape, size = shapes(world.size)[kind], world.size
    grid = chain_of(world, kind == "llama")
    steps = [microbatches(grid, batch, step, 3) for step, batch in enumerate(batches(shape))]
    for every in (3, 2, 1):
        expected, losses, validation = serially(shape, batches(shape), every)
        order = schedule("ampnet", size, 3, max_active_keys=1, min_update_frequency=every)
        weights, found, trainer = trained(grid, shape, order, steps)
        assert found == pytest.approx(losses, rel=1e-14)
        assert all(torch.equal(p, expected[name]) for name, p in weights.items())
        assert trainer.evaluate([steps[0]]) == pytest.approx(validation, rel=1e-14)


@pytest.mark.ranks(2)
def test_two_stages_on_a_rank(world):
    """Each updates its own weights: the first and the last stage are on rank 0, to the bit as one rank."""
    grid, shape = chain_of(world), shapes(2)["gpt2"]
    steps = [microbatches(grid, batch, step, 3) for step, batch in enumerate(batches(shape))]
    expected, losses, _ = serially(shape, batches(shape), 1)
    model = made(grid, shape, [1, 1, 1], {(0, 0): 0, (0, 1): 1, (0, 2): 0})
    trainer = Trainer(model, grid, make_optimizer(model.parameters(), 0.1), AMPNet(1))
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e-2
    assert [trainer.step(step)[0] for step in steps] == pytest.approx(losses, rel=1e-14)
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


def test_many_keys_train_as_well(world):
    """Not the same weights, but about the same loss; and it is finite for any number of microbatches and keys."""
    shape, size = shapes(world.size)["gpt2"], world.size
    grid = chain_of(world)
    steps = [microbatches(grid, batch, 0, 5) for batch in [batches(shape, 1)[0]] * 12]
    _, losses, _ = trained(grid, shape, schedule("1f1b", size, 5), steps)
    for keys, every in ((8, 5), (3, 2)):
        order = schedule("ampnet", size, 5, max_active_keys=keys, min_update_frequency=every, staleness_correction=True)
        _, found, trainer = trained(grid, shape, order, steps)
        assert found[-1] < losses[0] - 0.5 * (losses[0] - losses[-1]) / (1 if every == 5 else 3)
        stale = [s for node in trainer.report()["nodes"].values() for s in [node.get("staleness")] if s]
        assert sum(map(sum, stale)) == size * 12 * 5


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_checkpoint_between_steps(world, tmp_path, elsewhere):
    """With one key a resumed run goes on to the bit, on another placement too; nothing is under way between steps."""
    folder = world.bcast(tmp_path)
    grid = chain_of(world)
    instances = checks.loop_instances(8)

    def fresh(seed):
        graph = checks.loop()
        return trainer_of(grid, graph, checks.random_placement(seed, graph, world.size), AMPNet(1, 3), "adam")

    trainer = fresh(0)
    trainer.step(instances)
    ht.checkpoint.save(folder, 1, trainer.model, trainer.strategy)
    expected = trainer.step(instances)[0], trainer.evaluate([instances])
    other = fresh(5 if elsewhere else 0)
    assert ht.checkpoint.load(folder, other.model, other.strategy).step == 1
    assert (other.step(instances)[0], other.evaluate([instances])) == expected


def test_the_order_in_a_file(world, tmp_path):
    """A line that a stop cut short, or that is damaged, is left out, the later of two of one batch is taken; settings
    are compared."""
    grid, folder = chain_of(world), world.bcast(tmp_path)
    size, rank = world.size, world.rank

    def order(keys=3, **settings):
        options = [f"pipeline.{name}={value}" for name, value in settings.items()]
        options += ["pipeline.schedule=ampnet", f"grid.pipeline={size}", "train.clip=0", "model.tied=false"]
        config = load_config(overrides=[*options, f"run.out={folder}", "run.name=parts"])
        config.folder.mkdir(exist_ok=True)
        driven = SimpleNamespace(options=AMPNet(keys), record=None, replay=None)
        return MessageOrder(config, grid, SimpleNamespace(message_driven=driven)), driven

    if rank == 0:
        (folder / "parts").mkdir()
        (folder / "parts" / MESSAGES).write_text('{"grid.pipe')
    world.Barrier()
    for first in (0, 1):  # the second job goes on after batch 0, as its checkpoint was of then
        recorded, driven = order(record="true")
        for batch in range(first, first + 2):
            recorded.before(batch)
            driven.record.runs.append([(rank, 0, (batch, first))])
            recorded.after(batch)
        if rank == 0:
            with open(folder / "parts" / MESSAGES, "a") as file:
                file.write('{"batch": 1, "ranks": [5, 5, 5, 5]}\n{"batch": 0, "ran')
        world.Barrier()
    again, driven = order(replay=folder / "parts")
    for batch, first in ((0, 0), (1, 1), (2, 1)):
        again.before(batch)
        assert driven.replay.runs == [[(rank, 0, (batch, first))]]
        assert driven.record is None
    with pytest.raises(Stopped, match="pipeline.replay has batches 0 to 2, and no 3"):  # one line ends the job
        again.before(3)
    with pytest.raises(ValueError, match="max_active_keys = 3, .* and this one has .*max_active_keys = 2"):
        order(2, replay=folder / "parts")
    if rank == 0:  # a job that went on with fewer keys
        with open(folder / "parts" / MESSAGES, "a") as file:
            file.write('\n{"pipeline.max_active_keys": 1}\n{"batch": 2, "ranks": [[], []]}\n')
    world.Barrier()
    with pytest.raises(ValueError, match="of a run with pipeline.max_active_keys = 1, and this one has"):
        order(replay=folder / "parts")
    with pytest.raises(ValueError, match="pipeline.replay: .*No such file.*; use the folder of another run, which had"):
        order(replay=folder / "none")


def test_a_full_disk_leaves_a_batch_out(world, tmp_path, caplog):
    """Training goes on, and the batch after it is on a line of its own."""
    grid, folder = chain_of(world), world.bcast(tmp_path)
    size, path = world.size, folder / "run" / MESSAGES
    options = ["pipeline.schedule=ampnet", f"grid.pipeline={size}", "train.clip=0", "model.tied=false"]
    options += [f"run.out={folder}", "run.name=run"]

    def order(*more):
        driven, config = SimpleNamespace(options=AMPNet(3), record=None, replay=None), [*options, *more]
        return MessageOrder(load_config(overrides=config), grid, SimpleNamespace(message_driven=driven)), driven

    if world.rank == 0:
        path.parent.mkdir()
    recorded, driven = order("pipeline.record=true")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for batch in range(3):
        recorded.before(batch)
        driven.record.runs.append([(world.rank, 0, (batch, 0))])
        if batch == 1 and world.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, usual[1]))
        recorded.after(batch)
        if batch == 1 and world.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    signal.signal(signal.SIGXFSZ, handler)
    warned = [record.message for record in caplog.records if "lacks batch" in record.message]
    assert warned == [f"WARNING: {path} lacks batch 1: [Errno 27] File too large"] * (world.rank == 0)
    world.Barrier()
    again, driven = order(f"pipeline.replay={path.parent}")
    for batch in (0, 2):
        again.before(batch)
        assert driven.replay.runs == [[(world.rank, 0, (batch, 0))]]
    with pytest.raises(Stopped, match="and no 1"):
        again.before(1)


def test_bytes_are_those_of_the_messages(world):
    """A header of 31 numbers and the payload, forward and back; at the end the first rank tells each other one."""
    shape, size, header = shapes(world.size)["llama"], world.size, 31 * 8
    grid = chain_of(world)
    steps = [microbatches(grid, batch, step, 3) for step, batch in enumerate(batches(shape, 1))]
    order = schedule("ampnet", size, 3)
    model = made(grid, shape, None, order.placement)
    trainer = Trainer(model, grid, make_optimizer(model.parameters(), 0.1), order)
    grid.transport.traffic.clear()
    trainer.step(steps[0])
    table = grid.transport.traffic.table()
    rows = sum(len(batch) * 7 for batch in batches(shape, 1))
    neighbours = (grid.pipeline.rank > 0) + (grid.pipeline.rank < size - 1)
    payloads = neighbours * rows * shape.width * 8
    told = size - 1 if grid.pipeline.rank == 0 else 0
    sent = table.get(("pipeline", "send"), {"sent": 0})["sent"]
    received = table.get(("pipeline", "recv"), {"received": 0})["received"]
    assert sent == payloads + (neighbours * 3 + told) * header
    assert received == payloads + (neighbours * 3 + (grid.pipeline.rank > 0)) * header


def refused(grid, match, model=None, options=None, optimizer=None, **more):
    model = model or MessageNetwork(grid, checks.chain(), key=RngKey(0))
    optimizer = optimizer or torch.optim.SGD([{"params": list(model.parameters())}], 0.1)
    with pytest.raises(ValueError, match=match):
        Trainer(model, grid, optimizer, options or AMPNet(), **more)


def test_what_does_not_go_with_it(world):
    grid = chain_of(world)
    refused(grid, "train.clip=0", max_norm=1.0)
    network = MessageNetwork(grid, checks.chain(), key=RngKey(0))
    optimizer = torch.optim.SGD([{"params": list(network.parameters())}], 0.1)
    sharded = Zero1(list(network.parameters()), grid, optimizer)
    refused(grid, "got Zero1", network, optimizer=optimizer, strategy=sharded)
    order = schedule("gpipe", world.size, 2)
    refused(grid, "and a MessageNetwork by an AMPNet", network, order)
    stages = [lambda: nn.Linear(2, 2)] * world.size
    network = Network(grid, order, stages, key=RngKey(0), shape=lambda edge, pair: (1, 2))
    for delayed in (AMPNet(), schedule("pipedream", world.size, 2)):
        refused(grid, "a Network is run by a Schedule with a flush", network, delayed)
    shape = fitting(UNEVEN, world.size)  # tied
    two = {(0, 0): 0, (0, 1): world.size - 1}
    refused(grid, "model.tied=false", made(grid, shape, placement=two))  # on one rank or two
    untied, own = dataclasses.replace(shape, tied=False), schedule("ampnet", world.size, 2)
    refused(grid, "AMPNet .* recompute='block' .*; use recompute='none'", made(grid, untied, recompute="block"), own)
    replicas = {(replica, stage): 0 for replica in (0, 1) for stage in (0, 1)}
    refused(grid, "has one replica of each stage", made(grid, untied, placement=replicas))
    if world.size > 1:
        refused(grid, "model.tied=false", made(grid, shape), schedule("ampnet", world.size, 2))
        for axes in ({"data": world.size}, {"tensor": world.size}):
            other = Grid(**axes)
            refused(other, "use grid.data = 1 and grid.tensor = 1")
    with pytest.raises(ValueError, match="placement must give node 'tanh' one of"):
        MessageNetwork(grid, checks.chain(), {"source": 0, "a": 0, "b": 0})
    with pytest.raises(ValueError, match="Dropout"):
        graph = MessageGraph().add("source", Source()).add("a", Transform(nn.Dropout)).add("b", Loss(checks.Head))
        MessageNetwork(grid, graph.connect("source", "a").connect("a", "b"))
