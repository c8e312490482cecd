"""`hpctrain submit`: a job script into Slurm's queue, checked first, and followed where that is wanted."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cli.arguments import add_resume, add_search
from hpctrain.home import home
from hpctrain.slurm import client, site, submitted
from hpctrain.slurm.follow import follow

if TYPE_CHECKING:
    from hpctrain.config import Config

SUMMARY = "submit a job script to Slurm, and follow it"


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("script", metavar="JOB.sbatch", help="such as jobs/train.sbatch")
    command.add_argument(
        "arguments", nargs="*", default=[], metavar="section.key=value", help="what the script is given"
    )
    command.add_argument("--nodes", type=int, metavar="N")
    command.add_argument(
        "--plan",
        choices=("auto",),
        help="search the layout that takes the fewest seconds; its settings take the place of those given",
    )
    command.add_argument(
        "--machine", metavar="M", help="of --plan: a name, or a file (here.toml), as of `hpctrain plan`"
    )
    command.add_argument(
        "--ranks", type=int, metavar="N", help="of --plan (nodes × ranks of the machine's nodes, else the grid's)"
    )
    add_search(command)
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
        raise ValueError(f"{options.script} does not exist; the jobs are in {home() / 'jobs'}")
    if options.array and options.follow:
        raise ValueError("--follow shows one log, but --array has one a task; see `hpctrain jobs`")
    given = options.arguments + {"": [], "must": ["--resume"], "auto": ["--resume=auto"]}[options.resume]
    from hpctrain.slurm.script import checkout, configurations
    from hpctrain.slurm.time_limit import check_time

    if options.time:
        check_time(script, options.time)
    configs, root = configurations(script, given, options.array), checkout(script)
    if options.plan:
        given += plan(configs, options)
        configs = configurations(script, given, options.array)
    elif options.machine or options.ranks is not None:
        raise ValueError("--machine and --ranks are for --plan auto; without it a job has the ranks of its grid")
    elif options.precision or options.keep:
        raise ValueError("--precision and --keep are for --plan auto; without it a job has the settings given")
    ranks = {config.ranks for config in configs if config}
    if len(ranks) > 1:
        raise ValueError(f"the tasks of an array must have grids of one size, got {sorted(ranks)} ranks")
    if options.array:
        refuse_one_folder(configs, options.array)
    with contextlib.chdir(root):
        check(configs, options.resume)
    # a script of one's own, which lies elsewhere, has the sites that belong to this command
    environment = site.settings(script.parent if (script.parent / "sites").is_dir() else home() / "jobs")
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
    submitted.note(job, [submitted.Submitted(n, str(script), folder) for n, folder in zip(numbers, folders)])
    if not options.array and (log := (client.show(job) or {}).get("StdOut")):
        print(f"log {log}", flush=True)
    return follow(job) if options.follow else 0


def plan(configs: list[Config | None], options: argparse.Namespace) -> list[str]:
    """Overrides that make the best plan of the job, and have it compared with what the job takes. Printed. Without
    --nodes the job has as many of the machine's as the ranks need.

    Raises:
        ValueError: for an unknown machine, several nodes of one whose file is of one node, no plan that fits, tasks of
            an array that differ in what is planned.
    """
    from hpctrain.plan import Machine, search
    from hpctrain.plan.job import read
    from hpctrain.plan.machine import resolved

    training = [config for config in configs if config]
    if not training:
        raise ValueError(
            f"--plan auto is for a script that trains: {options.script} has no line `#HPCTRAIN config=FILE`"
        )
    config = training[0]
    if any(read(other) != read(config) for other in training):
        raise ValueError(
            "--plan auto makes one plan for all tasks of --array, which differ in more than seeds and rates"
        )
    name = options.machine or config.run.machine or "here.toml"
    machine, ranks = Machine.load(name), options.ranks
    if ranks is None:
        ranks = options.nodes * machine.node if options.nodes else config.ranks
    if options.nodes is None:
        # more ranks than cores may have been measured on a machine of one node
        occupied = [each.ranks for each in machine.occupied] if len(machine.link) == 1 else []
        options.nodes = -(-ranks // max([machine.node, *occupied]))
    machine.check_nodes(ranks, options.nodes)
    best, *_ = search(config, ranks, machine, 1, options.precision, options.keep)
    summary = f"plan for {ranks} ranks of {machine.name}: {best.describe()}\n  {' '.join(best.overrides)}"
    print(summary, file=sys.stderr, flush=True)
    return [*best.overrides, f"run.machine={resolved(name)}"]


def refuse_one_folder(configs: list[Config | None], array: str) -> None:
    """Raise ValueError where tasks that may run at the same time would write one run folder."""
    folders = Counter(config.folder for config in configs if config)
    if array.endswith("%1"):  # one after the other
        return
    for folder, tasks in folders.items():
        if tasks > 1:
            raise ValueError(
                f"{tasks} tasks of --array {array} have one run folder, {folder}; give each its own, by "
                f"run.name={folder.name}-%a"
            )


def check(configs: list, resume: str) -> None:
    """Raise ValueError for what the job would find wrong with its data, folders and checkpoints."""
    from hpctrain.train.preflight import preflight  # brings torch

    for config in filter(None, configs):
        preflight(config, resume)


def sbatch_options(options: argparse.Namespace, ranks: int | None) -> list[str]:
    """Those that differ from the ones in the script."""
    chosen = {"ntasks": ranks, "nodes": options.nodes, "time": options.time, "array": options.array}
    return [f"--{name}={value}" for name, value in chosen.items() if value is not None]
