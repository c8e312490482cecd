"""`hpctrain plan`: what a configuration will cost on a machine, and the best way to lay it out on so many ranks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain import files
from hpctrain.cli.arguments import add_config, add_search, check_output, check_picture

if TYPE_CHECKING:
    from hpctrain.config import Config
    from hpctrain.plan import Machine, Prediction

SUMMARY = "predict seconds, bytes and memory of a step on a machine, and find the best layout on so many ranks"
EPILOG = "Machines: `hpctrain plan --machines` lists them; `hpctrain machine -o here.toml` measures this one."

_USED = ("config", "overrides", "json")
_TAKEN = {  # beside --machine, by what the command does
    "machines": (), "learn": (), "show": (*_USED, "plot"), "predict": _USED,
    "search": (*_USED, "ranks", "precision", "keep", "top", "output"),
}  # fmt: skip
_WORDS = {"config": "CONFIG.toml", "overrides": "section.key=value", "output": "-o"}


def add_options(command: argparse.ArgumentParser) -> None:
    add_config(command, nargs="?")
    command.add_argument("--machine", metavar="M", default="here.toml", help="a name, or a file (here.toml)")
    command.add_argument("--machines", action="store_true", help="list the machines that are known by name")
    command.add_argument("--predict", action="store_true", help="only predict the configuration as it stands")
    command.add_argument(
        "--show",
        choices=("attention", "stage", "boxes"),
        help="attention: what ring and Ulysses ranks do, at which hop, with whose keys; stage: the rules by which a "
        "block's operators would be divided in the least time; boxes: the best layers and tensor box of each stage",
    )
    command.add_argument("--plot", metavar="OUT.png", help="draw what --show shows: the work by rank and hop")
    command.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="search the best layout (as many as tasks in an allocation, else the grid's)",
    )
    add_search(command)
    command.add_argument("--top", type=int, metavar="K", help="how many of the best to print (5)")
    command.add_argument("-o", "--output", metavar="OUT.toml", help="of the best one's configuration (plan.toml)")
    command.add_argument("--learn", nargs="+", metavar="RUN", help="set the machine file right by these run folders")
    command.add_argument("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace) -> None:
    from hpctrain import plan
    from hpctrain.config import load_config, to_toml
    from hpctrain.plan.machine import resolved

    _refuse_unused(options)
    if options.machines:
        for name in plan.names():
            print(f"{name:18} {plan.Machine.load(name).description}")
        return
    if options.learn:
        _learn(options)
        return
    if not options.config:
        raise ValueError("a plan needs CONFIG.toml")
    config = load_config(options.config, options.overrides)
    if options.show == "attention":
        _show(config, options)
        return
    machine = plan.Machine.load(options.machine)
    if options.show or options.predict:
        machine.check_nodes(config.ranks, allocated_nodes(config.ranks))
    if options.show:
        {"stage": _show_stage, "boxes": _show_boxes}[options.show](config, machine, options.json)
        return
    if options.predict:
        prediction = plan.predict(config, machine)
        print(prediction.to_json() if options.json else text(prediction, machine.crowded(config.ranks).device.memory))
        return
    ranks, out = options.ranks, Path(options.output or "plan.toml")
    top = 5 if options.top is None else options.top
    if ranks is None:
        ranks = int(os.environ.get("SLURM_NTASKS") or config.ranks)
    machine.check_nodes(ranks, allocated_nodes(ranks))
    check_output(out)
    found = plan.search(config, ranks, machine, top, options.precision, options.keep)
    best = plan.planned(config, found[0])
    best = dataclasses.replace(best, run=dataclasses.replace(best.run, machine=resolved(options.machine)))
    files.replace(out, to_toml(best))
    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in found]))
        return
    for number, (prediction, why) in enumerate(zip(found, ["the best", *plan.changes(found)]), 1):
        print(f"{number}. {why}\n{text(prediction, machine.crowded(ranks).device.memory)}\n")
    print(f"{out}: the configuration of the best one, for `hpctrain train`")


def allocated_nodes(ranks: int) -> int:
    """Nodes of the allocation that has so many tasks; else 1."""
    tasks = os.environ.get("SLURM_NTASKS")
    return int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) if tasks == str(ranks) else 1


def _refuse_unused(options: argparse.Namespace) -> None:
    """Raise ValueError for options that would change nothing."""
    does = next((name for name in ("machines", "learn", "show", "predict") if getattr(options, name)), "search")
    given = {name for name, value in vars(options).items() if value is not False and value not in (None, (), [])}
    if "plot" in given and options.show != "attention":
        got = f"--show {options.show}" if options.show else "no --show"
        raise ValueError(f"--plot draws --show attention, got {got}")
    others = ("learn", "show", "predict", *_TAKEN["search"])
    unused = [_WORDS.get(name, f"--{name}") for name in others if name in given - {does, *_TAKEN[does]}]
    if unused:
        raise ValueError(f"--{does} does not go with {', '.join(unused)}; leave out the one or the other")


def _learn(options: argparse.Namespace) -> None:
    from hpctrain.plan import Machine
    from hpctrain.plan.learn import learn, table, with_learned
    from hpctrain.report.run import read_job

    path = Path(options.machine)
    if not path.is_file():
        raise ValueError(
            f"--learn writes into a machine file, got --machine {options.machine}; `hpctrain machine -o here.toml` "
            "makes one"
        )
    machine, found = learn(Machine.load(path), {folder: read_job(Path(folder)) for folder in options.learn})
    for folder, each in found.items():
        print(f"{folder}\n{table(each)}\n")
    files.replace(path, with_learned(path.read_text(encoding="utf-8"), machine.learned) + "\n")
    print(f"{path}: learned from {machine.learned.runs} runs")


def _show_stage(config: Config, machine: Machine, as_json: bool) -> None:
    from hpctrain.plan.inside_stage import inside_stage, text

    found = inside_stage(config, machine)
    if as_json:
        operators = [each._asdict() for each in found.operators]
        print(json.dumps(dataclasses.asdict(found) | {"operators": operators}))
    else:
        print(text(found))


def _show_boxes(config: Config, machine: Machine, as_json: bool) -> None:
    from hpctrain.plan import between_stages

    cut = between_stages(config, machine)
    if as_json:
        print(json.dumps({"seconds": cut.seconds, "settings": cut.settings}))
        return
    settings = " ".join(f"{name}={json.dumps(value, separators=(',', ':'))}" for name, value in cut.settings.items())
    print(f"{cut.seconds:.4g} s in the pipeline of a step\n  settings {settings}")


def _show(config: Config, options: argparse.Namespace) -> None:
    from hpctrain.plan import attention

    check_picture(options.plot)
    shown = attention.attention_plan(config)
    if options.json:  # of a range or slice, its ends
        print(json.dumps(dataclasses.asdict(shown), default=lambda part: [part.start, part.stop]))
    else:
        print(attention.text(shown, max(20, shutil.get_terminal_size((120, 24)).columns - 40)))
    if options.plot:
        attention.picture(shown, options.plot)


def text(prediction: Prediction, memory: float) -> str:
    """A prediction for people; `memory` is a device's, in bytes."""
    seconds = "  ".join(f"{name} {part:.4g}" for name, part in prediction.parts.items() if part)
    moved = "  ".join(f"{axis} {nbytes / 2**20:,.3f}" for axis, nbytes in prediction.bytes.items())
    fits = "fits" if prediction.fits else f"{(prediction.memory_bytes - memory) / 2**30:.2f} GiB too much"
    return "\n".join(
        [
            prediction.describe(),
            f"  seconds  {seconds}",
            f"  MiB received by the busiest rank  {moved}",
            f"  memory   {prediction.memory_bytes / 2**30:.2f} of {memory / 2**30:.2f} GiB: {fits}",
            f"  settings {' '.join(prediction.overrides)}",
        ]
    )
