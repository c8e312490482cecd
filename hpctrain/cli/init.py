"""`hpctrain init`: a folder to work in, away from the checkout or of an installed wheel."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sysconfig
from pathlib import Path

from hpctrain import files, home

SUMMARY = "lay out a folder with the job scripts, sites, sample configurations and modulefiles"
EPILOG = (
    "They are yours to change. The environment and the package are linked, not copied: a checkout or environment that "
    "others may only read serves everybody, each in a folder of their own."
)
CHECKOUT_ONLY = ("test.sbatch", "matmul.sbatch")  # work on its tests and benchmarks
LINKS = (".venv", "hpctrain")  # names that the job scripts and modulefiles know


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", metavar="DIR", help="is made where it is not there")


def run(options: argparse.Namespace) -> None:
    if not options.folder:
        raise ValueError("the folder's name is empty; a dot is this folder")
    source, target, environment = home.original(), Path(options.folder), _environment()
    for name in ("jobs", "modules", *LINKS):
        if files.status(target / name):
            raise ValueError(f"{target / name} exists; choose another folder")
    target.mkdir(parents=True, exist_ok=True)
    for name in ("jobs", "modules"):
        shutil.copytree(source / name, target / name, ignore=shutil.ignore_patterns("__pycache__", *CHECKOUT_ONLY))
    for name, of in zip(LINKS, (environment, home.PACKAGE)):
        (target / name).symlink_to(of, target_is_directory=True)
    print(f"wrote {target}/; now:  cd {shlex.quote(str(target))} && source jobs/env.sh && hpctrain doctor")


def _environment() -> Path:
    """Whose bin has the `hpctrain` command.

    Raises:
        ValueError: where there is none, as in a folder of `pip install --target`.
    """
    for scheme in (None, "posix_user"):
        scripts = Path(sysconfig.get_path("scripts", scheme) if scheme else sysconfig.get_path("scripts"))
        if (scripts / "hpctrain").exists():
            return scripts.parent
    raise ValueError(f"there is no hpctrain command in {sysconfig.get_path('scripts')}; install into an environment")
