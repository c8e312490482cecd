"""`hpctrain checkpoint ls|verify|export RUN`: look at the checkpoints of a run, without MPI."""

from __future__ import annotations

import argparse

SUMMARY = "list, verify or export the checkpoints of a run"


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=("ls", "verify", "export"))
    command.add_argument("run", metavar="RUN", help="the run folder")
    command.add_argument("--step", type=int, help="this one only; export takes the newest valid one by itself")
    command.add_argument("-o", "--output", metavar="DIR", help="where export writes")
    command.add_argument(
        "--weights",
        choices=("last", "ema"),
        help="those of the last step, or their moving average (train.ema_decay); by itself what train.ema_use exports",
    )


def run(options: argparse.Namespace) -> int:
    """Returns 1 when something is wrong with a checkpoint."""
    from hpctrain.cli.checkpoint_actions import act  # torch: every command reads this file

    return act(options)
