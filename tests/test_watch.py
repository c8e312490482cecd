"""The watchdog's decisions, by the times at which it looks; and what it says. Whole jobs: tests/faults/test_jobs.py."""

from types import SimpleNamespace

import pytest

from hpctrain import Grid, comm
from hpctrain.comm.watchdog import Alarm, Watchdog, WatchedComm
from hpctrain.grid import Axis

STUCK = (100.0, 10.0, "data", "all_reduce", None)  # began at 100 s, may take 10 s


def looks(*pairs):
    """What an alarm says that looks once a second from 99 s on; (time, operation) each."""
    alarm = Alarm(1.0, 99.0)
    said = [alarm.look(*pair) for pair in pairs]
    return [(time, what) for (time, _), what in zip(pairs, said) if what]


def test_a_report_then_the_end_of_the_job():
    """Twelve seconds: the limit and the grace."""
    assert looks(*((100.5 + n, STUCK) for n in range(20)))[:2] == [(110.5, "report"), (112.5, "abort")]


@pytest.mark.parametrize("after", [None, (111.0, 10.0, "data", "all_reduce", None)])
def test_an_operation_that_ends_in_its_grace_is_forgiven(after):
    seen = [(100.5 + n, STUCK) for n in range(11)] + [(111.5 + n, after) for n in range(9)]
    assert looks(*seen) == [(110.5, "report")]


def test_the_next_one_that_is_stuck_is_reported_too():
    second = (111.0, 10.0, "data", "all_reduce", None)
    seen = [(100.5 + n, STUCK) for n in range(11)] + [(111.5 + n, second) for n in range(13)]
    assert looks(*seen) == [(110.5, "report"), (121.5, "report"), (123.5, "abort")]


def test_each_operation_has_its_own_age():
    """A new one, equal to the last, begins every five seconds."""
    operations = [(100.0 + 5 * n, 10.0, "data", "all_reduce", None) for n in range(8)]
    assert looks(*((100.5 + n, operations[n // 5]) for n in range(40))) == []


def test_time_in_which_the_job_was_stopped_does_not_count():
    """Stopped from 104.5 s to 1000 s: more than ten seconds of its own are over at 1005 s."""
    seen = [(100.5 + n, STUCK) for n in range(5)] + [(1000.0 + n, STUCK) for n in range(10)]
    assert looks(*seen)[:2] == [(1005.0, "report"), (1007.0, "abort")]


def test_stopped_when_the_operation_had_not_been_seen():
    seen = [(100.0, None)] + [(1000.0 + n, STUCK) for n in range(13)]
    assert looks(*seen)[0] == (1010.0, "report")


def test_looks_that_are_a_little_late_count_in_full():
    assert looks(*((100.5 + 1.9 * n, STUCK) for n in range(8)))[0] == (100.5 + 1.9 * 6, "report")


class World:
    """All ranks of a grid that is one data axis; what the watch is told of the call under way."""

    def __init__(self, rank, size):
        self.rank, self.size, self.during = rank, size, []

    def allgather(self, value):
        if hasattr(self, "watch"):
            self.during.append(self.watch._current[1])
        return [value] * self.size


def watched(rank, size):
    world = World(rank, size)
    grid = SimpleNamespace(
        comm=world, rank=rank, size=size, transport=SimpleNamespace(), members=lambda axis: list(range(size)),
        world=SimpleNamespace(name="world"),
    )  # fmt: skip
    world.watch = Watchdog(grid, 600.0)
    return world


def test_others_files_are_waited_for_longer():
    """A minute in a collective; ten where ranks agree on how their own work went."""
    world = watched(0, 2)
    control = WatchedComm(world.watch)
    control.allgather(1)
    comm.agree(control, None)
    with comm.together(control):
        pass
    assert world.during == [600.0, 6000.0, 6000.0]


def test_objects_are_watched_as_tensors_are():
    """Along an axis, whose grid has the watchdog."""
    world = watched(0, 2)
    axis = Axis("data", world, (0, 0), SimpleNamespace(watchdog=world.watch))
    assert comm.all_gather_object("each", axis) == ["each"] * 2
    with comm.together(axis):
        pass
    assert world.during == [600.0, 6000.0]


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("first", "other", "limit"), [("7", None, 7.0), ("0", "5", None)])
def test_the_first_rank_s_limit_is_that_of_all(world, monkeypatch, first, other, limit):
    """Some launchers leave the environment of other nodes alone."""
    mine = other if world.rank else first
    monkeypatch.delenv("HPCTRAIN_WATCHDOG", raising=False)
    if mine is not None:
        monkeypatch.setenv("HPCTRAIN_WATCHDOG", mine)
    grid = Grid(tensor=2)
    comm.start_watchdog(grid)
    watchdog = grid.transport.watchdog
    assert (watchdog.limit if watchdog else None) == limit


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_the_first_rank_s_limit_is_no_number(world, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_WATCHDOG", "7" if world.rank else "ten")
    with pytest.raises(ValueError, match="HPCTRAIN_WATCHDOG must be a number of seconds, .* got 'ten'"):
        comm.start_watchdog(Grid(tensor=2))


def test_reports_are_bounded():
    """Of 10,000 ranks 16 report in full, in at most 40 lines; the others say a line that names 8 of those awaited."""
    full = 0
    for rank in (0, 1, 625, 9999):
        watch = watched(rank, 10_000).watch
        for _ in range(50):
            watch.begin(SimpleNamespace(name="data"), "all_reduce", None)
            watch.end()
        said = watch.report(0.0, 600.0, SimpleNamespace(name="data"), "all_reduce", None).splitlines()
        assert said[0].endswith(" and 9991 others")
        assert len(said[0]) < 600
        assert len(said) <= 40
        full += len(said) > 1
    assert full == 2  # 0 and 625
    said = watched(3, 10_000).watch.report(0.0, 600.0, SimpleNamespace(name="data"), "recv", 77)
    assert "it waits for rank 77 (" in said
    assert "others" not in said
