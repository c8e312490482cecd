"""The settings of a site: the file jobs/sites/NAME.env, chosen by HPCTRAIN_SITE."""

from __future__ import annotations

import os
import re
from pathlib import Path


def name() -> str:
    """The site's, "generic" where HPCTRAIN_SITE is not set or empty."""
    return os.environ.get("HPCTRAIN_SITE") or "generic"


def settings(jobs: Path) -> dict[str, str]:
    """The variables that the site sets and this process does not have yet.

    Args:
        jobs: the folder with the job scripts, in which `sites` lies.

    Raises:
        ValueError: naming the sites that there are, when HPCTRAIN_SITE is none of them.
    """
    file = jobs / "sites" / f"{name()}.env"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.env")))
        raise ValueError(f"HPCTRAIN_SITE={name()}, but there is no {file}; known are {known or 'none'}")
    return {key: value for key, value in parse(file.read_text(encoding="utf-8")) if key not in os.environ}


def parse(text: str) -> list[tuple[str, str]]:
    """
    >>> parse('# a site\\nexport A="1 2"  # because\\n')
    [('A', '1 2')]
    """
    return re.findall(r'^export (\w+)="([^"]*)"', text, re.MULTILINE)
