"""A study as Slurm jobs, one a point."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from hpctrain.home import home
from hpctrain.plan.machine import resolved
from hpctrain.scale.points import Point
from hpctrain.slurm import client, site, submitted


def submit(options: argparse.Namespace, points: list[Point], folder: Path) -> None:
    """Submit jobs/MODE_scaling.sbatch, with the options of `hpctrain scale`, for each point.

    A job waits for the one before, so that one at a time writes the results and none disturbs another; each writes the
    report of what there is.

    Raises:
        ValueError: where there is no Slurm, for what it refuses, and for what a job would, as paths that it does not
            find from the checkout.
    """
    from hpctrain.train.preflight import preflight  # brings torch

    client.require("leave --submit away to run here")
    with contextlib.chdir(home()):
        for point in points:
            preflight(point.config)
    jobs, before = home() / "jobs", None
    script, environment = jobs / f"{options.mode}_scaling.sbatch", site.settings(jobs)
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    chosen = {"ranks": options.ranks, "vary": options.vary, "repeat": options.repeat, "steps": options.steps}
    chosen |= {"threads": options.threads, "output": folder}
    if options.machine:
        chosen["machine"] = resolved(options.machine)
    arguments = [str(Path(options.config).resolve()), *options.overrides, *(f"--{k}={v}" for k, v in chosen.items())]
    for point in points:
        sbatch = [f"--ntasks={point.ranks}", f"--cpus-per-task={options.threads}", f"--output={folder}/%x-%j.out"]
        if before:
            sbatch.append(f"--dependency=afterany:{before}")
        job = client.submit([*sbatch, str(script), *arguments, f"--only={point.ranks}"], environment)
        print(f"job {job}: {point.ranks} ranks ({point.describe()})", flush=True)
        submitted.note(job, [submitted.Submitted(job, str(script), None)])
        before = job
    print(f"report, written anew after each: {folder}/report.html")
