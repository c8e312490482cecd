"""`hpctrain export`: a finished run's weights, which are in Hugging Face's format, copied to a folder."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from hpctrain import files

SUMMARY = "write a run's weights for Hugging Face transformers"


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="the run folder")
    command.add_argument("-o", "--output", required=True, metavar="DIR")


def run(options: argparse.Namespace) -> None:
    source, target = Path(options.run) / "model", Path(options.output)
    if not has_weights(source):
        raise ValueError(
            f"{options.run} holds no weights ({source}/model.safetensors is missing); has the run finished?"
        )
    files.check_free(target)
    with files.draft(target) as draft:
        for path in filter(Path.is_file, source.iterdir()):
            shutil.copyfile(path, draft / path.name)
        files.place(draft, target, last="config.json")
    print(f"wrote {target}/")


def has_weights(folder: Path) -> bool:
    """All that were exported: the one file, or what is written after the last of several."""
    return any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
