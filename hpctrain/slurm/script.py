"""What a job script will run, known and checked before it is submitted."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from hpctrain.config import Config, load_config
from hpctrain.slurm import submitted


def configurations(script: Path, arguments: list[str], array: str | None = None) -> list[Config | None]:
    """Those of the job's tasks, where it trains; None where not.

    A script that trains says so by a line `#HPCTRAIN config=FILE`, the configuration when the first argument is none.

    Raises:
        ValueError: for one that `hpctrain train` would refuse; better now than after hours in the queue.
    """
    tasks = submitted.tasks(array) if array else [None]
    default = re.search(r"^#HPCTRAIN config=(\S+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    if not default:
        return [None] * len(tasks)
    root = checkout(script)
    found: list[Config | None] = []
    for task in tasks:
        overrides = [text if task is None else text.replace("%a", str(task)) for text in arguments]
        overrides = [text for text in overrides if not text.startswith("--resume")]
        path = root / default[1]
        if overrides and overrides[0].endswith(".toml"):
            named = Path(overrides.pop(0))
            path = named.resolve() if named.is_file() else root / named
        with contextlib.chdir(root):  # where the job finds a model of one's own
            found.append(load_config(path, overrides))
    return found


def checkout(script: Path) -> Path:
    """Where the script runs."""
    return script.parent.parent
