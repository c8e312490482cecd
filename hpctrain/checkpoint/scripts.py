"""Save and load in a script of one's own: one call each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from hpctrain import comm, files
from hpctrain.checkpoint.checkpointer import Checkpointer, checked_int
from hpctrain.checkpoint.manifests import NAME, Manifest
from hpctrain.checkpoint.training_state import TrainingState
from hpctrain.data_parallel import DataParallelStrategy
from hpctrain.data_parallel.optimizer_state import counted_in_groups
from hpctrain.given import check_types


def save(
    root: str | os.PathLike, step: int, model: torch.nn.Module, strategy: DataParallelStrategy,
    about: dict[str, Any] | None = None, keep: int = 2,
) -> Path:  # fmt: skip
    """Save the weights, the buffers that `state_dict()` has, such as running statistics, and the optimizer's state of
    all ranks as ROOT/step-N; returns once it is on disk. Collective.

        ht.checkpoint.save("checkpoints", step, trainer.model, trainer.strategy)

    Args:
        about: whatever JSON holds; `load` gives it back, in the manifest.
        keep: number of newest checkpoints that stay, this one included; older ones in `root` are deleted once it has
            been read back.

    Raises:
        ValueError: on every rank, where it could not be written, as on a full disk, of which nothing is left then;
            where `root` has a checkpoint of this step or a later one; where `step` is not an integer of at least 0 or
            `keep` not one of at least 1; for an `about` that JSON does not hold; for an optimizer that counts in its
            `param_groups`.
    """
    root = Path(root)
    about = {} if about is None else about
    check_types(model=(model, torch.nn.Module), strategy=(strategy, DataParallelStrategy))
    with comm.together(strategy.grid.world):
        if not isinstance(about, dict):
            raise ValueError(f"about must be a dict of what JSON holds, got {about!r:.100}")
        about = {"grid": strategy.grid.shape, **about}
        step = checked_int("step", step, 0)
        checkpointer = Checkpointer(root, strategy.grid.comm, keep, background=False)
        try:
            json.dumps(about)
        except TypeError as wrong:
            raise ValueError(f"about must be what JSON holds: {wrong}") from None
        if counted := counted_in_groups(strategy.optimizer):
            raise ValueError(
                f"{type(strategy.optimizer).__name__} changes {', '.join(sorted(counted))} of its param_groups in a "
                "step; checkpoints hold its state of parameters alone: let it keep torch.tensor(...) of them there"
            )
    if error := checkpointer.save(step, TrainingState(model, strategy), about):
        raise ValueError(f"no checkpoint of {error}")
    return root / f"step-{step}"


def load(root: str | os.PathLike, model: torch.nn.Module, strategy: DataParallelStrategy) -> Manifest | None:
    """Fill the model and the optimizer's state from the newest valid checkpoint in `root`, saved on any grid with any
    strategy. Collective; every rank reads just what it holds, and none removes what another job is saving.

    Returns:
        Its manifest, of which `step` and `about` say where to go on; None where `root` has no checkpoint.

    Raises:
        ValueError: on every rank, for checkpoints of another model or version, or where none is valid. Those that are
            not are renamed step-N.bad. For a `root` that is itself a checkpoint.
        OSError: on a rank that cannot read a file.
    """
    check_types(model=(model, torch.nn.Module), strategy=(strategy, DataParallelStrategy))
    root, world = Path(root), strategy.grid.world
    with comm.together(world):
        if world.rank == 0 and files.status(root / NAME):
            raise ValueError(f"{root} is one checkpoint; give the folder of checkpoints that it is in")
    return Checkpointer(root, strategy.grid.comm).resume(TrainingState(model, strategy))
