"""Whether ranks may be started here: inside an allocation, or on a machine without Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess


def check_allocation(ranks: int) -> None:
    """Raise ValueError on the login node of a cluster, and for more ranks than the allocation has."""
    if tasks := os.environ.get("SLURM_NTASKS"):
        if ranks > int(tasks):
            raise ValueError(
                f"the allocation has {tasks} tasks, but the study goes to {ranks} ranks; allocate more, or use --submit"
            )
        return
    if shutil.which("scontrol") and "SLURM_JOB_ID" not in os.environ:
        try:
            ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=20)
        except subprocess.TimeoutExpired:
            return
        if " is UP" in ping.stdout:
            raise ValueError("no allocation: this node belongs to a Slurm cluster; add --submit, or begin with salloc")
