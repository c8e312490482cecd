"""`hpctrain train`: every rank runs this."""

from __future__ import annotations

import argparse

from hpctrain.cli.arguments import add_config, add_resume
from hpctrain.launch import abort, check_launcher, complain, end, limit_threads

SUMMARY = "train; start it on every rank: mpirun -n 8 hpctrain train CONFIG.toml"
EPILOG = "`hpctrain config` prints every setting with its default, its bounds or choices, and what it means."


def add_options(command: argparse.ArgumentParser) -> None:
    add_config(command)
    add_resume(command)


def run(options: argparse.Namespace) -> int:
    """An unexpected error on any rank ends them all."""
    from hpctrain.train.signals import STOPPED, Interrupts

    interrupts = Interrupts()  # first of all: until then a signal kills
    limit_threads()
    from mpi4py import MPI

    interrupts.take_over()
    world = MPI.COMM_WORLD
    interrupts.leads = world.rank == 0
    try:
        check_launcher(world.size)
        from hpctrain.comm import check_started_alike, together
        from hpctrain.config import load_config
        from hpctrain.train.loop import train
        from hpctrain.train.sanity import BadStep, Stopped, StoppedAlone
        from hpctrain.train.session import build

        try:
            check_started_alike(world, {"command": options.command})
            with together(world):
                config = load_config(options.config, options.overrides)
            interrupts.max_seconds = config.run.max_seconds
            session = build(config, world, options.resume, interrupts)
        except (ValueError, OSError) as error:
            return end(world, complain(error, world.rank))
        try:
            return end(world, STOPPED if train(session) else 0)
        except (BadStep, Stopped) as error:  # raised on every rank
            return end(world, complain(error, world.rank, status=1))
        except StoppedAlone as error:
            abort(world, error)
    except BaseException:
        abort(world)
