"""What `hpctrain machine` measures, and with which ranks."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_plan_learn import figures, written

from hpctrain.cli import machine as command
from hpctrain.config import load_config
from hpctrain.plan import Machine, predict


def test_a_machine_of_devices(tmp_path, monkeypatch):
    """As many ranks are measured as the node has, and operations are queued ahead of them."""
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert command._counts(None) == [1, 2, 3]
    assert Machine.load(written(tmp_path, figures(2) | {"asynchronous": True})).software.asynchronous
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(command.cores, "find", lambda: SimpleNamespace(count=3))
    assert command._counts(None) == [1, 2, 4, 6]


def test_ranks_are_measured_with_one_thread(tmp_path, monkeypatch):
    """As the file says, whatever the shell has."""
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\nfor each; do case $each in *.json) echo "$OMP_NUM_THREADS" >"$each";; esac; done\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert command._measured(str(launcher), 2, tmp_path, "module") == 1


def test_memory_is_of_what_ranks_compute_on(monkeypatch):
    """Of a device's 100 bytes the allocator has 30 and somebody else 60, which the host does not look at."""
    from hpctrain.scale import measure

    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    device, host = torch.device("cuda"), torch.device("cpu")
    assert (measure.most_memory(device), measure.memory_outside(device)) == (7, 60)
    assert measure.most_memory(host) > 2**20
    assert measure.memory_outside(host) == 0


@pytest.mark.parametrize(("more", "slack"), [(0.5, 0.0), (1.2, 0.2), (3.0, 1.0)])
def test_what_is_reserved_on_a_device(tmp_path, monkeypatch, more, slack):
    """What a small job has, with what is outside of the allocator, which the slack is not of."""
    plain = Machine.load("cpu-cluster")
    plain = replace(plain, device=replace(plain.device, reserved=0.0, slack=0.0))
    allocated = predict(load_config(overrides=[*command.SOME, "checkpoint.background=false"]), plain).memory_bytes
    taken = {command.LEAST[0]: (1e6, 5e8), command.SOME[0]: (1e6 + more * allocated, 6e8)}

    def measured(launcher, ranks, folder, module, steps, config, *job):
        return dict(zip(("memory", "memory_outside"), taken[job[0]]))

    monkeypatch.setattr(command, "_measured", measured)
    assert command._memory("mpirun", tmp_path) == {"reserved": 1e6 + 5e8, "slack": pytest.approx(slack)}


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 4)
def test_what_is_measured_here_makes_a_machine(world, tmp_path, monkeypatch):
    from hpctrain import Grid
    from hpctrain.plan import computing, measure

    monkeypatch.setattr(measure, "SIZES", (1024, 65536))
    monkeypatch.setattr(measure, "PRODUCTS", ((64, 64, 64), (128, 16, 128), (16, 256, 16)))
    monkeypatch.setattr(computing, "CALLS", 2)
    monkeypatch.setattr(computing, "TURNS", 1e-4)
    monkeypatch.setattr(computing, "of_a_core", lambda grid: float(grid.size))  # so that calls are repeated
    with Grid(world.size) as grid:
        rest = {"cores": 4, "reserved": 3e8, "slack": 0.1, "delay": 0.0}
        found = measure.measure(grid, world.bcast(tmp_path)) | rest
    collectives = {"all_gather", "reduce_scatter", "all_reduce"}
    pairs, all_four = (2, collectives | {"message"}), (4, collectives)
    expected = {1: [], 2: [pairs], 4: [pairs, all_four]}[world.size]
    assert [(size, set(tables)) for size, tables in found["collectives"]] == expected
    assert [count for count, taken in found["reading"] if taken > 0] == [128, 8192]
    assert world.allgather(found) == [found] * world.size
    machine = Machine.load(written(tmp_path, found))
    prediction = predict(load_config(overrides=[f"grid.data={world.size}"]), machine)
    assert prediction.fits
    assert prediction.seconds > 0


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_computing_is_of_the_core(world, monkeypatch):
    """Others take seconds of the clock, not of the core; where ranks share one, each takes those of all."""
    from hpctrain import Grid
    from hpctrain.plan import computing

    cpu = torch.device("cpu")
    with Grid(world.size) as grid:
        assert computing.of_a_core(grid) >= 1
        monkeypatch.setattr(computing, "of_a_core", lambda grid: 1.0)
        assert computing.seconds(grid, lambda: time.sleep(0.02), cpu) < 0.01
        assert computing.in_turn(grid, [lambda: time.sleep(0.02)], cpu)[0] > 0.02
        takes, now = iter([9.0, 2.0, 1.0] + [2.0] * computing.CALLS), [0.0]  # the first call counts for nothing
        work = [lambda: now.append(now[-1] + next(takes))]
        assert computing.in_turn(grid, work, cpu, clock=lambda: now[-1], typical=min) == [1.0]
        monkeypatch.setattr(computing, "in_turn", lambda grid, works, device, clock: [3.0])
        monkeypatch.setattr(computing, "of_a_core", lambda grid: 2.0)
        assert computing.seconds(grid, lambda: None, cpu) == 6.0


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 4)
def test_ranks_of_a_core(world, monkeypatch):
    """Of the cores that any of them may use: one rank alone is bound to some."""
    from hpctrain import Grid
    from hpctrain.plan import computing

    monkeypatch.setattr(computing.os, "sched_getaffinity", lambda pid: {world.rank % 2})
    monkeypatch.setattr(computing.cores, "find", lambda affinity: SimpleNamespace(count=len(affinity)))
    with Grid(world.size) as grid:
        assert computing.of_a_core(grid) == max(1, world.size / 2)


@pytest.mark.mpi
@pytest.mark.ranks(1)
def test_a_gather_is_what_it_takes_beyond_reading(world, monkeypatch):
    """Nor is a figure 0, where it takes no longer."""
    from hpctrain import Grid
    from hpctrain.plan import measure

    takes = iter([(5.0, 3.0, 2.0, 1.5), *[(1.0, 3.0, 2.0, 1.5)] * (len(measure.SIZES) - 1)])
    monkeypatch.setattr(measure, "in_turn", lambda grid, calls, device: [call() for call in calls] and next(takes))
    with Grid() as grid:
        found = measure.collectives(grid, torch.device("cpu"), 1)
    assert {name: [taken for _, taken in table[:2]] for name, table in found.items()} == {
        "all_gather": [3.5, 1e-9], "reduce_scatter": [3.0, 3.0], "all_reduce": [2.0, 2.0],
    }  # fmt: skip
