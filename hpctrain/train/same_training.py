"""What a checkpoint says of the training that it is of, and whether a job that resumes is of the same."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

import h5py
import mpi4py
import numpy as np
import torch

from hpctrain import __version__
from hpctrain.checkpoint.manifests import Manifest
from hpctrain.config import Config, ModelConfig
from hpctrain.grid import Grid

# Settings that a training keeps for good; None for all of a section. Others may change when it is resumed.
SAME = {
    "model": tuple(f.name for f in dataclasses.fields(ModelConfig) if f.name != "init"),
    "run": ("seed",),
    "train": ("batch", "optimizer", "ema_decay"),
    "data": ("validation", "documents"),
    "precision": None,
}


def description(config: Config, grid: Grid) -> dict[str, Any]:
    """What every checkpoint of a job says beside the tensors."""
    return {
        "grid": grid.shape,
        "config": dataclasses.asdict(config),
        "random": {"seed": config.run.seed, "generator": "Philox-4x64-10 by name, step and index"},
        "versions": {
            "hpctrain": __version__, "python": platform.python_version(), "torch": torch.__version__,
            "numpy": np.__version__, "h5py": h5py.__version__, "mpi4py": mpi4py.__version__,
        },
    }  # fmt: skip


def check_same_training(manifest: Manifest, config: Config, data_facts: dict[str, Any]) -> None:
    """Raise ValueError unless a job of this configuration and these data may go on from the checkpoint."""
    here = dataclasses.asdict(config)
    wrong = [
        f"{section}.{key} = {here[section][key]}, was {value}"
        for section, keys in SAME.items()
        for key, value in manifest.member("config", section).items()
        if (keys is None or key in keys) and value != here[section].get(key)
    ]
    wrong += [
        f"{key} of the data {value}, was {there}"
        for key, value in data_facts.items()
        if value != (there := manifest.member("data", key))
    ]
    for needed in (("data", "batches"), ("sanity", "losses")):  # by whoever goes on
        manifest.member(*needed)
    if wrong:
        raise ValueError(
            f"step-{manifest.step} is of another training: {'; '.join(wrong)}. Use its settings, or start anew without "
            "--resume"
        )
