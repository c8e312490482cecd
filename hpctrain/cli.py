"""The `hpctrain` command."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import traceback
from pathlib import Path

from hpctrain import __version__, cores
from hpctrain.doctor import command as doctor
from hpctrain.pipeline.command import add_options as add_schedule_options
from hpctrain.scale import command as scale
from hpctrain.slurm import jobs, submit
from hpctrain.slurm.submit import add_resume

USAGE_ERROR = 2
CHECKPOINT_ACTIONS = ("ls", "verify", "export")


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit status. A user's mistake is one line on stderr and status 2."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hpctrain").setLevel(logging.INFO)
    return options.command(options)


def train(options) -> int:
    """Every rank runs this. An unexpected error on any of them ends them all."""
    from hpctrain.train.signals import STOPPED, Interrupts

    interrupts = Interrupts()  # first of all: until then a signal kills
    limit_threads()
    from mpi4py import MPI

    interrupts.take_over()
    world = MPI.COMM_WORLD
    interrupts.leads = world.rank == 0
    try:
        check_launcher(world.size)
        from hpctrain.comm import together
        from hpctrain.config import load_config
        from hpctrain.train.job import Job
        from hpctrain.train.loop import Stopped
        from hpctrain.train.sanity import BadStep

        try:
            with together(world):
                config = load_config(options.config, options.overrides)
            interrupts.max_seconds = config.run.max_seconds
            job = Job(config, world, options.resume, interrupts)
        except (ValueError, OSError) as error:
            return complain(error, world.rank)
        try:
            return STOPPED if job.run() else 0
        except (BadStep, Stopped) as error:  # raised on every rank
            return complain(error, world.rank, status=1)
    except BaseException:
        abort(world)


def pack(options) -> int:
    """Pack text files into HDF5 token shards."""
    from rich.progress import Progress

    from hpctrain.data import pack as pack_text
    from hpctrain.data.tokenizers import tokenizer_from_option

    try:
        tokenizer = tokenizer_from_option(options.tokenizer)
        with Progress(disable=not sys.stdout.isatty()) as bar:
            task = bar.add_task("packing")
            counts = pack_text(
                options.text,
                options.output,
                tokenizer,
                options.shard_tokens,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except (ValueError, OSError) as error:
        return complain(error)
    print(", ".join(f"{count:,} {what}" for what, count in counts.items()) + f" in {options.output}")
    return 0


def export(options) -> int:
    """Copy a finished run's weights, which are in Hugging Face's format, to a folder."""
    source, target = Path(options.run) / "model", Path(options.output)
    try:
        if not (source / "config.json").is_file():
            raise ValueError(f"{options.run} holds no weights ({source}/config.json is missing); has the run finished?")
        if target.exists() and any(target.iterdir()):
            raise ValueError(f"{target} exists and is not empty; choose another folder")
        shutil.copytree(source, target, dirs_exist_ok=True)
    except (ValueError, OSError) as error:
        return complain(error)
    print(f"wrote {target}/")
    return 0


def checkpoint(options) -> int:
    """List, verify or export the checkpoints of a run."""
    from hpctrain.train.checkpoint.command import run

    try:
        return run(options)
    except (ValueError, OSError) as error:
        return complain(error)


def ranks(options) -> int:
    """Print how many ranks a configuration's grid has."""
    from hpctrain.config import load_config

    try:
        print(load_config(options.config, options.overrides).ranks)
    except ValueError as error:
        return complain(error)
    return 0


def schedule(options) -> int:
    """Show a pipeline schedule."""
    from hpctrain.pipeline.command import run

    try:
        run(options)
    except (ValueError, OSError) as error:
        return complain(error)
    return 0


def _careful(run):
    """The function that carries out a command, with a user's mistake said in one line."""

    def command(options) -> int:
        try:
            return run(options) or 0
        except (ValueError, OSError) as error:
            return complain(error)

    return command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpctrain", description="Train on a data × pipeline × tensor grid of MPI ranks."
    )
    parser.add_argument("--version", action="version", version=f"hpctrain {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Intermixed)

    def configured(name, run, summary):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("config", metavar="CONFIG.toml")
        command.add_argument("overrides", nargs="*", metavar="section.key=value", help="takes the place of a setting")
        add_resume(command)
        command.set_defaults(command=run)

    configured("train", train, "train; start it on every rank: mpirun -n 8 hpctrain train CONFIG.toml")
    configured("ranks", ranks, "print how many ranks the configuration's grid has")

    command = commands.add_parser("pack", help="pack text into checksummed HDF5 token shards")
    command.add_argument("text", nargs="+", metavar="TEXT", help="UTF-8 file, directory, or python-stdlib")
    command.add_argument("-o", "--output", required=True, metavar="DATA.h5")
    command.add_argument(
        "--tokenizer", default="bytes", help='"bytes" (default) or a Hugging Face tokenizers JSON file'
    )
    command.add_argument("--shard-tokens", type=int, default=2**28, metavar="N", help="tokens a shard at most (2^28)")
    command.set_defaults(command=pack)

    command = commands.add_parser("schedule", help="show a pipeline schedule: timeline, bubble, memory, messages")
    add_schedule_options(command)
    command.set_defaults(command=schedule)

    command = commands.add_parser("checkpoint", help="list, verify or export the checkpoints of a run")
    command.add_argument("action", choices=CHECKPOINT_ACTIONS)
    command.add_argument("run", metavar="RUN", help="the run folder")
    command.add_argument("--step", type=int, help="this one only; export takes the newest valid one by itself")
    command.add_argument("-o", "--output", metavar="DIR", help="where export writes")
    command.set_defaults(command=checkpoint)

    command = commands.add_parser("export", help="write a run's weights for Hugging Face transformers")
    command.add_argument("run", metavar="RUN", help="the run folder")
    command.add_argument("-o", "--output", required=True, metavar="DIR")
    command.set_defaults(command=export)
    for name, module, summary in (
        ("scale", scale, "measure how a job scales, and report it with plots"),
        ("submit", submit, "submit a job script to Slurm, and follow it"),
        ("doctor", doctor, "what was found here, what will be used, and what to do about each shortfall"),
        ("jobs", jobs, "list the submitted runs: state, last step, loss, tokens/s"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_options(command)
        command.set_defaults(command=_careful(module.run))
    return parser


class Intermixed(argparse.ArgumentParser):
    """Options may stand between the arguments, as in `submit JOB --nodes 2 run.steps=3 --follow`."""

    def parse_known_args(self, args=None, namespace=None):
        self.parse_known_args = super().parse_known_args  # which the line below calls
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            del self.parse_known_args


# Ending well -----------------------------------------------------------------------------------------------------


def complain(error: Exception, rank: int = 0, status: int = USAGE_ERROR) -> int:
    """Say a user's mistake once; returns the exit status."""
    if rank == 0:
        print(f"hpctrain: error: {error}", file=sys.stderr, flush=True)
    return status


def abort(world) -> None:
    """End all ranks, after this one's traceback. Waiting would hang: the others are in a collective without it."""
    print(f"hpctrain: rank {world.rank} of {world.size} failed:", file=sys.stderr)
    traceback.print_exc()
    sys.stderr.flush()
    world.Abort(1)


def check_launcher(size: int) -> None:
    """Raise where the launcher of one MPI started the library of another, which gives worlds of one rank each."""
    told = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or os.environ.get("MPI_LOCALNRANKS")
    if told and int(told) > 1 and size == 1:
        raise RuntimeError(
            f"the launcher started {told} ranks, but MPI sees one: mpirun and the MPI library that mpi4py loaded are "
            "of different makes; use the launcher that belongs to the library (`python -m mpi4py --mpi-lib-version`)"
        )


def limit_threads() -> None:
    """Without OMP_NUM_THREADS, share the node's cores among its ranks; every rank taking all of them is slow."""
    if "OMP_NUM_THREADS" not in os.environ:
        ranks = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get("MPI_LOCALNRANKS") or "1"
        os.environ["OMP_NUM_THREADS"] = str(cores.find().share(int(ranks))[0])
