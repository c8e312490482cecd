"""The data of a job: packed on first use, opened on all ranks, and what identifies them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import comm, files, models
from hpctrain.config import Config
from hpctrain.data import ShardedTokens, pack
from hpctrain.data.corpus import text_files
from hpctrain.data.format import VERSION
from hpctrain.data.tokenizers import tokenizer_from_option
from hpctrain.randomness import RngKey
from hpctrain.train.batches import Samples

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass
class TrainingData:
    """Attributes: `facts`, by which a checkpoint knows the data again."""

    tokens: ShardedTokens
    samples: Samples
    facts: dict[str, Any]


def open_data(config: Config, world: MPI.Intracomm, key: RngKey) -> TrainingData:
    """Collective over `world` (mpi4py).

    Raises:
        ValueError, OSError: on every rank, for data that cannot be read, are too few, or have too many tokens.
    """
    with comm.together(world):
        path = packed(config) if world.rank == 0 else None
    path = world.bcast(path)
    tokens = ShardedTokens(path, comm=world)
    with comm.together(world):
        if tokens.vocabulary > config.model.vocabulary:
            raise ValueError(
                f"model.vocabulary = {config.model.vocabulary} is too small for the data in {path}, "
                f"which use {tokens.vocabulary} tokens; use model.vocabulary={tokens.vocabulary} or more"
            )
        tokens_of = functools.partial(models.get(config.model.kind).tokens, algorithm=config.tensor.algorithm)
        samples = Samples(
            tokens, config.model.context, config.data.validation, key / "order", tokens_of, config.data_parallel.idle
        )
    facts = {
        "samples": samples.training.samples,
        "tokens": tokens.tokens,
        "end_of_document": tokens.end_of_document,
        "sha256": tokens.digest(world),
    }
    return TrainingData(tokens, samples, facts)


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
