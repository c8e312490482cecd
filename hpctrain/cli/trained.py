"""What the commands have in common that every rank runs with a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from hpctrain.launch import abort, check_launcher, complain, end, limit_threads


def add_source(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", metavar="RUN", help="a run folder, or one in Hugging Face's format")
    command.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="such as grid.tensor=2")


def on_all_ranks(options: argparse.Namespace, work: Callable) -> int:
    """`work(options, trained, world)` with the model of `options.source`; an unexpected error on any rank ends all."""
    limit_threads()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    try:
        check_launcher(world.size)
        from hpctrain.comm import check_started_alike
        from hpctrain.train.inference import open_trained

        try:
            given = {name: value for name, value in vars(options).items() if name != "run_command"}  # a function
            check_started_alike(world, {"command": options.command} | given)
            work(options, open_trained(Path(options.source), options.overrides, world), world)
        except (ValueError, OSError) as error:  # raised on every rank
            return end(world, complain(error, world.rank))
        return 0
    except BaseException:
        abort(world)
