"""`hpctrain report`: one page about a run."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "write a page about a run: loss, throughput, time by rank, memory, traffic"


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="the run folder, of a job that has ended or is under way")


def run(options: argparse.Namespace) -> None:
    from hpctrain.report.write import write

    print(f"report: {write(Path(options.run))}")
