"""`hpctrain machine`: measure this machine, for plans."""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain import cores, files
from hpctrain.cli.arguments import check_output
from hpctrain.doctor.findings import launcher_path
from hpctrain.rank_job import ranks_command, run_ranks

SUMMARY = (
    "measure this machine: products, memory, reading of HDF5, MPI by size and number of ranks, for `hpctrain plan`"
)
EPILOG = (
    "Under Slurm start it in an allocation: it measures as many ranks as there are tasks. Of two nodes or more, with "
    "as many tasks on each, it measures the network between them, which plans for several nodes need."
)
LIMIT, EACH = 300, 10  # seconds of a measurement, and more for each rank: many start slowly, or share cores
ROUNDS = 5
# Of the figures of `plan.measure`; others do not change.
RATES = {"elements", "state", "tables", "norms", "activations", "cold", "attention"}
SECONDS = {"products", "launch", "reading", "collectives", "between", "alone", "together"}
SOME = ["model.width=384", "model.heads=8", "model.layers=2", "model.context=256", "train.batch=4",
        "train.microbatches=2"]  # fmt: skip
LEAST = ["model.width=8", "model.heads=1", "model.layers=1", "model.context=4", "train.batch=1", "train.microbatches=1"]


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("-o", "--output", metavar="M.toml", default="here.toml", help="the machine file (here.toml)")
    command.add_argument(
        "--ranks",
        metavar="1,2,4",
        help="numbers of ranks to measure (powers of two to the tasks of an allocation, or else to the node's CUDA "
        "devices, or twice its cores)",
    )
    command.add_argument(
        "--rounds", metavar="N", type=int, default=ROUNDS,
        help="times to measure all, as others may use the machine for a minute: the best of each figure counts, the "
        f"median where ranks share cores ({ROUNDS})",
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    counts = _counts(options.ranks)
    if options.rounds < 1:
        raise ValueError(f"--rounds must be a positive number, got {options.rounds}")
    check_output(Path(options.output))
    launcher = launcher_path()
    if launcher is None:
        raise ValueError("nothing starts ranks here: neither $MPIRUN nor mpirun; source jobs/env.sh of a checkout")
    rounds: list[list[dict]] = []
    beside = Path(options.output).resolve().parent  # where all nodes see it
    with tempfile.TemporaryDirectory(prefix=".machine-", dir=beside) as folder:
        measuring = Measuring(launcher, counts, Path(folder))
        for number in range(options.rounds):
            rounds.append([])
            for count, figures in measuring.a_round():
                rounds[-1].append(figures)
                print(f"round {number + 1} of {options.rounds}, {count} ranks: measured", flush=True)
    files.replace(Path(options.output), described(rounds))
    print(f"{options.output}: `hpctrain plan CONFIG.toml --machine {options.output}`")


class Measuring:
    """Of numbers of ranks on this machine, in a folder that all its nodes see."""

    def __init__(self, launcher: str, counts: Sequence[int], folder: Path):
        self._launcher, self._counts, self._folder = launcher, counts, folder
        self._once = {"cores": _devices() or cores.find().count, **_memory(launcher, folder)}
        self._rounds = 0

    def a_round(self) -> Iterator[tuple[int, dict]]:
        """Each number of ranks, and its figures."""
        own = self._folder / str(self._rounds)
        own.mkdir()
        self._rounds += 1
        for count in self._counts:
            figures = _measured(self._launcher, count, own, "hpctrain.plan.measure")
            yield count, figures | _steps(self._launcher, count, own) | self._once


def described(rounds: list[list[dict]]) -> str:
    """The machine file of the figures of each round."""
    from hpctrain.plan.describe import machine_toml
    from hpctrain.plan.in_training import in_training

    return machine_toml(in_training(of_rounds(rounds)), time.strftime("%Y-%m-%d"), socket.gethostname())


def of_rounds(rounds: list[list[dict]]) -> list[dict]:
    """For each number of ranks the figures that count: the best of all rounds, as others only take time away; medians
    where ranks share cores, as they wait for one another by chance, in a typical round as in a typical step."""
    return [
        {key: _chosen([each[key] for each in found], _rule(key, found[0])) for key in found[0]}
        for found in zip(*rounds, strict=True)
    ]


def _rule(key, figures) -> Callable:
    if figures["ranks_of_a_node"] <= figures["cores"] and key in RATES | SECONDS:
        return max if key in RATES else min
    return statistics.median_low  # one that was measured, and whole numbers stay whole


def _chosen(values: list, choose: Callable) -> Any:
    """Of lists and tables alike, number by number."""
    if isinstance(values[0], dict):
        return {key: _chosen([each[key] for each in values], choose) for key in values[0]}
    if isinstance(values[0], list):
        return [_chosen(list(each), choose) for each in zip(*values, strict=True)]
    return choose(values)


def _measured(launcher: str, ranks: int, folder: Path, module: str, *arguments: str) -> dict:
    """What the ranks of a job of this module wrote.

    Raises:
        ValueError: where it fails, or takes too long.
    """
    out = folder / f"{module}-{ranks}.json"
    command = [*ranks_command(launcher, ranks, module), str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    limit = LIMIT + EACH * ranks
    try:
        done = run_ranks(
            command, limit, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"measuring {ranks} ranks took longer than {limit} s; measure fewer by --ranks, or while nobody else uses "
            "the machine"
        ) from error
    if done.returncode or not out.exists():
        raise ValueError(f"measuring {ranks} ranks failed with status {done.returncode}:\n{done.stderr[-1000:]}")
    return json.loads(out.read_text())


def _steps(launcher: str, ranks: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of a step of some small models, of which each rank trains its own, and all train one."""
    from hpctrain.plan.in_training import jobs

    text, settings = folder / "steps.txt", folder / "jobs.json"
    text.write_text("Every rank trains a model of its own, and all train one.\n" * 999)
    data = f"data.text={json.dumps([str(text)])}"
    found = {name: [[*job, data] for job in jobs(count)] for name, count in (("alone", 1), ("together", ranks))}
    settings.write_text(json.dumps(found))
    return _measured(launcher, ranks, folder, "hpctrain.scale.at_once", "6", str(settings))


def _memory(launcher: str, folder: Path) -> dict[str, float]:
    """Bytes that a rank has, of the host's memory or the device's, which trains next to nothing; and what one that
    trains has besides, as a part of what it allocates, at most as much again: allocators keep holes between weights,
    gradients and activations."""
    config, text = folder / "memory.toml", folder / "memory.txt"
    config.write_text("")
    text.write_text("All ranks have these libraries.\n" * 999)
    data = [f"data.text={json.dumps([str(text)])}", f"data.path={folder / 'memory.h5'}", f"run.out={folder}"]

    def measured(job: list[str], steps: int) -> dict[str, float]:
        call = "hpctrain.scale.measure", str(steps), str(config), *job, *data
        return _measured(launcher, 1, folder, *call)

    from hpctrain.config import load_config
    from hpctrain.plan import Machine, predict

    least, some = measured(LEAST, 1), measured(SOME, 5)
    plain = Machine.load("cpu-cluster")  # of what is allocated alone, whatever the rates
    plain = replace(plain, device=replace(plain.device, reserved=0.0, slack=0.0))
    job = load_config(overrides=[*SOME, "checkpoint.background=false"])  # a measurement saves nothing
    allocated = predict(job, plain).memory_bytes
    slack = (some["memory"] - least["memory"]) / allocated - 1
    return {"reserved": least["memory"] + least["memory_outside"], "slack": min(1.0, max(0.0, slack))}


def _devices() -> int:
    """CUDA devices of this node, which ranks compute with where there are any."""
    import torch

    return torch.cuda.device_count()


def _counts(text: str | None) -> list[int]:
    if text is None:
        most = int(os.environ.get("SLURM_NTASKS") or _devices() or 2 * cores.find().count)
        return sorted({*(2**k for k in range(most.bit_length()) if 2**k <= most), most})
    try:
        counts = [int(each) for each in text.split(",")]
    except ValueError:
        counts = []
    if not counts or counts != sorted(set(counts)) or counts[0] < 1:
        raise ValueError(f"--ranks must be rising positive numbers, such as 1,2,4, got {text!r}")
    return counts
