"""Where tensors are computed and whether MPI is given device memory: the ladder, and the calls on a real GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running import warm

from hpctrain import Grid, comm
from hpctrain.comm import buffers, device, functional

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize(
    ("environment", "library", "expected"),
    [
        ({"HPCTRAIN_CUDA_AWARE": "0"}, True, (False, "HPCTRAIN_CUDA_AWARE=0")),  # the user's word is the last
        ({"HPCTRAIN_CUDA_AWARE": "1"}, False, (True, "HPCTRAIN_CUDA_AWARE=1")),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, False, (False, "MPIX_Query_cuda_support() = 0")),
        ({}, True, (True, "MPIX_Query_cuda_support() = 1")),
        ({"HPCTRAIN_CUDA_AWARE": ""}, True, (True, "MPIX_Query_cuda_support() = 1")),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, None, (True, "MPICH_GPU_SUPPORT_ENABLED=1")),
        ({"MPICH_GPU_SUPPORT_ENABLED": "0"}, None, (False, "no sign of CUDA support in this MPI")),
    ],
)
def test_order_of_the_ladder(monkeypatch, environment, library, expected):
    monkeypatch.setattr(device, "query_library", lambda: library)
    assert device.claim(environment) == expected


@pytest.mark.parametrize("value", ["true", "yes", "on"])
def test_a_setting_that_is_neither(value):
    with pytest.raises(ValueError, match=f"HPCTRAIN_CUDA_AWARE must be 1, .* or 0, got '{value}'"):
        device.claim({"HPCTRAIN_CUDA_AWARE": value})


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_setting_of_one_rank_that_is_neither(world, monkeypatch):
    """Refused on all."""
    monkeypatch.setenv("HPCTRAIN_CUDA_AWARE", "true" if world.rank else "0")
    with pytest.raises(ValueError, match="HPCTRAIN_CUDA_AWARE must be 1, .* got 'true'"):
        comm.decide_cuda_aware(Grid(tensor=2), torch.device("cuda", 0))


def test_the_library_that_is_loaded_is_asked():
    """In a process of its own, where MPI is loaded and the extension list of a wheel says "cuda" whatever is true."""
    code = "from mpi4py import MPI; from hpctrain.comm.device import query_library; print(query_library())"
    command = warm([sys.executable, "-c", code])
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()[-1]
    assert answer in ("True", "False", "None")
    assert torch.cuda.is_available() or answer != "True"


def test_a_failing_probe_is_an_answer_and_not_a_crash(monkeypatch):
    monkeypatch.setattr(device, "PROBE", "import os; os.kill(os.getpid(), 11)")
    assert device.probe(torch.device("cuda", 0)) == "exit status -11"
    monkeypatch.setattr(device, "PROBE", "raise SystemExit('MPI says no')")
    assert device.probe(torch.device("cuda", 0)) == "exit status 1: MPI says no"
    monkeypatch.setattr(device, "PROBE", "")
    assert device.probe(torch.device("cuda", 0)) is None


def test_staging_without_cupy(monkeypatch):
    """In torch's pinned memory, as on ROCm."""
    empty = torch.empty

    def pinned(*shape, dtype, pin_memory):
        assert pin_memory
        return empty(*shape, dtype=dtype)

    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch, "empty", pinned)
    host = buffers.pinned_like(torch.ones(3, 4, dtype=torch.bfloat16))
    assert (host.shape, host.dtype) == ((3, 4), torch.bfloat16)


def test_memory_reaches_mpi_in_one_place():
    """`buffers.message`, which waits for the stream; the probe is a program of its own."""
    package = Path(comm.__file__).parents[1]
    addresses = {str(path.relative_to(package)) for path in package.rglob("*.py") if "fromaddress" in path.read_text()}
    assert addresses == {"comm/buffers.py", "comm/device.py"}


@pytest.mark.mpi
def test_one_rank_without_support_makes_all_stage(world, monkeypatch):
    grid = Grid(tensor=world.size)
    monkeypatch.setenv("HPCTRAIN_CUDA_AWARE", "0" if grid.rank == world.size - 1 else "1")
    monkeypatch.setattr(device, "probe", lambda device: None)
    verdict = comm.decide_cuda_aware(grid, torch.device("cuda", 0))
    assert not grid.transport.cuda_aware
    assert verdict == f"staged through pinned host memory (rank {world.size - 1}: HPCTRAIN_CUDA_AWARE=0)"


@pytest.mark.mpi
@pytest.mark.parametrize("failure", [None, "exit status -11"])
def test_a_claim_counts_only_if_the_probe_agrees(world, monkeypatch, failure):
    grid = Grid(tensor=world.size)
    monkeypatch.setenv("HPCTRAIN_CUDA_AWARE", "1")
    monkeypatch.setattr(device, "probe", lambda device: failure)
    verdict = comm.decide_cuda_aware(grid, torch.device("cuda", 0))
    assert grid.transport.cuda_aware is (failure is None)
    assert verdict == (
        "given to MPI directly (HPCTRAIN_CUDA_AWARE=1)"
        if failure is None
        else "staged through pinned host memory (HPCTRAIN_CUDA_AWARE=1, but the probe failed: exit status -11)"
    )


@pytest.mark.mpi
def test_wishes_that_cannot_be_met(world):
    assert comm.local_device("cpu", world) == torch.device("cpu")
    with pytest.raises(ValueError, match='run.device must be "auto", "cpu" or "cuda", got \'gpu\''):
        comm.local_device("gpu", world)
    if not torch.cuda.is_available():
        assert comm.local_device("auto", world) == torch.device("cpu")
        with pytest.raises(ValueError, match="rank 0 sees no CUDA device"):
            comm.local_device("cuda", world)


@gpu
@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_calls_take_cuda_tensors(world, dtype):
    """Sums, gathers, messages and gradients of CUDA tensors equal those of the same CPU tensors, bit for bit."""
    grid = Grid(tensor=world.size)
    where = comm.local_device("cuda", world)
    comm.decide_cuda_aware(grid, where)
    line = grid.tensor.x
    here = torch.arange(1000).to(dtype) / 8 + line.rank
    counts = (1000,) * line.size
    for call in (
        lambda t: comm.all_reduce(t.clone(), line),
        lambda t: comm.all_gather(t, line, counts),
        lambda t: comm.reduce_scatter(t.repeat(line.size), line, counts),
        lambda t: comm.broadcast(t.clone(), line),
    ):
        on_cpu, on_gpu = call(here), call(here.to(where))
        assert on_gpu.is_cuda
        assert torch.equal(on_gpu.cpu(), on_cpu)
    leaf = here.to(where).requires_grad_()
    functional.all_gather(leaf, line, counts).square().sum().backward()
    assert leaf.grad.is_cuda


@gpu
@pytest.mark.gpu
@pytest.mark.mpi
@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_sums_wait_for_the_stream(world, dtype):
    """Of 1 MiB each, so that they are exchanged in pieces: each is added before the next one overwrites it."""
    grid = Grid(tensor=world.size)
    where = comm.local_device("cuda", world)
    comm.decide_cuda_aware(grid, where)
    line = grid.tensor.x
    rows = (1 << 20) // dtype.itemsize
    here = (torch.arange(rows * line.size) % 7 + line.rank).to(dtype)
    expected = (torch.arange(rows * line.size) % 7 * line.size + sum(range(line.size))).to(dtype)
    for _ in range(20):
        reduced = comm.reduce_scatter(here.to(where), line)
        assert torch.equal(reduced.cpu(), expected[rows * line.rank : rows * (line.rank + 1)])
        assert torch.equal(comm.all_reduce(here.to(where), line).cpu(), expected)
