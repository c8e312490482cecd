"""What can be known of a job before its ranks start: on a login node, without MPI."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hpctrain import models
from hpctrain.checkpoint import folder, index
from hpctrain.checkpoint.pieces import Corrupt
from hpctrain.config import Config
from hpctrain.config.checks import pipeline_schedule
from hpctrain.data import ShardedTokens
from hpctrain.data_parallel import is_mixed
from hpctrain.models.pretrained import check_config
from hpctrain.plan import predict
from hpctrain.randomness import RngKey
from hpctrain.train.dtypes import dtypes
from hpctrain.train.metric_loggers import check_installed
from hpctrain.train.run_folder import check_resumable
from hpctrain.train.same_training import check_same_training
from hpctrain.train.training_data import check_vocabulary, data_facts, find_packed, samples_of, source_paths


def preflight(config: Config, resume: str = "") -> None:
    """Check what the job itself will: data, the folder to start from, precision, the checkpoint to go on from. Writes
    nothing.

    Args:
        config: a checked one; its paths are those of this working directory.
        resume: as `RunFolder` takes it.

    Raises:
        ValueError, OSError: for what `train.session.build` would refuse.
    """
    mixed = is_mixed(config.data_parallel.method, *dtypes(config.precision))
    if mixed and (schedule := pipeline_schedule(config)).delayed:
        raise ValueError(f"pipeline.schedule = {schedule.name} trains in one precision, got {config.precision}")
    if config.model.init and resume != "must":  # else the weights are a checkpoint's
        spec = models.get(config.model.kind)
        check_config(spec.huggingface, spec.shape(vars(config.model)), Path(config.model.init))
    check_installed(config)
    if config.run.machine:
        predict(config, config.run.machine)
    if resume == "must":
        check_resumable(config.folder)
    path, tokenizer = find_packed(config)
    if tokenizer:  # packed by the job
        check_vocabulary(config, tokenizer.vocabulary, ", ".join(config.data.text))
        return
    sources = [ShardedTokens(each) for each in source_paths(config, path)]
    samples = samples_of(config, sources, RngKey(config.run.seed))
    saved = folder.steps(config.folder / "checkpoints")
    if resume == "must" and saved:
        with contextlib.suppress(Corrupt):  # the job sets it aside, and takes the one before
            manifest = index.read(folder.place(config.folder / "checkpoints", saved[0])).manifest
            check_same_training(manifest, config, data_facts(samples))
