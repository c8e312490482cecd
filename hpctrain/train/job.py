"""A training job, from configuration to exported weights: what `hpctrain train` runs on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import platform
import socket
from pathlib import Path

import h5py
import mpi4py
import numpy as np
import torch

from hpctrain import __version__, comm, files
from hpctrain.config import Config
from hpctrain.config_checks import check_grid, check_pipeline, token_slices
from hpctrain.data import ShardedTokens, pack
from hpctrain.data.corpus import text_files
from hpctrain.data.format import VERSION
from hpctrain.data.tokenizers import tokenizer_from_option
from hpctrain.grid import Grid
from hpctrain.layers import algorithm_of
from hpctrain.models.export import export_gpt2
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.models.pretrained import load_gpt2
from hpctrain.pipeline.profile import partition_gpt2
from hpctrain.randomness import Key
from hpctrain.replicas import make
from hpctrain.train.batches import Microbatch, Samples
from hpctrain.train.checkpoint import Checkpointer, TrainingState
from hpctrain.train.checkpoint.manifest import Manifest
from hpctrain.train.generate import generate
from hpctrain.train.loop import Loop
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.precision import dtypes
from hpctrain.train.run_folder import RunFolder, last_losses
from hpctrain.train.signals import Interrupts
from hpctrain.train.trainer import Trainer

log = logging.getLogger("hpctrain")

# Settings that a training keeps for good; None for all of a section. Others may change when it is resumed.
SAME = {
    "model": ("kind", "layers", "width", "heads", "context", "vocabulary", "dropout", "tied"),
    "run": ("seed",),
    "train": ("batch", "optimizer"),
    "data": ("validation",),
    "precision": None,
}


class Job:
    """Everything a run needs, checked on all ranks before anything starts.

    Raises:
        ValueError: on every rank, for a grid that does not fit the ranks, bad data, or a folder that cannot be made.
    """

    def __init__(self, config: Config, world, resume: str = "", interrupts: Interrupts | None = None):
        check_grid(config, world.size)
        shape, algorithm = config.grid_shape, config.tensor.algorithm
        self.config, self.wanted = config, resume
        self.grid = grid = Grid(shape["data"], shape["pipeline"], (shape["x"], shape["y"], shape["z"]), comm=world)
        self.world, self.hosts = grid.comm, grid.comm.allgather(socket.gethostname())
        if config.comm.watchdog:
            self.world = comm.Watched(comm.Watch(grid, config.comm.watchdog))
        if config.comm.check:
            comm.Checks(grid)
        self.device = comm.local_device(config.run.device, world)
        comm.choose_all_reduce(grid.data, config.comm.all_reduce)
        self.transport = comm.decide_cuda_aware(grid, self.device)
        self.key = Key(config.run.seed)

        with comm.together(world):
            path = packed(config) if grid.rank == 0 else None
        path = world.bcast(path)
        self.tokens = ShardedTokens(path, comm=world)
        with comm.together(world):
            if self.tokens.vocabulary > config.model.vocabulary:
                raise ValueError(
                    f"model.vocabulary = {config.model.vocabulary} is too small for the data in {path}, "
                    f"which use {self.tokens.vocabulary} tokens; use model.vocabulary={self.tokens.vocabulary} or more"
                )
            context, validation = config.model.context, config.data.validation
            key, idle = self.key / "order", config.replicas.idle
            self.samples = Samples(self.tokens, context, validation, key, algorithm, idle)
        self.data_facts = {
            "samples": self.samples.training.samples,
            "tokens": self.tokens.tokens,
            "end_of_document": self.tokens.end_of_document,
            "sha256": self.tokens.digest(world),
        }

        m = config.model
        model_shape = GPT2Shape(m.layers, m.width, m.heads, m.context, m.vocabulary, m.dropout, m.tied)
        torch.set_float32_matmul_precision(config.precision.matmul)
        given, precision = dtypes(config.precision)
        made = {"dtype": given, "device": self.device}
        layers = algorithm_of(grid, algorithm, config.tensor.overlap)
        self.schedule = check_pipeline(config)
        sanity = config.sanity
        skips = sanity.nonfinite == "skip" or (sanity.spike_factor and sanity.spike == "skip")
        if self.schedule.delayed and skips:
            raise ValueError(
                f'{self.schedule.name} updates weights before a step is over, which cannot be skipped; use "stop" or '
                '"rollback" for sanity.nonfinite and sanity.spike'
            )
        cut = self._cut(model_shape, made)
        self.model = GPT2(
            grid, model_shape, cut, self.schedule.placement, algorithm=layers, recompute=config.train.recompute,
            key=self.key, **made,
        )  # fmt: skip
        if config.model.init:
            with comm.together(world):
                load_gpt2(self.model, Path(config.model.init))
        train = config.train
        optimizer = make_optimizer(self.model.parameters(), train.weight_decay, train.optimizer, train.momentum)
        replicas = make(config.replicas, self.model, grid, optimizer, precision)
        slices = token_slices(config)
        self.trainer = Trainer(self.model, grid, optimizer, self.schedule, train.clip, replicas, slices)

        self.state = TrainingState(self.model, replicas)
        self.folder = None
        with comm.together(world):
            if grid.rank == 0:
                self.folder = RunFolder(config, resume)
        options = config.checkpoint
        checkpointer = Checkpointer(config.folder / "checkpoints", self.world, options.keep, options.background)
        self.loop = Loop(self, checkpointer, interrupts)
        if world.bcast(self.folder.resumes if self.folder else None):
            self.loop.resume()
        with comm.together(world):
            if self.folder:
                self.folder.begin(self.loop.step)

    def _cut(self, shape: GPT2Shape, made: dict) -> list[int]:
        """Blocks of each pipeline stage."""
        config, schedule = self.config, self.schedule
        sequences = -(-config.train.batch // (self.grid.data.size * schedule.microbatches))
        return partition_gpt2(
            self.grid.comm, config.pipeline.partition, shape, sequences, schedule.ranks, schedule.microbatches,
            stages=schedule.graph.stages, schedule=schedule.name, **made,
        )  # fmt: skip

    def run(self) -> str:
        """Train, evaluate, export, generate. Returns why it stopped early, if it did; a checkpoint is then there."""
        config, lead = self.config, self.grid.rank == 0
        if lead:
            self._introduce()
        reason = self.loop.run()
        if lead:
            self.folder.close()
            self.folder.plot()
        if reason:
            if lead:
                print(f"stopped by {reason} after step {self.loop.step}; saved, go on with --resume", flush=True)
            return reason
        with self.trainer.replicas.whole():
            export_gpt2(self.model, self.grid, config.folder / "model", self.tokens.end_of_document)
            sample = self._sample()
        if lead:
            print(last_losses(self.folder.history))
            if sample:
                print(f"sample:\n{sample}")
            print(f"results: {self.folder.path}/", flush=True)
        return ""

    def training_batch(self, batch: int, step: int) -> list[Microbatch]:
        """This rank's microbatches of a batch of the sample order."""
        train = self.config.train
        return self.samples.training_step(self.grid, batch, train.batch, self.schedule, self.device, step)

    def validation_batches(self) -> list[list[Microbatch]]:
        batch, batches = self.config.train.batch, self.config.run.eval_batches
        return self.samples.validation_batches(self.grid, batch, batches, self.schedule, self.device)

    def about(self) -> dict:
        """What a checkpoint tells beside the tensors."""
        return {
            "grid": self.grid.shape,
            "config": dataclasses.asdict(self.config),
            "random": {"seed": self.config.run.seed, "generator": "Philox-4x64-10 by name, step and index"},
            "versions": {
                "hpctrain": __version__, "python": platform.python_version(), "torch": torch.__version__,
                "numpy": np.__version__, "h5py": h5py.__version__, "mpi4py": mpi4py.__version__,
            },
        }  # fmt: skip

    def check_origin(self, told: Manifest) -> None:
        """Raise ValueError unless going on from this checkpoint is going on with the same training."""
        there, here = told.about["config"], dataclasses.asdict(self.config)
        wrong = [
            f"{section}.{key} = {here[section][key]}, was {value}"
            for section, keys in SAME.items()
            for key, value in there[section].items()
            if (keys is None or key in keys) and value != here[section].get(key)
        ]
        wrong += [f"{k} of the data {v}, was {told.about['data'].get(k)}" for k, v in self.data_facts.items()
                  if v != told.about["data"].get(k)]  # fmt: skip
        if wrong:
            raise ValueError(
                f"step-{told.step} is of another training: {'; '.join(wrong)}. Use its settings, or start anew without "
                "--resume"
            )

    def _sample(self) -> str | None:
        count = self.config.run.sample
        if not count:
            return None
        end = self.tokens.end_of_document
        ids = generate(self.model, self.grid, [end], count, self.tokens.vocabulary, self.key / "sample")
        return self.tokens.tokenizer.decode(ids)

    def _introduce(self) -> None:
        config, model = self.config, self.config.model
        if self.folder.moved:
            print(f"an older run was moved to {self.folder.moved}/")
        if self.loop.step:
            print(f"resumed after step {self.loop.step}")
        elif self.wanted == "auto":
            print("this job has no checkpoint yet: training begins anew")
        print(self.grid.describe())
        print(
            f"{model.kind}: {model.layers} layers, width {model.width}, {model.heads} heads, context {model.context}, "
            f"vocabulary {model.vocabulary}; {self.tokens.tokens:,} tokens of data; {config.precision.compute} on "
            f"{self.device}; {self.transport}",
            flush=True,
        )


def packed(config: Config) -> str:
    """The path of the packed data; packs `data.text` first where that has not been done."""
    path, text = config.data.path, config.data.text
    if path and (files.status(path) or not text):
        return path
    tokenizer = tokenizer_from_option(config.data.tokenizer)
    if not path:
        # Named by what it holds, so that a changed text, tokenizer or format is packed anew.
        facts = [str(VERSION), tokenizer.description]
        facts += [f"{p}:{(s := p.stat()).st_size}:{s.st_mtime_ns}" for p in text_files(text)]
        name = hashlib.blake2b("\n".join(facts).encode(), digest_size=6).hexdigest()
        path = str(Path(config.run.out) / "data" / f"{name}.h5")
    if not files.status(path):
        print(f"packing {', '.join(text)} into {path}", flush=True)
        with contextlib.suppress(FileExistsError):  # jobs that start together all pack: the first to end counts
            pack(text, path, tokenizer, replace=False)
    return path
