"""run.profile: one time line of all ranks, in the trace event format, that holds what was done."""

import itertools
import json
import math
import time
from collections import Counter, defaultdict

import pytest
from trained_here import losses, trainer_in

from hpctrain.train.tracing import TRACKS, ahead, clock_shift

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]

LAYERS, MICROBATCHES, FIRST, LAST = 2, 3, 2, 3
OPTIONS = [
    f"model.layers={LAYERS}", "model.heads=2", "model.width=8", "model.context=16", "model.vocabulary=257",
    "train.batch=12", f"train.microbatches={MICROBATCHES}", "train.warmup=1", "run.steps=4", "run.eval_batches=1",
    "run.checkpoint_minutes=0", f"run.profile=[{FIRST}, {LAST}]",
]  # fmt: skip
KEYS = {"M": {"ph", "name", "pid", "tid"}, "X": {"ph", "name", "pid", "tid", "cat", "ts", "dur"}}
GRIDS = {
    1: [["grid.data=1"]],
    2: [["grid.pipeline=2"], ["grid.data=2", "data_parallel.method=zero3"], ["grid.tensor=2", "comm.watchdog=0"]],
    4: [
        ["grid.pipeline=2", "grid.data=2", "comm.watchdog=0"],
        ["grid.pipeline=2", "grid.tensor=[1, 2, 1]", "pipeline.schedule=zb-h1"],
    ],
}


@pytest.fixture
def train(world, tmp_path):
    return trainer_in(world, tmp_path, OPTIONS)


def checked(trace):
    """{rank: {track: its events, by their start}} of a file that fulfils the trace event format."""
    assert trace.keys() == {"displayTimeUnit", "traceEvents"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    titles, tracks, found = {}, {}, defaultdict(lambda: defaultdict(list))
    for event in trace["traceEvents"]:
        assert event.keys() - {"args"} == KEYS[event["ph"]]
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert all(isinstance(value, (int, str)) for value in event.get("args", {}).values())
        if event["ph"] == "M":
            kind, key = event["name"].split("_", 1)
            assert kind in ("process", "thread")
            assert event["args"].keys() == {key}
            if event["name"] == "process_name":
                assert event["pid"] not in titles
                titles[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                assert (event["pid"], event["tid"]) not in tracks
                tracks[event["pid"], event["tid"]] = event["args"]["name"]
    assert all(title.startswith(f"rank {rank} on ") for rank, title in titles.items())
    assert titles.keys() == {rank for rank, _ in tracks}
    assert len({*titles.values()}) == len(titles)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert isinstance(event["cat"], str)
            for number in (event["ts"], event["dur"]):
                assert isinstance(number, (int, float))
                assert math.isfinite(number)
                assert number >= 0
            found[event["pid"]][tracks[event["pid"], event["tid"]]].append(event)
    for rank in found.values():
        for name, events in rank.items():
            events.sort(key=lambda event: (event["ts"], -event["dur"]))
            check_nested(name, events)
    return found


def check_nested(name, events, rounding=0.002):
    """Of one thread, an event is within another or apart from it; of the tracks that are ours, always apart."""
    open_until = []
    for event in events:
        while open_until and open_until[-1] <= event["ts"] + rounding:
            open_until.pop()
        stop = event["ts"] + event["dur"]
        assert not open_until or (name not in TRACKS and stop <= open_until[-1] + rounding), (name, event)
        open_until.append(stop)


def within(inner, outer):
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_all_ranks_on_one_time_line(world, train, capfd):
    for number, grid in enumerate(GRIDS[world.size]):
        assert train(*grid, f"run.name={number}") == 0
        if world.rank:
            continue
        run = train.folder / str(number)
        assert f"trace of steps {FIRST} to {LAST}: {run}/trace.json" in capfd.readouterr().out
        trace = checked(json.loads((run / "trace.json").read_text()))
        assert sorted(trace) == list(range(world.size))
        for tracks in trace.values():
            steps = tracks["steps"]
            assert [event["name"] for event in steps] == ["step 2", "step 3"]
            assert tracks.keys() - TRACKS.keys()
            for name, events in tracks.items():
                if name in ("pipeline", "MPI"):
                    assert all(any(within(event, step) for step in steps) for event in events)
        for step in zip(*(tracks["steps"] for tracks in trace.values())):  # the ranks take it together
            assert max(event["ts"] for event in step) < min(event["ts"] + event["dur"] for event in step)
        check_actions(trace, grid)
        check_bytes(trace[0].get("MPI", []), run)
        check_messages(trace)
        check_clocks(trace)


def check_actions(trace, grid):
    """Each microbatch goes forward and back once on each rank in each step, and computes in that time."""
    backward = ("input_gradient", "weight_gradient") if "pipeline.schedule=zb-h1" in grid else ("backward",)
    for tracks in trace.values():
        done = (event["name"] for event in tracks["pipeline"])
        names = Counter(name for name in done if name.split()[0] not in ("send", "receive"))
        expected = [f"{kind} {m}" for kind in ("forward", *backward) for m in range(MICROBATCHES)]
        assert names == dict.fromkeys(expected, LAST - FIRST + 1)
        kernels = [event for name in tracks.keys() - TRACKS.keys() for event in tracks[name]]
        products = [event for event in kernels if event["name"] in ("aten::mm", "aten::addmm")]
        for action in tracks["pipeline"]:
            if action["name"].split()[0] in ("forward", "backward"):
                assert any(within(product, action) for product in products), action


def check_bytes(operations, run):
    """The traced steps' operations moved what their metrics say."""
    for direction in ("sent", "received"):
        by_axis = losses(run, f"bytes_{direction}")
        expected = sum(sum(by_axis[step].values()) for step in (FIRST, LAST))
        tensors = [event["args"].get(direction, 0) for event in operations if not event["name"].endswith(" world")]
        assert sum(tensors) == expected


def check_messages(trace):
    """No stage starts before the one before has an output: the clocks are one."""
    starts, ends = defaultdict(list), defaultdict(list)
    for tracks in trace.values():
        for event in tracks["pipeline"]:
            if event["name"].startswith("forward"):
                starts[event["args"]["stage"]].append(event["ts"])
                ends[event["args"]["stage"]].append(event["ts"] + event["dur"])
    for stage in range(1, len(starts)):
        assert min(starts[stage]) > min(ends[stage - 1])


def check_clocks(trace, bound=20_000):
    """No rank has the result of a sum over all ranks before each has begun to add to it, to `bound` microseconds."""
    if len(trace) == 1:
        return
    sums = [[event for event in tracks["MPI"] if event["name"] == "all_reduce world"] for tracks in trace.values()]
    assert {len(events) for events in sums} == {len(sums[0])} != {0}
    for together in zip(*sums):
        assert max(event["ts"] for event in together) <= min(event["ts"] + event["dur"] for event in together) + bound


def test_a_job_that_stops_before_writes_what_there_is(world, train):
    assert train("run.max_seconds=0.001", "run.profile=[1, 3]", "run.name=cut", f"grid.data={world.size}") == 85
    if world.rank == 0:
        trace = checked(json.loads((train.folder / "cut/trace.json").read_text()))
        assert [event["name"] for event in trace[0]["steps"]] == [f"step {n}" for n in losses(train.folder / "cut")]


def test_a_trace_that_cannot_be_written_is_a_warning(world, train, caplog, monkeypatch):
    from hpctrain.train import tracing

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracing, "_write_parts", full)
    assert train("run.name=full", f"grid.data={world.size}") == 0
    if world.rank == 0:
        assert f"WARNING: {train.folder}/full/trace.json is not written: [Errno 28]" in caplog.text
        assert len(losses(train.folder / "full")) == 4


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("torn")])
def test_kernels_that_a_rank_has_no_room_for(world, train, caplog, monkeypatch, error):
    """The first rank, which waits for the part of each, has the rest."""
    from hpctrain.train import tracing

    last, exported = world.size - 1, tracing._exported

    def full(profiler):
        if world.rank == last:
            raise error
        return exported(profiler)

    monkeypatch.setattr(tracing, "_exported", full)
    name = type(error).__name__
    assert train(f"run.name={name}", f"grid.data={world.size}") == 0
    assert (f"WARNING: the trace is without the kernels of rank {last}: {error}" in caplog.text) == (world.rank == last)
    if world.rank == 0:
        trace = checked(json.loads((train.folder / name / "trace.json").read_text()))
        assert len(trace[last]["steps"]) == LAST - FIRST + 1
        without = [rank for rank, tracks in trace.items() if tracks.keys() <= TRACKS.keys()]
        assert without == [last]


def test_clocks_of_other_hosts(world, monkeypatch):
    """Each rank on a host of its own, hours apart: their shifts make them one, to a message's time."""
    import socket

    monkeypatch.setattr(socket, "gethostname", lambda: f"host {world.rank}")
    wrong = world.rank * 7_200_000_000_000
    shift = clock_shift(world, lambda: time.time_ns() + wrong)
    assert abs(shift + wrong) < 50_000_000
    monkeypatch.undo()
    assert clock_shift(world, lambda: time.time_ns() + wrong) == 0


def test_a_process_that_is_interrupted_between_two_clocks():
    """In all rounds but the sixth."""
    now, rounds = 0, itertools.count()

    def ask():
        nonlocal now
        now += 10 if next(rounds) == 5 else 40_000
        return now + 7

    assert abs(ahead(lambda: now, ask) - 7) <= 5
