"""`hpctrain submit`: a job script into Slurm's queue, checked first, and followed where that is wanted."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from pathlib import Path

from hpctrain.cli.arguments import add_resume
from hpctrain.slurm import client, site, submitted
from hpctrain.slurm.follow import follow

SUMMARY = "submit a job script to Slurm, and follow it"


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("script", metavar="JOB.sbatch", help="such as jobs/train.sbatch")
    command.add_argument("arguments", nargs="*", metavar="section.key=value", help="what the script is given")
    command.add_argument("--nodes", type=int, metavar="N")
    command.add_argument("--time", metavar="T", help="limit, as sbatch reads it: 30, 2:00:00, 1-0")
    command.add_argument("--array", metavar="0-3", help="several tasks; a task's number takes the place of %%a")
    add_resume(command)
    command.add_argument(
        "--follow", action="store_true", help="show the log until the job ends; its status is the command's"
    )
    command.add_argument("--dry-run", action="store_true", help="only print what would be submitted")


def run(options: argparse.Namespace) -> int:
    """Returns 0, or with --follow the job's exit status."""
    script = Path(options.script).resolve()
    if not script.is_file():
        raise ValueError(f"{options.script} does not exist; the jobs are in {script.parent}")
    if options.array and options.follow:
        raise ValueError("--follow shows one log, but --array has one a task; see `hpctrain jobs`")
    given = options.arguments + {"": [], "must": ["--resume"], "auto": ["--resume=auto"]}[options.resume]
    from hpctrain.slurm.script import checkout, configurations

    configs, root = configurations(script, given, options.array), checkout(script)
    ranks = {config.ranks for config in configs if config}
    if len(ranks) > 1:
        raise ValueError(f"the tasks of an array must have grids of one size, got {sorted(ranks)} ranks")
    with contextlib.chdir(root):
        check(configs, options.resume)
    environment = site.settings(script.parent)
    arguments = [*sbatch_options(options, next(iter(ranks), None)), str(script), *given]
    if options.dry_run:
        sbatch = {key: value for key, value in environment.items() if key.startswith("SBATCH_")}
        print(shlex.join(["env", *(f"{key}={value}" for key, value in sbatch.items()), "sbatch", *arguments]))
        return 0
    client.require(f"to run here:  bash {shlex.join([options.script, *given])}")
    job = client.submit(arguments, environment)
    numbers = [f"{job}_{task}" for task in submitted.tasks(options.array)] if options.array else [job]
    print(f"job {job}" + f", {len(numbers)} tasks" * bool(options.array), flush=True)
    folders = [str(root / config.folder) if config else None for config in configs]
    submitted.add([submitted.Submitted(n, str(script), folder) for n, folder in zip(numbers, folders)])
    if not options.array and (log := (client.show(job) or {}).get("StdOut")):
        print(f"log {log}", flush=True)
    return follow(job) if options.follow else 0


def check(configs: list, resume: str) -> None:
    """Raise ValueError for what the job would find wrong with its data, folders and checkpoints."""
    from hpctrain.train.preflight import preflight  # brings torch

    for config in filter(None, configs):
        preflight(config, resume)


def sbatch_options(options: argparse.Namespace, ranks: int | None) -> list[str]:
    """Those that differ from the ones in the script."""
    chosen = {"ntasks": ranks, "nodes": options.nodes, "time": options.time, "array": options.array}
    return [f"--{name}={value}" for name, value in chosen.items() if value is not None]
