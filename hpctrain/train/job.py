"""A training job, from configuration to exported weights: what `hpctrain train` runs on every rank."""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path

import torch

from hpctrain import comm
from hpctrain.config import Config, check_grid, check_pipeline
from hpctrain.data import ShardedTokens, pack
from hpctrain.data.corpus import text_files
from hpctrain.data.tokenizers import tokenizer_from_option
from hpctrain.grid import Grid
from hpctrain.layers import algorithm_of
from hpctrain.models.export import export_gpt2
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.randomness import Key
from hpctrain.replicas import make
from hpctrain.train.batches import Samples
from hpctrain.train.generate import generate
from hpctrain.train.optimizer import learning_rate, make_optimizer
from hpctrain.train.progress import Progress
from hpctrain.train.run_folder import RunFolder
from hpctrain.train.trainer import Trainer

log = logging.getLogger("hpctrain")

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Job:
    """Everything a run needs, checked on all ranks before anything starts.

    Raises:
        ValueError: on every rank, for a grid that does not fit the ranks, bad data, or a folder that cannot be made.
    """

    def __init__(self, config: Config, world):
        check_grid(config, world.size)
        shape, algorithm = config.grid_shape, config.tensor.algorithm
        self.config = config
        self.grid = grid = Grid(shape["data"], shape["pipeline"], (shape["x"], shape["y"], shape["z"]), comm=world)
        self.device = comm.local_device(config.run.device, world)
        comm.choose_all_reduce(grid.data, config.comm.all_reduce)
        self.transport = comm.decide_cuda_aware(grid, self.device)
        self.key = Key(config.run.seed)

        with comm.together(world):
            path = packed(config) if grid.rank == 0 else None
        path = world.bcast(path)
        with comm.together(world):
            self.tokens = ShardedTokens(path, comm=world)
            if self.tokens.vocabulary > config.model.vocabulary:
                raise ValueError(
                    f"model.vocabulary = {config.model.vocabulary} is too small for the data in {path}, "
                    f"which use {self.tokens.vocabulary} tokens; use model.vocabulary={self.tokens.vocabulary} or more"
                )
            context, validation = config.model.context, config.data.validation
            key, idle = self.key / "order", config.replicas.idle
            self.samples = Samples(self.tokens, context, validation, key, algorithm, idle)

        m = config.model
        model_shape = GPT2Shape(m.layers, m.width, m.heads, m.context, m.vocabulary, m.dropout, m.tied)
        made = {"dtype": DTYPES[config.precision.compute], "device": self.device}
        layers = algorithm_of(grid, algorithm, config.tensor.overlap)
        self.schedule = check_pipeline(config)
        cut = None if config.pipeline.partition == "even" else config.pipeline.partition
        self.model = GPT2(grid, model_shape, cut, self.schedule.placement, algorithm=layers, key=self.key, **made)
        train = config.train
        optimizer = make_optimizer(self.model.parameters(), train.weight_decay, train.optimizer, train.momentum)
        replicas = make(config.replicas, self.model.parameters(), grid, optimizer)
        self.trainer = Trainer(self.model, grid, optimizer, self.schedule, train.clip, replicas)

        self.folder = None
        with comm.together(world):
            if grid.rank == 0:
                self.folder = RunFolder(config)

    def run(self) -> None:
        """Train, evaluate, export, generate."""
        config, lead = self.config, self.grid.rank == 0
        steps, every = config.run.steps, config.run.eval_every
        progress = Progress(steps) if lead else None
        if lead:
            self._introduce()
        validation = self._validation_batches()
        record = {}
        for step in range(steps):
            record = self._step(step)
            if step + 1 == steps or (every and (step + 1) % every == 0):
                record["val_loss"] = self.trainer.evaluate(validation)
            if lead:
                self.folder.log(record)
                progress.update(record)
        if lead:
            progress.close()
            self.folder.close()
            self.folder.plot()
        with self.trainer.replicas.whole():
            export_gpt2(self.model, self.grid, config.folder / "model", self.tokens.end_of_document)
            sample = self._sample()
        if lead:
            print(f"final training loss {record['loss']:.4f}, validation loss {record['val_loss']:.4f} (nats a token)")
            if sample:
                print(f"sample:\n{sample}")
            print(f"results: {self.folder.path}/", flush=True)

    def _step(self, step: int) -> dict:
        train, steps = self.config.train, self.config.run.steps
        start = time.perf_counter()
        self.grid.wire.traffic.clear()
        rate = learning_rate(step, steps, train.lr, train.warmup)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = rate
        batches = self.samples.training_step(self.grid, step, train.batch, self.schedule, self.device)
        loss, norm = self.trainer.step(batches)
        seconds = time.perf_counter() - start
        tokens = train.batch * self.config.model.context
        return {
            "step": step + 1,
            "loss": loss,
            "grad_norm": norm,
            "lr": rate,
            "tokens": tokens * (step + 1),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "bytes_sent": self._bytes("sent"),
            "bytes_received": self._bytes("received"),
            **self.trainer.replicas.report(),
        }

    def _bytes(self, direction: str) -> dict[str, int]:
        """This rank's traffic since the step began, by axis of the grid."""
        table = {"data": 0, "pipeline": 0, "tensor": 0}
        for (axis, _), cell in self.grid.wire.traffic.table().items():
            table[axis if axis in table else "tensor"] += cell[direction]
        return table

    def _validation_batches(self):
        batch, batches = self.config.train.batch, self.config.run.eval_batches
        return self.samples.validation_batches(self.grid, batch, batches, self.schedule, self.device)

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
    if path and (Path(path).exists() or not text):
        return path
    tokenizer = tokenizer_from_option(config.data.tokenizer)
    if not path:
        # Named by what it holds, so that a changed text or tokenizer is packed anew.
        facts = [tokenizer.description] + [f"{p}:{(s := p.stat()).st_size}:{s.st_mtime_ns}" for p in text_files(text)]
        name = hashlib.blake2b("\n".join(facts).encode(), digest_size=6).hexdigest()
        path = str(Path(config.run.out) / "data" / f"{name}.h5")
    if not Path(path).exists():
        print(f"packing {', '.join(text)} into {path}", flush=True)
        pack(text, path, tokenizer)
    return path
