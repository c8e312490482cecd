"""`hpctrain scale`: a scaling study, from a configuration to a report."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cli.arguments import add_config
from hpctrain.cli.plan import allocated_nodes
from hpctrain.slurm.allocation import check_allocation

if TYPE_CHECKING:
    from hpctrain.scale.points import Point

SUMMARY = "measure how a job scales, and report it with plots"


def add_options(command: argparse.ArgumentParser) -> None:
    add_config(command, nargs="?", help="the job of the smallest point")
    command.add_argument("--ranks", metavar="1,2,4", help="the points; multiples of the first")
    modes = command.add_mutually_exclusive_group()
    modes.add_argument("--weak", action="store_const", const="weak", dest="mode", help="work grows with the ranks")
    modes.add_argument("--strong", action="store_const", const="strong", dest="mode", help="the same job on more ranks")
    command.add_argument("--vary", default="data", metavar="AXIS", help="data (default), pipeline, tensor or auto")
    command.add_argument("--repeat", type=int, default=3, metavar="N", help="measurements of each point (3)")
    command.add_argument(
        "--steps", type=int, default=10, metavar="N", help="timed training steps of a measurement (10)"
    )
    command.add_argument("--threads", type=int, metavar="N", help="of a rank, the same at every point (1)", default=1)
    command.add_argument("--machine", metavar="machine.toml", help="figures for --vary auto: a file or a name")
    command.add_argument("-o", "--output", metavar="DIR", help="of results and report (runs/NAME-weak or -strong)")
    command.add_argument("--submit", action="store_true", help="one Slurm job a point, one after the other")
    command.add_argument("--only", type=int, metavar="N", help="measure just this point of --ranks")
    command.add_argument("--compare", nargs="+", metavar="DIR", help="only a report on several studies, into -o")


def run(options: argparse.Namespace) -> None:
    if options.compare:
        from hpctrain.scale.report import compare

        if not options.output:
            raise ValueError("--compare writes a report of its own; say where with -o DIR")
        print(f"report: {compare([Path(folder) for folder in options.compare], Path(options.output))}")
        return
    points, description = _study(options)
    folder = Path(options.output or f"{points[0].config.run.out}/{points[0].config.run.name}-{options.mode}")
    chosen = [point for point in points if options.only in (None, point.ranks)]
    if options.submit:
        from hpctrain.scale.point_jobs import submit

        submit(options, chosen, folder)
        return
    from hpctrain.scale.report import write
    from hpctrain.scale.runner import measure

    check_allocation(max(point.ranks for point in chosen))
    say = functools.partial(print, flush=True)
    measure(options.config, chosen, folder, options.repeat, options.steps, options.threads, description, say)
    print(f"report: {write(folder, description)}")


def _study(options: argparse.Namespace) -> tuple[list[Point], dict]:
    """The points that the options ask for, and what is noted with each measurement."""
    from hpctrain.scale.points import points as points_of
    from hpctrain.scale.runner import describe_study

    if not options.config or not options.ranks or not options.mode:
        raise ValueError("a study needs CONFIG.toml, --ranks such as 1,2,4, and --weak or --strong")
    for name in ("repeat", "steps", "threads"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")
    try:
        ranks = [int(text) for text in options.ranks.split(",")]
    except ValueError:
        raise ValueError(f"--ranks must be numbers such as 1,2,4, got {options.ranks!r}") from None
    machine = None
    if options.machine:
        from hpctrain.plan import Machine

        machine = Machine.load(options.machine)
        machine.check_nodes(max(ranks), allocated_nodes(max(ranks)))
    points = points_of(options.config, options.overrides, ranks, options.mode, options.vary, machine)
    if options.only is not None and options.only not in ranks:
        raise ValueError(f"--only must be one of --ranks {options.ranks}, got {options.only}")
    return points, describe_study(points, options.mode, options.vary, options.steps, options.threads)
