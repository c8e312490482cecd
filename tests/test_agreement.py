"""What ranks that go at their own pace agree on: all read it in the same step, and wait for none that is on its way."""

import time
from types import SimpleNamespace

import pytest
import torch

from hpctrain import Grid, comm
from hpctrain.config import Config
from hpctrain.train.agreement import Agreement
from hpctrain.train.sanity import Sanity

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

LAG = 2


@pytest.fixture
def agreed(world):
    config = Config()
    config.run.checkpoint_minutes = 1
    parts = {
        "checkpointer": SimpleNamespace(busy=False, phase_done=False),
        "sanity": Sanity(0.0),
        "interrupts": SimpleNamespace(code=0),
    }
    return Agreement(config, Grid(data=world.size), LAG, **parts)


def judge(agreed, loss=1.0):
    return agreed.judge(loss, 1.0, time.perf_counter())


def test_a_stop_is_read_by_all_so_many_steps_later(agreed, world):
    """Whoever is told of it first, and however late the others are."""
    found = []
    for step in range(7):
        if step == 3 and world.rank == world.size - 1:
            agreed.interrupts.code = 2
        assert judge(agreed) is None
        found.append(agreed.stop)
        comm.all_reduce(torch.zeros(1), agreed.grid.data)  # others in between
    assert found == [0, 0, 0, 0, 0, 2, 2]
    agreed.finish()


@pytest.mark.ranks(2, 3)
def test_nobody_waits_for_one_who_is_fewer_steps_behind(agreed, world):
    """Rank 0 comes to its step only when the others are LAG further."""
    if world.rank == 0:
        for rank in range(1, world.size):
            world.recv(source=rank)
    for _ in range(LAG):
        judge(agreed)
    if world.rank:
        world.send(None, 0)
    judge(agreed)
    agreed.finish()


def test_a_phase_of_a_save_is_done_when_all_say_so_of_this_one(agreed, world):
    """What was said before a save or its phase began says nothing of it."""
    done = []
    for step in range(12):
        judge(agreed)
        done.append(agreed.phase_done)
        if step == 3:
            agreed.checkpointer.busy = True
            agreed.save_begins()
        if agreed.phase_done:
            agreed.checkpointer.phase_done = False
        if step == 5 + (world.rank == world.size - 1):
            agreed.checkpointer.phase_done = True  # the last rank's part takes a step more
    last = 7  # the step in which all say so first
    assert done == [step == last + LAG for step in range(12)]
    agreed.finish()


def test_one_save_is_due_by_the_clock(agreed, world):
    """By that of rank 0; it counts anew from there."""
    due = []
    for step in range(9):
        if step == 2:
            agreed._saved_at -= 61
        judge(agreed)
        due.append(agreed.save_by_clock)
        if agreed.save_by_clock:
            agreed.save_begins()
    assert due == [step == 2 + LAG for step in range(9)]
    agreed.finish()


@pytest.mark.ranks(1)
def test_a_save_is_due(agreed):
    """By a step's number, as all stop, or by the clock."""
    run = agreed.run
    run.steps, run.checkpoint_every = 7, 3
    assert [step for step in range(1, 8) if agreed.save_due(step)] == [3, 6, 7]
    run.checkpoint_every = 0
    assert not any(map(agreed.save_due, range(1, 8)))
    agreed.stop = 2
    assert agreed.save_due(1)
    agreed.stop, agreed.save_by_clock = 0, True
    assert agreed.save_due(1)


def test_a_spike_is_one_bad_step(agreed, world):
    """Of one rank: all hear of it in the same step, once for all that was begun before."""
    agreed.sanity.factor, agreed.sanity.losses = 3.0, [1.0] * 32
    kinds = []
    for step in range(8):
        bad = judge(agreed, loss=10.0 if step in (2, 3) and world.rank == world.size - 1 else 1.0)
        kinds.append(bad and bad.kind)
    assert kinds == [None] * 4 + ["spike"] + [None] * 3
    agreed.finish()
