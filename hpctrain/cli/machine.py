"""`hpctrain machine`: measure this machine, for plans."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpctrain import cores
from hpctrain.doctor.findings import launcher_path

SUMMARY = (
    "measure this machine: products, memory, reading of HDF5, MPI by size and number of ranks, for `hpctrain plan`"
)
EPILOG = "Under Slurm start it in an allocation: it measures as many ranks as there are tasks."
LIMIT = 300  # seconds of a measurement


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("-o", "--output", metavar="M.toml", default="here.toml", help="the machine file (here.toml)")
    command.add_argument(
        "--ranks", metavar="1,2,4", help="numbers of ranks to measure (powers of two to twice the cores, or tasks)"
    )


def run(options: argparse.Namespace) -> None:
    counts = _counts(options.ranks)
    launcher = launcher_path()
    if launcher is None:
        raise ValueError("nothing starts ranks here: neither $MPIRUN nor mpirun; source jobs/env.sh of a checkout")
    from hpctrain.plan.describe import machine_toml

    found = []
    beside = Path(options.output).resolve().parent  # where all nodes see it
    with tempfile.TemporaryDirectory(prefix=".machine-", dir=beside) as folder:
        for count in counts:
            out = Path(folder) / f"{count}.json"
            command = [launcher, "-n", str(count), sys.executable, "-m", "mpi4py", "-m", "hpctrain.plan.measure"]
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            done = subprocess.run(
                [*command, str(out)], capture_output=True, text=True, timeout=LIMIT, env=environment,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            if done.returncode or not out.exists():
                raise ValueError(
                    f"measuring {count} ranks failed with status {done.returncode}:\n{done.stderr[-1000:]}"
                )
            found.append(json.loads(out.read_text()) | {"cores": cores.find().count})
            print(f"{count} ranks: measured", flush=True)
    text = machine_toml(found, time.strftime("%Y-%m-%d"), socket.gethostname())
    Path(options.output).write_text(text, encoding="utf-8")
    print(f"{options.output}: `hpctrain plan CONFIG.toml --machine {options.output}`")


def _counts(text: str | None) -> list[int]:
    if text is None:
        most = int(os.environ.get("SLURM_NTASKS") or 2 * cores.find().count)
        return sorted({*(2**k for k in range(most.bit_length()) if 2**k <= most), most})
    try:
        counts = [int(each) for each in text.split(",")]
    except ValueError:
        counts = []
    if not counts or counts != sorted(set(counts)) or counts[0] < 1:
        raise ValueError(f"--ranks must be rising positive numbers, such as 1,2,4, got {text!r}")
    return counts
