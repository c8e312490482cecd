"""Arguments that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path

PICTURES = (".png", ".pdf", ".svg")


def add_config(command: argparse.ArgumentParser, nargs: str | None = None, help: str | None = None) -> None:
    """A configuration file and the overrides after it."""
    command.add_argument("config", nargs=nargs, metavar="CONFIG.toml", help=help)
    command.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="takes the place of a setting"
    )


def add_resume(command: argparse.ArgumentParser) -> None:
    """--resume, and --resume=auto, which a requeued job adds to what it was given: no value apart, as settings follow.
    Of both the first counts, wherever it stands."""
    command.add_argument(
        "--resume", dest="resume", action="store_const", const="must", default="",
        help="go on from the newest valid checkpoint of the run",
    )  # fmt: skip
    command.add_argument(
        "--resume=auto", dest="resume", action=_Auto, nargs=0,
        help="the same for a requeued job: from what this job saved, or anew where that is nothing",
    )  # fmt: skip


class _Auto(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        namespace.resume = namespace.resume or "auto"


def add_search(command: argparse.ArgumentParser) -> None:
    """--precision and --keep, of the search of a plan: lists of names."""
    command.add_argument(
        "--precision", type=names, default=(), metavar="fp32,bf16",
        help="values that precision.compute may have (that of the configuration)",
    )  # fmt: skip
    command.add_argument(
        "--keep", type=names, default=(), metavar="grid.tensor,…", help="settings that the search leaves as they are"
    )


def names(text: str) -> tuple[str, ...]:
    """
    >>> names("fp32, bf16")
    ('fp32', 'bf16')
    """
    return tuple(name.strip() for name in text.split(",") if name.strip())


def check_picture(path: str | None) -> None:
    """Raise ValueError where --plot names a file of a kind that is not drawn."""
    if path and Path(path).suffix not in PICTURES:
        raise ValueError(f"--plot {path}: the file's ending is one of {', '.join(PICTURES)}")


def check_output(path: Path) -> None:
    """Raise ValueError where -o names a file that cannot be written for want of a folder, or as there is one."""
    if not path.parent.is_dir():
        raise ValueError(f"-o {path}: there is no folder {path.parent} to write into")
    if path.is_dir():
        raise ValueError(f"-o {path} is a folder; name a file, such as {path / 'here.toml'}")
