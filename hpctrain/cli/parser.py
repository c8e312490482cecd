"""From the words of a command line to a command and its exit status."""

from __future__ import annotations

import argparse
import io
import logging
import sys
from typing import Any

from hpctrain import __version__
from hpctrain.cli import (
    checkpoint,
    config,
    doctor,
    evaluate,
    export,
    init,
    jobs,
    machine,
    pack,
    plan,
    ranks,
    report,
    sample,
    scale,
    schedule,
    submit,
    train,
)
from hpctrain.launch import complain

# Each has SUMMARY; add_options(parser); and run(options), which returns the exit status, None for 0, and raises
# ValueError or OSError for a user's mistake.
COMMANDS = {
    "init": init,
    "train": train,
    "config": config,
    "ranks": ranks,
    "eval": evaluate,
    "sample": sample,
    "pack": pack,
    "schedule": schedule,
    "checkpoint": checkpoint,
    "export": export,
    "machine": machine,
    "plan": plan,
    "scale": scale,
    "submit": submit,
    "jobs": jobs,
    "report": report,
    "doctor": doctor,
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit status. A user's mistake is one line on stderr and status 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # in an encoding without × and → there is a ? for them, no traceback
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hpctrain").setLevel(logging.INFO)
    try:
        return options.run_command(options) or 0
    except (ValueError, OSError) as error:
        return complain(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpctrain", description="Train on a data × pipeline × tensor grid of MPI ranks."
    )
    parser.add_argument("--version", action="version", version=f"hpctrain {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Intermixed)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.SUMMARY, epilog=getattr(module, "EPILOG", None)
        )
        module.add_options(command)
        command.set_defaults(command=name, run_command=module.run)
    return parser


class Intermixed(argparse.ArgumentParser):
    """Options may stand between the arguments, as in `submit JOB --nodes 2 run.steps=3 --follow`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        vars(self)["parse_known_args"] = super().parse_known_args  # which the line below calls
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            del vars(self)["parse_known_args"]
