"""Experts saved by four ranks that share them are resumed by three, two or one, and by copies: weights and optimizer
exactly equal, what follows to rounding."""

import math

import pytest
import torch
from expert_shard_checks import Run, check, grid_of, serial

from hpctrain import Grid, shard_entries
from hpctrain.checkpoint import Checkpointer, TrainingState
from hpctrain.layers.whole_parameters import whole_parameters

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(4)]

# (data, pipeline, tensor, expert, expert_tensor): where it is saved, and where it is resumed, on as many of the ranks
SAVED = [(4, 1, 1, 4), (2, 1, (1, 2, 1), 4, 2), (2, 2, 1, 2)]
RESUMED = [(4, 1, 1, 4), (3, 1, 1, 3), (1, 1, 2, 2, 2), (1, 1, 1, 1), (4, 1, 1, 2), (3, 1, 1, 1), (2, 2, 1, 1)]


def wholes(run):
    """Every weight and every tensor of the optimizer, gathered without checkpoints; on the first rank."""
    found = run.weights()
    for key in ("exp_avg", "exp_avg_sq"):
        kept = whole_parameters(Kept(run, key), run.grid)
        found |= {f"{key} {name.rpartition('.')[2]}": value for name, value in kept}
    return found


class Kept:
    """An optimizer's tensors, in the place of the parameters."""

    def __init__(self, run, key):
        self.tensors = {name: run.optimizer.state[p][key].clone() for name, p in run.model.named_parameters()}
        for name, p in run.model.named_parameters():
            self.tensors[name].shard = p.shard

    def named_parameters(self):
        return self.tensors.items()


def state_of(run):
    return TrainingState(run.model, run.strategy)


@pytest.mark.parametrize("experts", [5, 3])
def test_every_grid_to_every_other(world, tmp_path, monkeypatch, experts):
    monkeypatch.setattr(shard_entries, "LEAST", 1)  # every rank saves a part of what several have
    for number, saved in enumerate(SAVED):
        folder = world.bcast(tmp_path) / str(number)
        source = Run(grid_of(saved), experts)
        got = source.steps(0, 2)
        whole = wholes(source)
        assert Checkpointer(folder, world, background=False).save(2, state_of(source), {}) is None
        for resumed in RESUMED:
            ranks = math.prod(resumed[:3])
            sub = world.Split(world.rank < ranks, world.rank)
            if world.rank < ranks:
                run = Run(Grid(*resumed, comm=sub), experts)
                assert Checkpointer(folder, sub).resume(state_of(run)).step == 2
                for name, value in wholes(run).items():
                    assert torch.equal(value, whole[name]), name
                check(run, [*got, *run.steps(2, 3)], serial(experts))
            world.Barrier()


@pytest.mark.parametrize(
    ("method", "shape"),
    [("mixed", (4, 1, 1, 2)), ("zero1", (4, 1, 1, 2)), ("zero2", (2, 1, 2, 4)), ("zero3", (4, 1, 1, 2))],
)
def test_through_zero_and_back(world, tmp_path, method, shape):
    """Of ranges over copies: the same bits as data parallelism has, and back again on another number of ranks."""
    there, back = (world.bcast(tmp_path) / name for name in ("there", "back"))
    source = Run(Grid(4, expert=4), 5)
    got = source.steps(0, 2)
    whole = wholes(source)
    assert Checkpointer(there, world, background=False).save(2, state_of(source), {}) is None
    zero = Run(grid_of(shape), 5, method)
    Checkpointer(there, world).resume(state_of(zero))
    assert Checkpointer(back, world, background=False).save(2, state_of(zero), {}) is None
    check(zero, [*got, *zero.steps(2, 3)], serial(5))
    sub = world.Split(world.rank < 3, world.rank)
    if world.rank < 3:
        run = Run(Grid(3, expert=3, comm=sub), 5)
        Checkpointer(back, sub).resume(state_of(run))
        for name, value in wholes(run).items():
            assert torch.equal(value, whole[name]), name
        check(run, [*got, *run.steps(2, 3)], serial(5))
    world.Barrier()
