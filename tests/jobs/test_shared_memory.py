"""A node with little room for shared memory: what fits is taken, what does not is said by all ranks."""

import os
import subprocess
import sys

import pytest
from running import ROOT

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
MOUNT = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
PROGRAM = """
import torch
from hpctrain import Grid, comm
axis = Grid(tensor=2).tensor.x
scratch, last = comm.workspace(axis, torch.ones(1)), 0
for mib in (20, 20, 60):
    try:
        last = float(scratch.gather(torch.full((mib << 17,), float(mib)), (mib << 17,) * 2)[-1])
    except OSError as error:
        print(f"rank {axis.rank} gathered {last} and then: {error}", flush=True)
"""


def test_a_node_with_64_mib(tmp_path):
    """Two gathers of 20 MiB fit; then one of 60, in place of the first, does not."""
    if not os.access("/usr/bin/unshare", os.X_OK) or subprocess.run([*UNSHARE, MOUNT], capture_output=True).returncode:
        pytest.skip("this user cannot mount a small /dev/shm")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    launcher = os.environ.get("MPIRUN", str(ROOT / "jobs/mpirun.sh"))
    command = [*UNSHARE, f"{MOUNT} && exec {launcher} -n 2 {sys.executable} {path}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = sorted(line for line in ended.stdout.splitlines() if "gathered" in line)
    assert [line.split(":")[0] for line in said] == [f"rank {rank} gathered 20.0 and then" for rank in range(2)]
    assert all("62.9 MB of shared memory for the 2 ranks of x do not fit: /dev/shm of " in line for line in said)
