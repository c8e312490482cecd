"""`hpctrain config`: every option of the configuration, as a TOML file to begin with."""

from __future__ import annotations

import argparse

SUMMARY = "print the configuration's options: defaults, types, bounds or choices, and what they mean"
EPILOG = "The output is a configuration: `hpctrain config > run.toml` gives one to edit."


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="?", metavar="section[.key]", help="only this section or option")


def run(options: argparse.Namespace) -> None:
    from hpctrain.config.template import template

    print(template(options.name or ""), end="")
