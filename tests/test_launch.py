"""How ranks end: what one of them said has been read before any of them ends with a status."""

import functools
import os
import threading
import time

import pytest

from hpctrain import launch

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]
LATE = 0.3  # seconds


def taken(call, reader):
    """Seconds of a call that has written a line to standard error, a pipe; `reader` begins to read it."""
    read, write = os.pipe()
    own = os.dup(2)
    os.dup2(write, 2)
    os.write(2, b"hpctrain: error\n")
    reading = reader(read)
    began = time.monotonic()
    try:
        call()
        return time.monotonic() - began
    finally:
        os.dup2(own, 2)
        if reading:
            reading.join()
        for file in (own, read, write):
            os.close(file)


def late(pipe):
    reading = threading.Timer(LATE, os.read, (pipe, 100))
    reading.start()
    return reading


def at_once(pipe):
    os.read(pipe, 100)


def test_a_launcher_that_reads_late(world, capfd):
    """The last rank's line is read late: all wait for that, unless the job ends well."""
    speaks = world.rank == world.size - 1
    for status, waits in ((1, True), (0, False)):
        world.Barrier()
        seconds = taken(functools.partial(launch.end, world, status), late if speaks else at_once)
        assert (seconds > LATE / 2) == waits


def test_a_launcher_that_never_reads(monkeypatch, capfd):
    monkeypatch.setattr(launch, "READ_WITHIN", LATE)
    assert taken(launch.wait_until_read, lambda pipe: None) >= LATE


@pytest.mark.ranks(2)
def test_a_rank_that_is_alone_with_its_error(world, monkeypatch, capfd):
    monkeypatch.setattr(launch, "READ_WITHIN", LATE)
    comm = world.Dup()
    if world.rank == 0:
        assert taken(functools.partial(launch.end, comm, 1), at_once) >= LATE
    world.Barrier()
    if world.rank == 1:
        launch.end(comm, 1)
    comm.Free()
