"""`hpctrain submit`: a job script into Slurm's queue, checked first, and followed where that is wanted."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from hpctrain.slurm import client, registry, site
from hpctrain.slurm.follow import follow


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of the command."""
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


def add_resume(command: argparse.ArgumentParser) -> None:
    """--resume, and --resume=auto: no value apart, as settings follow."""
    for name, value, text in (
        ("--resume", "must", "go on from the newest valid checkpoint of the run"),
        (
            "--resume=auto",
            "auto",
            "the same for a requeued job: from what this job saved, or anew where that is nothing",
        ),
    ):
        command.add_argument(name, dest="resume", action="store_const", const=value, default="", help=text)


def run(options) -> int:
    """Carry out the command; returns 0, or with --follow the job's exit status.

    Raises:
        ValueError, OSError: a user's mistake.
    """
    script = Path(options.script).resolve()
    if not script.is_file():
        raise ValueError(f"{options.script} does not exist; the jobs are in {script.parent}")
    if options.array and options.follow:
        raise ValueError("--follow shows one log, but --array has one a task; see `hpctrain jobs`")
    given = options.arguments + {"": [], "must": ["--resume"], "auto": ["--resume=auto"]}[options.resume]
    runs = run_folders(script, given, options.array)
    ranks = {ranks for ranks, _ in runs if ranks is not None}
    if len(ranks) > 1:
        raise ValueError(f"the tasks of an array must have grids of one size, got {sorted(ranks)} ranks")
    environment = site.settings(script.parent)
    arguments = [*sbatch_options(options, next(iter(ranks), None)), str(script), *given]
    if options.dry_run:
        sbatch = {key: value for key, value in environment.items() if key.startswith("SBATCH_")}
        print(shlex.join(["env", *(f"{key}={value}" for key, value in sbatch.items()), "sbatch", *arguments]))
        return 0
    client.require(f"to run here:  bash {shlex.join([options.script, *given])}")
    job = client.submit(arguments, environment)
    numbers = [f"{job}_{task}" for task in registry.tasks(options.array)] if options.array else [job]
    print(f"job {job}" + f", {len(numbers)} tasks" * bool(options.array), flush=True)
    registry.add([registry.Submitted(n, str(script), folder) for n, (_, folder) in zip(numbers, runs)])
    if not options.array and (log := (client.show(job) or {}).get("StdOut")):
        print(f"log {log}", flush=True)
    return follow(job) if options.follow else 0


def sbatch_options(options, ranks: int | None) -> list[str]:
    """Those that differ from the ones in the script."""
    chosen = {"ntasks": ranks, "nodes": options.nodes, "time": options.time, "array": options.array}
    return [f"--{name}={value}" for name, value in chosen.items() if value is not None]


def run_folders(script: Path, arguments: list[str], array: str | None = None) -> list[tuple[int | None, str | None]]:
    """(ranks of the grid, run folder) of each of the job's tasks, where it trains; (None, None) where not.

    A script that trains says so by a line `#HPCTRAIN config=FILE`, the configuration when the first argument is none.

    Raises:
        ValueError: for what `hpctrain train` would refuse; better now than after hours in the queue.
    """
    tasks = registry.tasks(array) if array else [None]
    said = re.search(r"^#HPCTRAIN config=(\S+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    if not said:
        return [(None, None)] * len(tasks)
    from hpctrain.config import load_config

    root, folders = script.parent.parent, []  # scripts run in the checkout
    for task in tasks:
        words = [word if task is None else word.replace("%a", str(task)) for word in arguments]
        words = [word for word in words if not word.startswith("--resume")]
        given = bool(words) and words[0].endswith(".toml")
        path = words[0] if given and Path(words[0]).is_file() else root / (words[0] if given else said[1])
        config = load_config(path, words[given:])
        folders.append((config.ranks, str(root / config.folder)))
    return folders
