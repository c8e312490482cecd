"""Measure the points of a study in turn, and keep what was measured."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hpctrain import __version__
from hpctrain.config import Config
from hpctrain.home import PACKAGE, home
from hpctrain.rank_job import ranks_command, run_ranks
from hpctrain.scale.points import Point
from hpctrain.scale.results import Results


def key(point: Point, steps: int, threads: int) -> str:
    """Identifies a measurement, so that it is not repeated."""
    return hashlib.blake2b(f"{point.toml}{steps} {threads}".encode(), digest_size=8).hexdigest()


def describe_study(points: list[Point], mode: str, vary: str, steps: int, threads: int) -> dict:
    """The study that these points make, noted with each measurement, as one folder may hold several studies."""
    return {"mode": mode, "vary": vary, "study": [[point.ranks, key(point, steps, threads)] for point in points]}


def measure(
    path: str | Path,
    points: list[Point],
    folder: Path,
    repeats: int,
    steps: int,
    threads: int,
    about: dict,
    say: Callable[[str], None] = print,
) -> None:
    """Every point `repeats` times, round after round, so that all see the same hours of a shared machine.

    Args:
        about: noted with every measurement, by `describe_study`.

    Raises:
        ValueError: when a point fails; those finished before are kept.
        OSError: when a result cannot be kept.
    """
    results = Results(folder)
    known = {(result["key"], result["repeat"]) for result in results.read()}
    where = {**about, **surroundings()}
    for repeat in range(repeats):
        for point in points:
            name = key(point, steps, threads)
            if (name, repeat) in known:
                continue
            start = time.time()
            figures = _launch(path, point, folder, steps, threads)
            results.add(
                {
                    "key": name, "ranks": point.ranks, "repeat": repeat, "grid": point.config.grid_shape, **figures,
                    "steps": steps, "time": start, **where, "config": point.toml,
                }
            )  # fmt: skip
            rate = figures["flops"] / figures["step_seconds"] / 1e9
            speed = f"{figures['tokens_per_second']:,.0f} tokens/s, {rate:,.1f} GFLOP/s"
            crowded = ", oversubscribed" if figures["oversubscribed"] else ""
            say(f"{point.ranks} ranks, {repeat + 1} of {repeats}: {speed}{crowded} ({point.describe()})")


def _launch(path, point: Point, folder: Path, steps: int, threads: int) -> dict:
    launcher = os.environ.get("MPIRUN") or str(home() / "jobs/mpirun.sh")
    if not shutil.which(launcher):
        raise ValueError(
            f"nothing starts ranks here: {launcher} does not exist; source jobs/env.sh of a checkout first"
        )
    with tempfile.TemporaryDirectory(dir=folder, prefix=".point-") as scratch:
        out = Path(scratch) / "figures.json"
        log = folder / f"ranks-{point.ranks}.log"
        command = ranks_command(launcher, point.ranks, "hpctrain.scale.measure")
        folders = [f"run.out={scratch}", "run.name=point", "run.checkpoint_every=0", "run.checkpoint_minutes=0"]
        data = _packed_once(point.config, folder)
        with log.open("w") as output:
            done = run_ranks(
                [*command, str(out), str(steps), str(path), *point.overrides, *folders, *data],
                stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )  # fmt: skip
        if done.returncode or not out.exists():
            end = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise ValueError(
                f"the point of {point.ranks} ranks failed with status {done.returncode}; {log} ends:\n{end}"
            )
        return json.loads(out.read_text())


def _packed_once(config: Config, folder: Path) -> list[str]:
    """Overrides by which all points read the text that the first of them packs in the study's folder."""
    if not config.data.text or config.data.path:
        return []
    from hpctrain.train.training_data import find_packed  # brings torch, which submitting a study does without

    path, _ = find_packed(dataclasses.replace(config, run=dataclasses.replace(config.run, out=str(folder))))
    return [f"data.path={path}", f"data.text={json.dumps(config.data.text)}"]


def _commit() -> str:
    """Of the checkout, "unknown" where git does not tell it; of an installed package its version."""
    if not (PACKAGE.parent / "jobs").is_dir():
        return f"hpctrain {__version__}"
    command = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:  # there is no git
        return "unknown"


def surroundings() -> dict:
    """Commit, modules and Slurm job, without which a figure says little."""
    return {
        "commit": _commit(),
        "modules": os.environ.get("LOADEDMODULES", "").split(":") if os.environ.get("LOADEDMODULES") else [],
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }
