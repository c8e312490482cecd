"""`hpctrain ranks`: for job scripts, which start as many."""

from __future__ import annotations

import argparse

from hpctrain.cli.arguments import add_config, add_resume

SUMMARY = "print how many ranks the configuration's grid has"


def add_options(command: argparse.ArgumentParser) -> None:
    """Those of `train`, so that a job script can give both the same."""
    add_config(command)
    add_resume(command)


def run(options: argparse.Namespace) -> None:
    from hpctrain.config import load_config

    print(load_config(options.config, options.overrides).ranks)
