"""What a job says at its start, and its warnings: once, on rank 0."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from hpctrain.cores import processor
from hpctrain.grid import Grid
from hpctrain.grid_shape import describe_shape
from hpctrain.plan import predict
from hpctrain.train.session import Session

log = logging.getLogger("hpctrain")


def introduce(session: Session) -> None:
    """Print what is about to be trained, and where. For rank 0 alone."""
    config, folder = session.config, session.folder
    if folder and folder.moved:
        print(f"an older run was moved to {folder.moved}/")
    if session.position.step:
        print(f"resumed after step {session.position.step}")
    elif session.resume == "auto":
        print("this job has no checkpoint yet: training begins anew")
    print(session.grid.describe())
    if choice := config.sequence_choice(config.grid_shape):
        print(choice.describe())
    working = session.grid.replica.size - config.data_parallel.idle
    if (without := working - config.train.batch) > 0:
        log.warning(
            "WARNING: train.batch = %d gives no sequence to %d of the %d replicas, which do nothing; use "
            "train.batch=%d or more, or a smaller grid.data", config.train.batch, without, working, working,
        )  # fmt: skip
    if config.run.machine:
        print(f"plan for {config.run.machine}: {predict(config, config.run.machine).describe()}")
    tokens = sum(each.tokens for each in session.data.samples.sources)
    print(
        f"{session.spec.describe(session.model.shape)}; {tokens:,} tokens of data; "
        f"{config.precision.compute} on {session.device}; {session.transport}",
        flush=True,
    )


def job_facts(session: Session) -> dict[str, Any]:
    """What a report says of a job beside its figures."""
    from mpi4py import MPI

    return {
        "time": time.time(),
        "model": session.spec.describe(session.model.shape),
        "grid": describe_shape(session.grid.shape, session.grid.expert.size, session.grid.expert_tensor),
        "precision": session.config.precision.compute,
        "device": torch.cuda.get_device_name(session.device) if session.device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "transport": session.transport,
        "mpi": MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 "),
        "torch": torch.__version__,
    }


def warn(grid: Grid, text: str) -> None:
    """On rank 0; called on all of them."""
    if grid.rank == 0:
        log.warning("WARNING: %s", text)
