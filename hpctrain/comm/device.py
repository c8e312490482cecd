"""Which device a rank computes on, and whether this MPI can be given that device's memory."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpctrain.comm.agree import together
from hpctrain.grid import Grid

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

log = logging.getLogger("hpctrain")

PROBE = """
import sys
import torch
from mpi4py import MPI
torch.cuda.set_device(int(sys.argv[1]))
sent = torch.arange(4096, dtype=torch.float32, device="cuda")
received = torch.zeros_like(sent)
torch.cuda.synchronize()
view = lambda t: [MPI.buffer.fromaddress(t.data_ptr(), t.nbytes), MPI.FLOAT]
MPI.COMM_SELF.Sendrecv(view(sent), 0, 0, view(received), 0, 0)
sys.exit(0 if torch.equal(sent, received) else 1)
"""


def local_device(wanted: str, comm: MPI.Intracomm):
    """The torch device of this rank: "cpu", or a CUDA device chosen round-robin among the ranks of its node.

    Args:
        wanted: "auto" (CUDA where every rank has it), "cpu" or "cuda".
        comm: mpi4py communicator; the call is collective over it.

    Raises:
        ValueError: on every rank, when "cuda" is asked for and some rank has none.
    """
    import torch
    from mpi4py import MPI

    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f'run.device must be "auto", "cpu" or "cuda", got {wanted!r}')
    if wanted == "cpu":
        return torch.device("cpu")
    devices = comm.allgather(torch.cuda.device_count())
    if min(devices) == 0:
        if wanted == "cuda":
            raise ValueError(
                f'run.device = "cuda", but rank {devices.index(0)} sees no CUDA device; use "auto" or "cpu"'
            )
        return torch.device("cpu")
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    device = torch.device("cuda", node.rank % devices[comm.rank])
    node.Free()
    torch.cuda.set_device(device)
    return device


def decide_cuda_aware(grid: Grid, device: torch.device) -> str:
    """Decide, together with all ranks, whether CUDA tensors go to MPI directly; sets `grid.transport.cuda_aware`.

    The ladder: HPCTRAIN_CUDA_AWARE=0 or 1 by the user; MPIX_Query_cuda_support of the libmpi that is really loaded;
    the memory kinds of MPI-4.1; MPICH_GPU_SUPPORT_ENABLED of Cray MPICH. A claim is then tried by one message in a
    process of its own, since MPI fails by a segmentation fault. Open MPI's list of extensions is no evidence: wheels
    built without CUDA list it too.

    Returns the reason, the same on every rank.

    Raises:
        ValueError: on every rank, for another HPCTRAIN_CUDA_AWARE.
    """
    if device.type == "cpu":
        return "CPU tensors need no staging"
    with together(grid.world):
        claimed, reason = claim(os.environ)
    reasons = grid.comm.allgather(None if claimed else f"rank {grid.rank}: {reason}")
    refusals = [text for text in reasons if text]
    if not refusals:
        failure = probe(device) if grid.rank == 0 else None
        failure = grid.comm.bcast(failure)
        if failure:
            refusals = [f"{reason}, but the probe failed: {failure}"]
    grid.transport.cuda_aware = not refusals
    verdict = f"staged through pinned host memory ({refusals[0]})" if refusals else f"given to MPI directly ({reason})"
    if grid.rank == 0:
        log.info("CUDA tensors are %s", verdict)
    return verdict


def claim(environment: Mapping[str, str]) -> tuple[bool, str]:
    """What this process can tell without trying: (is MPI said to be CUDA-aware, by whom)."""
    if value := environment.get("HPCTRAIN_CUDA_AWARE"):
        if value not in ("0", "1"):
            raise ValueError(f"HPCTRAIN_CUDA_AWARE must be 1, for an MPI that takes CUDA tensors, or 0, got {value!r}")
        return value == "1", f"HPCTRAIN_CUDA_AWARE={value}"
    answer = query_library()
    if answer is not None:
        return answer, f"MPIX_Query_cuda_support() = {int(answer)}"
    from mpi4py import MPI

    kinds = (MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or "") if hasattr(MPI.Comm, "Get_info") else ""
    if "cuda" in kinds:
        return True, f"mpi_memory_alloc_kinds = {kinds}"
    if environment.get("MPICH_GPU_SUPPORT_ENABLED") == "1":
        return True, "MPICH_GPU_SUPPORT_ENABLED=1"
    return False, "no sign of CUDA support in this MPI"


def query_library() -> bool | None:
    """MPIX_Query_cuda_support of the loaded libmpi, found in the process's memory map; None where it has none."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/libmpi" in line}
    for path in sorted(paths):
        try:
            return bool(ctypes.CDLL(path).MPIX_Query_cuda_support())
        except (OSError, AttributeError):
            continue
    return None


def probe(device: torch.device) -> str | None:
    """Send one CUDA message in a process of its own; None when it arrives, otherwise what went wrong."""
    # The launcher's variables would make the child believe that it belongs to this job.
    launcher = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "MPI_LOCAL", "HYDRA_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(launcher) or k.startswith("OMPI_ALLOW")}
    index = str(device.index or 0)
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", PROBE, index], env=environment, capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        return "no answer in 60 s"
    if child.returncode == 0:
        return None
    lines = child.stderr.strip().splitlines()
    return f"exit status {child.returncode}" + (f": {lines[-1]}" if lines else "")
