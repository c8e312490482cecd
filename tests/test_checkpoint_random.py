"""Random models and states, saved by some ranks in some pieces, loaded by others in other pieces: the same bits."""

import functools
import itertools
import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hpctrain as ht
from hpctrain import shard_entries
from hpctrain.checkpoint import Checkpointer, TrainingState, index, manifests, reading, shards
from hpctrain.checkpoint.verify import verify
from hpctrain.data_parallel import DataParallel, Zero1, Zero2, Zero3
from hpctrain.shard import Shard, split
from hpctrain.shard_entries import Entry, rectangles

pytestmark = pytest.mark.mpi

KINDS = {"ddp": DataParallel, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}


@pytest.fixture(scope="module")
def root(world, tmp_path_factory):
    return world.bcast(tmp_path_factory.mktemp("random"))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Several groups of ranks, several files a rank, every replica a writer."""
    monkeypatch.setattr(manifests, "GROUP", 2)
    monkeypatch.setattr(shards, "FILE_BYTES", 500)
    monkeypatch.setattr(shard_entries, "LEAST", 1)


def fresh(world, root):
    """An empty folder."""
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(root / "checkpoints", ignore_errors=True)
    world.Barrier()
    return root / "checkpoints"


# Of each tensor: shape and type; how each dim is cut, and a number from which it follows who has which part.
TENSORS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 9), min_size=1, max_size=4),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]),
        st.lists(st.integers(1, 4), min_size=4, max_size=4),
        st.lists(st.integers(1, 4), min_size=4, max_size=4),
        st.integers(0, 99),
        st.booleans(),
    ),
    max_size=6,
)


class Pieces:
    """Tensors in pieces: a rectangle of each for each part, that of part p on rank (p + shift) % ranks."""

    def __init__(self, tensors, comm, saving):
        self.wholes, self.entries = {}, []
        for number, (shape, dtype, cuts, other, shift, flat) in enumerate(tensors):
            name = f"tensor-{number}"
            numbers = torch.arange(math.prod(shape)).mul(37).remainder(251).view(shape).to(dtype)
            self.wholes[name] = numbers
            for part, rectangle in enumerate(self._cut(shape, cuts if saving else other, flat == saving)):
                if (part + shift) % comm.size == comm.rank:
                    values = numbers[rectangle.slices].clone()
                    self.entries.append(Entry(name, rectangle, values if saving else torch.zeros_like(values)))

    @staticmethod
    def _cut(shape, cuts, flat):
        whole = Shard(tuple(shape), tuple(slice(0, size) for size in shape))
        if flat:  # as ZeRO has them
            size = math.prod(shape)
            parts = (split(size, cuts[0], n) for n in range(cuts[0]))
            return [rectangle for part in parts for rectangle in rectangles(whole, part.start, part.stop)]
        ranges = [[split(size, cut, n) for n in range(cut)] for size, cut in zip(shape, cuts)]
        return [Shard(tuple(shape), slices) for slices in itertools.product(*ranges)]

    def to_save(self):
        return self.entries

    def to_load(self, saved):
        assert {name: (value.shape, value.dtype) for name, value in saved.items()} == {
            name: (tuple(whole.shape), whole.dtype) for name, whole in self.wholes.items()
        }
        return self.entries

    def loaded(self):
        """Nothing is kept twice."""

    def check(self):
        for entry in self.entries:
            assert torch.equal(entry.tensor, self.wholes[entry.name][entry.shard.slices]), entry


@given(tensors=TENSORS, savers=st.integers(1, 4), loaders=st.integers(1, 4))
def test_any_pieces(world, root, tensors, savers, loaders):
    folder = fresh(world, root)
    for saving, ranks in ((True, savers), (False, loaders)):
        ranks = min(ranks, world.size)
        comm = world.Split(world.rank < ranks, world.rank)
        if world.rank < ranks:
            pieces = Pieces(tensors, comm, saving)
            if saving:
                assert Checkpointer(folder, comm, background=False).save(1, pieces, {"a": [1]}) is None
                if comm.rank == 0:
                    verify(folder / "step-1")
            else:
                assert Checkpointer(folder, comm).resume(pieces).about == {"a": [1]}
                pieces.check()
        comm.Free()
        world.Barrier()


def network(widths, seed):
    torch.manual_seed(seed)
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers).double()


def training(grid, kind, widths, seed):
    model = ht.parallelize(network(widths, seed), grid)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, 0.1)
    replicas = KINDS[kind](model if kind == "zero3" else parameters, grid, optimizer)
    x = torch.linspace(-1, 1, 12 * widths[0], dtype=torch.float64).view(12, -1).sin()
    rows = split(12, grid.data.size, grid.data.rank)
    trainer = ht.Trainer(model, grid, optimizer, loss=lambda m, x: m(x).square().sum() / 12, strategy=replicas)
    return TrainingState(model, replicas), lambda: trainer.step([x[rows]])


@functools.cache
def grid_of(data, tensor):
    """One each: communicators are few."""
    return ht.Grid(data=data, tensor=tensor)


GRIDS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 4: [(4, 1), (2, 2), (1, 4)]}


@settings(max_examples=max(1, settings.default.max_examples // 5))  # 2 s each on four ranks
@given(
    widths=st.lists(st.integers(1, 4).map(lambda n: 4 * n), min_size=2, max_size=4),
    kinds=st.tuples(*[st.sampled_from(sorted(KINDS))] * 2),
    shapes=st.tuples(*[st.integers(0, 2)] * 2),
)
def test_any_model_on_any_grid(world, root, widths, kinds, shapes):
    """Saved on one grid by one method, loaded on another by another one, saved there: both files hold the same."""
    folder = fresh(world, root)
    grids = GRIDS.get(world.size, [(world.size, 1)])
    for number, (kind, shape) in enumerate(zip(kinds, shapes)):
        data, tensor = grids[shape % len(grids)]
        run, step = training(grid_of(data, tensor), kind, widths, number)
        if number:
            Checkpointer(folder / "0", world).resume(run)
        else:
            step()
        assert Checkpointer(folder / str(number), world, background=False).save(1, run, {}) is None
    world.Barrier()
    if world.rank == 0:
        first, second = (index.read(folder / f"{number}/step-1") for number in range(2))
        assert first.manifest.tensors.keys() == second.manifest.tensors.keys()
        assert first.manifest.scalars == second.manifest.scalars
        assert len(first.manifest.tensors) == 3 * 2 * (len(widths) - 1)
        for name in first.manifest.tensors:
            assert torch.equal(reading.whole(first, name), reading.whole(second, name)), name
    world.Barrier()
