"""Seconds in the ledger: those of the outermost operation, waiting told apart."""

import time

import pytest
import torch

from hpctrain import comm

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]


def test_seconds_are_those_of_the_outermost_operation(line, world):
    """Rank 0 comes late, so that the others wait in the operation."""
    traffic = line.transport.traffic
    for dtype in (torch.float32, torch.bfloat16):  # the latter is a reduce-scatter and an all-gather
        world.Barrier()
        traffic.clear()
        time.sleep(0.2 if line.rank == 0 else 0)
        comm.all_reduce(torch.ones(4 * line.size, dtype=dtype), line)
        ((operation, seconds),) = traffic.seconds().items()
        assert operation == ("x", "all_reduce")
        assert seconds < 0.15 if line.rank == 0 else seconds > 0.05


def test_waiting_is_told_apart(line, world):
    traffic = line.transport.traffic
    world.Barrier()
    traffic.clear()
    if line.rank == 0:
        time.sleep(0.2)
        comm.send(torch.ones(3), line, 1)
    elif line.rank == 1:
        comm.recv_start(torch.empty(3), line, 0).wait()
        seconds = traffic.seconds()
        assert set(seconds) == {("x", "recv"), ("x", "recv wait")}
        assert seconds["x", "recv wait"] > 0.05 > seconds["x", "recv"]


def test_an_operation_inside_of_a_wait_is_part_of_it(line, world):
    """As where gradients of 16 bits are scattered, and the sums gathered when that is waited for."""

    class Watchdog:
        noted = ()

        def begin(self, axis, name, peer):
            assert not self.noted
            self.noted = (name,)

        def end(self):
            assert self.noted
            self.noted = ()

    copies = comm.ReplicatedBuffer(line, 5, torch.ones(1))
    line.transport.watchdog = Watchdog()
    line.transport.traffic.clear()
    copies.local.fill_(1.0)
    whole = copies.sum_start().then(lambda _: copies.spread_start().wait()).wait()
    assert torch.equal(whole, torch.full((5,), float(line.size)))
    assert set(line.transport.traffic.seconds()) == {("x", "sum"), ("x", "sum wait")}
    assert line.transport.watchdog.noted == ()
