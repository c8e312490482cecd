"""A trace of some steps: what every rank did, on one time line, as Chrome and Perfetto show it.

The format: "Trace Event Format" of Chromium's tracing. A rank is a process of it, with threads for its steps, pipeline
actions, operations over MPI, operators of torch (one for each thread that runs them) and streams of a device.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from hpctrain.config import Config
from hpctrain.grid import Grid
from hpctrain.trace import Span, Trace

FILE = "trace.json"
TRACKS = {"steps": 1, "pipeline": 2, "MPI": 3}  # in this order on the screen, above those of torch
KERNELS = ("cpu_op", "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver")  # categories of torch's
TAG = 1301  # of messages with a rank's part
ROUNDS = 8  # in which two clocks are compared

log = logging.getLogger("hpctrain")


class StepTracer:
    """Traces the steps `run.profile` = [first, last] of a job. All of it is collective.

    Args:
        world: communicator (mpi4py, watched) of the grid's ranks.
    """

    def __init__(self, config: Config, grid: Grid, world: Any, device: torch.device):
        self.first, self.last = config.run.profile
        self.path, self.grid, self.world, self.device = config.folder / FILE, grid, world, device
        self._trace: Trace | None = None

    def before(self, step: int) -> None:
        """Of a step that is about to be taken."""
        if self._trace is None and self.first <= step <= self.last:
            self._begin()
        self._start = time.perf_counter()

    def after(self, step: int) -> None:
        if self._trace is None:
            return
        self._trace.add("steps", f"step {step}", self._start)
        if step >= self.last:
            self.finish()

    def finish(self) -> None:
        """Write what was traced, where that has not been done."""
        if self._trace is None:
            return
        trace, self.grid.transport.trace, self._trace = self._trace, None, None
        self._profiler.stop()
        shift, began = self._shift, self._began
        events = [*self._names(), *_of_spans(trace.spans, self.grid.rank, shift, began)]
        try:
            events += _of_torch(_exported(self._profiler), self.grid.rank, shift, began)
        except (ValueError, OSError) as error:  # no room for its file: the first rank waits for the rest all the same
            log.warning("WARNING: the trace is without the kernels of rank %d: %s", self.grid.rank, error)
        self._write(",\n".join(map(json.dumps, events)))

    def _begin(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of every start and stop
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=kinds)
        self._profiler.start()
        self._shift = clock_shift(self.world)
        self._began = self.world.bcast(time.time_ns())  # by the clock of rank 0
        self._trace = self.grid.transport.trace = Trace()

    def _names(self) -> Iterator[dict]:
        coords = ", ".join(f"{axis} {self.grid.coords[axis]}" for axis, size in self.grid.shape.items() if size > 1)
        title = f"rank {self.grid.rank} on {socket.gethostname()}" + f": {coords}" * bool(coords)
        yield _meta(self.grid.rank, "process_name", name=title)
        yield _meta(self.grid.rank, "process_sort_index", sort_index=self.grid.rank)
        for track, number in TRACKS.items():
            yield from _thread(self.grid.rank, number, track)

    def _write(self, mine: str) -> None:
        """The parts of all ranks, one after the other: the first rank never holds more than two."""
        if self.grid.rank:
            self.world.send(mine, 0, TAG)
            return
        part = self.path.with_name(f"{FILE}.tmp")
        others = (self.world.recv(source=rank, tag=TAG) for rank in range(1, self.grid.size))
        try:
            with part.open("w", encoding="utf-8") as file:
                _write_parts(file, mine, others)
            part.replace(self.path)
        except OSError as error:  # which must not end the training
            log.warning("WARNING: %s is not written: %s", self.path, error)
            for _ in others:
                pass  # they wait for it
        else:
            print(f"trace of steps {self.first} to {self.last}: {self.path}, for https://ui.perfetto.dev", flush=True)


def clock_shift(world: Any, clock: Callable[[], int] = time.time_ns) -> int:
    """Nanoseconds to be added to this rank's clock to have that of rank 0; collective over `world`.

    On the host of rank 0 none; elsewhere by messages there and back, of which the fastest counts (Cristian,
    "Probabilistic clock synchronization", 1989): it is wrong by half of its time at most.
    """
    hosts = world.allgather(socket.gethostname())
    far = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
    if world.rank == 0:
        for rank in far:
            for _ in range(ROUNDS):
                world.recv(source=rank, tag=TAG)
                world.send(clock(), rank, TAG)
        return 0
    if world.rank not in far:
        return 0

    def ask():
        world.send(None, 0, TAG)
        return world.recv(source=0, tag=TAG)

    return ahead(clock, ask)


def ahead(clock: Callable[[], int], ask: Callable[[], int]) -> int:
    """By how much another clock, which is asked, is ahead of this one. Of several times the fastest counts, as a
    process may be interrupted in between."""
    found = []
    for _ in range(ROUNDS):
        asked = clock()
        theirs, answered = ask(), clock()
        found.append((answered - asked, theirs - (asked + answered) // 2))
    return min(found)[1]


def _of_spans(spans: list[Span], rank: int, shift: int, began: int) -> Iterator[dict]:
    offset = ahead(time.perf_counter_ns, time.time_ns) + shift - began  # perf_counter has no date
    for span in spans:
        yield {
            "ph": "X", "cat": span.track, "name": span.name, "pid": rank, "tid": TRACKS[span.track],
            "ts": span.start * 1e6 + offset / 1e3, "dur": (span.stop - span.start) * 1e6, "args": span.about,
        }  # fmt: skip


def _exported(profiler: torch.profiler.profile) -> dict:
    """What torch's profiler writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "torch.json")
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))


def _of_torch(exported: dict, rank: int, shift: int, began: int) -> Iterator[dict]:
    """The kernels of a trace of torch's, from the beginning of ours on, as this rank's."""
    offset = exported.get("baseTimeNanoseconds", 0) + shift - began
    titles = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in exported["traceEvents"]
        if event["name"] == "thread_name"
    }
    numbers: dict[tuple, int] = {}
    for event in exported["traceEvents"]:
        if event["ph"] != "X" or event.get("cat") not in KERNELS:
            continue
        start = event["ts"] + offset / 1e3
        if start < 0:
            continue
        where = event["pid"], event["tid"]
        if where not in numbers:
            numbers[where] = len(TRACKS) + 1 + len(numbers)
            yield from _thread(rank, numbers[where], f"kernels: {titles.get(where, where[1])}")
        yield {
            "ph": "X", "cat": event["cat"], "name": event["name"], "pid": rank, "tid": numbers[where], "ts": start,
            "dur": event["dur"],
        }  # fmt: skip


def _thread(rank: int, number: int, name: str) -> Iterator[dict]:
    yield _meta(rank, "thread_name", number, name=name)
    yield _meta(rank, "thread_sort_index", number, sort_index=number)


def _meta(rank: int, what: str, thread: int = 0, **about: Any) -> dict:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": about}


def _write_parts(file: IO[str], mine: str, others: Iterator[str]) -> None:
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n' + mine)
    for part in others:
        file.write(",\n" + part)
    file.write("\n]}\n")
