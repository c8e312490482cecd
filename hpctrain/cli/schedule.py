"""`hpctrain schedule`: a schedule's timeline, bubble and memory, its picture and its programs."""

from __future__ import annotations

import argparse
import gc
import shutil
from dataclasses import replace
from pathlib import Path

from hpctrain.cli.arguments import check_picture
from hpctrain.pipeline.registry import NAMES, schedule
from hpctrain.pipeline.schedules import Schedule
from hpctrain.pipeline.simulate import Costs, peaks
from hpctrain.pipeline.timeline import text

SUMMARY = "show a pipeline schedule: timeline, bubble, memory, messages"
HEADER = "schedule           time  bubble in % of it  activations  weights  delay"
NOTE = "activations: microbatches held at most, of a rank's share of the model; weights: copies; delay: updates"


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="NAME", help=", ".join(NAMES))
    command.add_argument("--ranks", type=int, required=True, metavar="P")
    command.add_argument("--microbatches", type=int, required=True, metavar="M")
    command.add_argument("--virtual_stages", type=int, metavar="V", help="stages a rank, for interleaved (2)")
    command.add_argument("--slices", type=int, metavar="K", help="token slices, for terapipe (as many as ranks)")
    command.add_argument(
        "--costs",
        default="1,1,1",
        metavar="F,I,W",
        help="time of forward, input gradient and weight gradient of one rank's share of the model (1,1,1)",
    )
    command.add_argument("--plot", metavar="OUT.png", help="draw the timeline")
    command.add_argument("--json", metavar="OUT.json", help="write the programs with messages, one a rank")
    command.add_argument("--compare", action="store_true", help="all schedules side by side")


def run(options: argparse.Namespace) -> None:
    collects = gc.isenabled()
    gc.disable()  # a large schedule is millions of tuples and no cycle: looking for one took a third of the time
    try:
        _run(options)
    finally:
        if collects:
            gc.enable()


def _run(options) -> None:
    costs = _costs(options.costs)
    check_picture(options.plot)
    chosen = schedule(options.name, options.ranks, options.microbatches, options.virtual_stages, options.slices)
    lowered = chosen.lower(share(chosen, costs))  # proves it
    columns = shutil.get_terminal_size((120, 24)).columns
    print(text(chosen.simulate(share(chosen, costs)), max(20, columns - 10)))
    messages = sum(action.kind == "send" for program in lowered.programs for action in program)
    print(f"\n{chosen.name}: {messages} messages, no deadlock even if every message blocks")
    print("\n".join([HEADER, _row(chosen, costs), NOTE]))
    if options.compare:
        print("\n" + compare(options.ranks, options.microbatches, costs, options.virtual_stages, options.slices))
    if options.json:
        Path(options.json).write_text(lowered.to_json())
    if options.plot:
        chosen.plot(options.plot, share(chosen, costs))


def compare(
    ranks: int, microbatches: int, costs: Costs, virtual_stages: int | None = None, slices: int | None = None
) -> str:
    """A table of all schedules, with the reason for each that cannot be had."""
    rows, refused = [HEADER], []
    for name in NAMES:
        own = virtual_stages if name == "interleaved" else None, slices if name == "terapipe" else None
        try:
            rows.append(_row(schedule(name, ranks, microbatches, *own), costs))
        except ValueError as error:
            refused.append(f"{name}: {error}")
    return "\n".join([*rows, NOTE, *refused])


def share(schedule: Schedule, costs: Costs) -> Costs:
    """`costs` are of a rank's share of the model: of the stages' costs, where there are more stages than ranks."""
    return costs.scaled(schedule.ranks / schedule.graph.stages)


def _costs(option: str) -> Costs:
    try:
        forward, inputs, weights = (float(value) for value in option.split(","))
    except ValueError:
        raise ValueError(f"--costs {option}: three numbers F,I,W are wanted, like 1,1,1") from None
    return Costs(forward, inputs, weights)


def _row(schedule: Schedule, costs: Costs) -> str:
    costs = share(schedule, costs)
    result = schedule.simulate(costs)
    weights = peaks(schedule, replace(costs, activation=0.0, weights=schedule.ranks / schedule.graph.stages), result)
    bubble = [100 * part for part in result.bubble]
    return (
        f"{schedule.name:13} {result.makespan:9.5g}  {min(bubble):6.1f} – {max(bubble):<6.1f}"
        f" {max(result.peak):11.4g} {max(weights):8.4g} {max(result.staleness.values()):6}"
    )
