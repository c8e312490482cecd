"""Saved on one grid, loaded on another: weights and optimizer exactly equal, the losses that follow to rounding."""

import dataclasses

import pytest
import torch
from training_checks import UNEVEN, batches, fitting, microbatches

from hpctrain import Grid, RngKey, shard_entries
from hpctrain.checkpoint import Checkpointer, TrainingState, manifests
from hpctrain.config import DataParallelConfig
from hpctrain.data_parallel import make
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.models.gpt2 import GPT2
from hpctrain.shard_entries import Entry, rectangles, replicas_part
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4, 8)]

SHAPE = dataclasses.replace(fitting(UNEVEN, 2), dropout=0.2)

# (ranks, data, pipeline, tensor), by number of ranks: from the first grid to the others, which may leave ranks out.
GRIDS = {
    1: [(1, 1, 1, 1)],
    2: [(2, 1, 2, 1), (2, 2, 1, 1), (2, 1, 1, (1, 2, 1)), (2, (1, 2, 1), 1, 1), (1, 1, 1, 1)],
    3: [(3, 3, 1, 1), (2, 1, 2, 1), (3, 1, 1, (1, 1, 3))],
    4: [
        (4, (2, 1, 2), 1, 1),
        (4, (1, 2, 2), 1, 1),
        (4, 2, 1, (2, 1, 1)),
        (4, 1, 2, (1, 1, 2)),
        (3, 3, 1, 1),
        (4, 4, 1, 1),
    ],
    6: [(6, 3, 2, 1), (6, 1, 1, (3, 2, 1))],
    8: [(8, 2, 2, (2, 1, 1)), (1, 1, 1, 1), (8, 1, 2, (2, 2, 1)), (3, 3, 1, 1)],
}


@pytest.fixture(autouse=True)
def _many_writers(world, monkeypatch):
    """Every replica saves a part; on three ranks and more, in several groups."""
    monkeypatch.setattr(shard_entries, "LEAST", 1)
    if world.size > 2:
        monkeypatch.setattr(manifests, "GROUP", 2)


class Run:
    """A little training on a grid."""

    def __init__(self, grid, method="ddp", optimizer="adamw", **options):
        self.grid = grid
        self.model = GPT2(grid, SHAPE, key=RngKey(3), dtype=torch.float64)
        self.optimizer = make_optimizer(self.model.parameters(), 0.1, optimizer)
        replicas = make(DataParallelConfig(method=method, **options), self.model, grid, self.optimizer)
        self.trainer = Trainer(self.model, grid, self.optimizer, 2, max_norm=1.0, strategy=replicas)
        self.state = TrainingState(self.model, replicas)
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2

    def steps(self, first, last):
        made = batches(SHAPE, 4)
        return [self.trainer.step(microbatches(self.grid, made[s], s, 2))[0] for s in range(first, last)]

    def weights(self):
        """On the first rank, every weight whole."""
        with self.trainer.strategy.full_weights():
            return dict(whole_parameters(self.model, self.grid))

    def wholes(self):
        """On the first rank, every weight and every tensor of the optimizer whole, gathered without checkpoints."""
        found = {f"weight {name}": whole for name, whole in whole_parameters(self.model, self.grid)}
        for key in ("exp_avg", "exp_avg_sq", "step"):
            kept = _Kept(self.model, self.optimizer, key)
            found |= {f"{key} {name}": whole for name, whole in whole_parameters(kept, self.grid)}
        return found


class _Kept:
    """An optimizer's tensors, in the place of the parameters."""

    def __init__(self, model, optimizer, key):
        self.tensors = []
        for name, p in model.named_parameters():
            value = optimizer.state[p][key].expand(p.shape).clone()
            value.shard = p.shard
            self.tensors.append((name, value))

    def named_parameters(self):
        return self.tensors


def grids(world):
    """The grids of this number of ranks; None where this rank is not part of one."""
    for ranks, *shape in GRIDS[world.size]:
        sub = world.Split(world.rank < ranks, world.rank)
        yield Grid(*shape, comm=sub) if world.rank < ranks else None


@pytest.mark.ranks(*GRIDS)
def test_every_grid_to_every_other(world, tmp_path):
    folder = world.bcast(tmp_path)
    first, *others = grids(world)
    source = Run(first)
    source.steps(0, 2)
    saved = source.wholes()
    assert Checkpointer(folder, first.comm, background=False).save(2, source.state, {"a": 1}) is None
    losses = source.steps(2, 3)
    for grid in [first, *others]:
        if grid is not None:
            run = Run(grid)
            told = Checkpointer(folder, grid.comm).resume(run.state)
            assert (told.step, told.about) == (2, {"a": 1})
            for name, whole in run.wholes().items():
                assert torch.equal(whole, saved[name]), name
            again = run.steps(2, 3)
            assert again == (losses if grid is first else pytest.approx(losses, rel=1e-12))
        world.Barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("parameter_server", {}),
        ("parameter_server", {"servers": 2}),
        ("parameter_server", {"staleness": 1}),
        ("local_sgd", {"average_every": 3}),
        ("zero1", {}),
        ("zero2", {}),
        ("zero3", {}),
    ],
)
def test_methods(world, tmp_path, method, options):
    """Each goes on with the same bits; what others than local SGD saved, data parallelism loads, and local SGD."""
    folder = world.bcast(tmp_path)
    grid = Grid(data=3)
    source = Run(grid, method, **options)
    source.steps(0, 2)
    assert Checkpointer(folder, grid.comm, background=False).save(2, source.state, {}) is None
    weights = source.weights()
    losses = source.steps(2, 3)
    run = Run(grid, method, **options)
    Checkpointer(folder, grid.comm).resume(run.state)
    for name, weight in run.weights().items():
        assert torch.equal(weight, weights[name])
    asynchronous = "staleness" in options
    assert asynchronous or run.steps(2, 3) == losses
    other = Run(grid)
    if method == "local_sgd":
        with pytest.raises(ValueError, match="data_parallel.method=local_sgd; go on with that method"):
            Checkpointer(folder, grid.comm).resume(other.state)
    else:
        Checkpointer(folder, grid.comm).resume(other.state)
        loaded = other.wholes()
        assert asynchronous or other.steps(2, 3) == pytest.approx(losses, rel=1e-12)
        own = Run(grid, "local_sgd", average_every=2)
        own.steps(0, 1)
        Checkpointer(folder, grid.comm).resume(own.state)
        assert all(torch.equal(whole, loaded[name]) for name, whole in own.wholes().items())
        own.steps(2, 3)  # the first since an average
        assert len(set(world.allgather(next(own.model.parameters()).detach().numpy().tobytes()))) == 3


@pytest.mark.ranks(4)
def test_replicas_of_ranks_that_share_sequences(world, tmp_path):
    """Local SGD goes on with as many replicas, whoever shares their sequences."""
    folder = world.bcast(tmp_path)
    source = Run(Grid((2, 1, 2)), "local_sgd", average_every=3)
    source.steps(0, 2)
    assert Checkpointer(folder, source.grid.comm, background=False).save(2, source.state, {}) is None
    own = [p.detach().clone() for p in source.model.parameters()]
    other = Run(Grid((2, 2, 1)), "local_sgd", average_every=3)
    Checkpointer(folder, other.grid.comm).resume(other.state)
    assert all(map(torch.equal, own, other.model.parameters()))  # rank for rank of the same replica
    assert other.steps(2, 3) == pytest.approx(source.steps(2, 3), rel=1e-12)
    with pytest.raises(ValueError, match="holds 2 replicas"):
        Checkpointer(folder, world).resume(Run(Grid((1, 2, 2)), "local_sgd", average_every=3).state)


@pytest.mark.ranks(4)
def test_replicas_of_other_ranks(world, tmp_path):
    """Local SGD goes on with as many replicas, whatever divides each; the optimizer's numbers are saved once."""
    folder = world.bcast(tmp_path)
    source = Run(Grid(2, 1, 2), "local_sgd", average_every=3)
    source.steps(0, 2)
    assert Checkpointer(folder, world, background=False).save(2, source.state, {}) is None
    losses = source.steps(2, 3)
    for grid in (source.grid, Grid(2, 2, 1)):
        other = Run(grid, "local_sgd", average_every=3)
        Checkpointer(folder, world).resume(other.state)
        assert other.steps(2, 3) == (losses if grid is source.grid else pytest.approx(losses, rel=1e-12))


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.parametrize("method", ["ddp", "zero1", "parameter_server"])
def test_another_optimizer_is_refused(world, tmp_path, method):
    """By name, on all ranks, and nothing is changed. What the state lacks is needed; what it has beside that is not."""
    folder, grid = world.bcast(tmp_path), Grid(data=world.size)
    source = Run(grid, method, "sgd")
    source.steps(0, 1)
    assert Checkpointer(folder, grid.comm, background=False).save(1, source.state, {}) is None
    other = Run(grid, method)
    other.steps(0, 1)
    before, kept = other.weights(), {p: dict(found) for p, found in other.optimizer.state.items()}
    said = (
        "of another optimizer .train.optimizer.: it has momentum_buffer of .*, without the exp_avg, exp_avg_sq, step "
    )
    with pytest.raises(ValueError, match=said):
        Checkpointer(folder, grid.comm).resume(other.state)
    assert {p: dict(found) for p, found in other.optimizer.state.items()} == kept
    assert all(torch.equal(weight, before[name]) for name, weight in other.weights().items())
    again = Run(grid, method, "sgd")
    assert Checkpointer(folder, grid.comm).resume(again.state).step == 1


# For each number of ranks: the grid of the first and last run, and the method and grid of the one between.
BETWEEN = {
    2: [((2, 1, 1), "zero3", 2, (2, 1, 1)), ((1, 2, 1), "zero2", 2, (1, 1, 2))],
    3: [((3, 1, 1), "zero1", 2, (2, 1, 1))],
    4: [((2, 1, 2), "zero1", 4, (2, 1, 2)), ((2, 2, 1), "zero3", 4, (4, 1, 1))],
    8: [((2, 2, 2), "zero3", 4, (4, 1, 1))],
}


@pytest.mark.ranks(*BETWEEN)
def test_through_zero_and_back(world, tmp_path):
    """From data parallelism to ZeRO and back by two checkpoints: the same bits of weights and optimizer."""
    folder = world.bcast(tmp_path)
    for number, (shape, method, ranks, between) in enumerate(BETWEEN[world.size]):
        source = Run(Grid(*shape))
        source.steps(0, 2)
        saved = source.wholes()
        there, back = folder / f"{number}-there", folder / f"{number}-back"
        assert Checkpointer(there, world, background=False).save(2, source.state, {}) is None
        losses = source.steps(2, 3)
        sub = world.Split(world.rank < ranks, world.rank)
        if world.rank < ranks:
            run = Run(Grid(*between, comm=sub), method)
            Checkpointer(there, sub).resume(run.state)
            assert Checkpointer(back, sub, background=False).save(2, run.state, {}) is None
            assert run.steps(2, 3) == pytest.approx(losses, rel=1e-12)
        world.Barrier()
        again = Run(Grid(*shape))
        Checkpointer(back, world).resume(again.state)
        for name, whole in again.wholes().items():
            assert torch.equal(whole, saved[name]), name
        assert again.steps(2, 3) == losses


def test_a_failure_on_one_rank_is_everybody_s(world, tmp_path, monkeypatch):
    from hpctrain.checkpoint import shards

    folder = world.bcast(tmp_path)
    grid = Grid(data=world.size)
    run = Run(grid)
    run.steps(0, 1)
    saver = Checkpointer(folder, grid.comm)
    assert saver.save(1, run.state, {}) is None
    assert saver.finish() is None
    last = world.size - 1

    def full(*_):
        raise OSError(28, "No space left on device")

    if world.rank == last:
        monkeypatch.setattr(shards, "write", full)
    assert saver.save(2, run.state, {}) is None  # in the background
    assert saver.finish() == f"step 2: rank {last}: [Errno 28] No space left on device"
    monkeypatch.undo()
    assert Checkpointer(folder, grid.comm).resume(Run(grid).state).step == 1


def test_each_rank_reads_only_what_it_needs(world, tmp_path):
    from hpctrain.checkpoint import index, reading

    folder = world.bcast(tmp_path)
    grid = Grid(tensor=(1, world.size, 1))
    run = Run(grid)
    run.steps(0, 1)
    assert Checkpointer(folder, grid.comm, background=False).save(1, run.state, {}) is None
    node = index.read(folder / "step-1")
    read = reading.load(node, run.state.to_load(reading.described(node.manifest)))
    assert read == sum(3 * p.nbytes for p in run.model.parameters())


@pytest.mark.ranks(1)
def test_rectangles_are_the_elements_in_order(world):
    """Every range of a 3-D slice, against numbering them all."""
    from hpctrain import Shard

    shard = Shard((5, 6, 7), (slice(1, 4), slice(2, 5), slice(3, 7)))
    numbers = torch.arange(5 * 6 * 7).view(5, 6, 7)
    flat = numbers[shard.slices].reshape(-1)
    for start in range(len(flat)):
        for stop in range(start + 1, len(flat) + 1):
            parts = [numbers[part.slices].reshape(-1) for part in rectangles(shard, start, stop)]
            assert torch.equal(torch.cat(parts), flat[start:stop])
            assert len(parts) <= 5


@pytest.mark.ranks(1)
@pytest.mark.parametrize("least", [1, 100, 10_000])
def test_replicas_save_every_row_once(world, monkeypatch, least):
    """By any number of replicas: about as many bytes each that saves, and at least so many."""
    from hpctrain import Shard

    monkeypatch.setattr(shard_entries, "LEAST", least)
    shards = [Shard((30, 20), (slice(10, 30), slice(0, 9))), Shard((7,), (slice(0, 7),)), Shard((), ())]
    tensors = [torch.rand(shard.shape) for shard in shards]
    entries = [Entry(str(n), shard, tensor) for n, (shard, tensor) in enumerate(zip(shards, tensors))]
    empty = (Shard((6, 5), slices) for slices in ((slice(6, 6), slice(0, 5)), (slice(0, 6), slice(5, 5))))
    entries[1:1] = [Entry("nothing", shard, torch.empty(shard.shape)) for shard in empty]
    total = sum(tensor.nbytes for tensor in tensors[:2])
    for parts in (1, 2, 3, 7, 1000):
        found = [replicas_part(entries, parts, index) for index in range(parts)]
        assert [len([e for e in part if e.name == "2"]) for part in found] == [1] + [0] * (parts - 1)
        sizes = [sum(e.tensor.nbytes for e in part if e.name != "2") for part in found]
        assert sum(sizes) == total
        writers = min(parts, max(1, total // least))
        assert max(sizes) <= total / writers + 36
        assert sum(size > 0 for size in sizes) <= writers
        assert sum(map(len, found)) <= 3 + writers
        for n in range(2):
            ones = torch.zeros(shards[n].global_shape)
            for entry in (e for part in found for e in part if e.name == str(n)):
                ones[entry.shard.slices] += 1
                assert torch.equal(
                    entry.tensor,
                    tensors[n][entry.shard.slices[0].start - shards[n].slices[0].start :][: len(entry.tensor)],
                )
            assert torch.equal(ones[shards[n].slices], torch.ones(shards[n].shape))
