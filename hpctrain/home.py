"""Where the job scripts, sites, sample configurations and modulefiles are that belong to this package."""

from __future__ import annotations

import contextlib
import os
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).parent
INSTALLED = "share/hpctrain/jobs/env.sh"  # by setup.cfg, beside the environment's bin


def home() -> Path:
    """The folder with jobs and modules that is used: what `hpctrain init` laid out and jobs/env.sh named, the checkout,
    or what came with the installed package.

    Raises:
        ValueError: where the package came alone.
    """
    root = os.environ.get("HPCTRAIN_ROOT")
    if root and (link := Path(root, "hpctrain")).exists() and link.samefile(PACKAGE):
        return Path(root)
    return original()


def original() -> Path:
    """That of the checkout or of the installed package; raises as `home`."""
    if (PACKAGE.parent / "jobs/env.sh").is_file():
        return PACKAGE.parent
    with contextlib.suppress(metadata.PackageNotFoundError):  # on PYTHONPATH, say
        for file in metadata.files("hpctrain") or ():
            if file.as_posix().endswith(INSTALLED):
                return Path(str(file.locate())).resolve().parents[1]
    raise ValueError("this hpctrain was installed without its jobs; install its wheel with pip, or use a checkout")
