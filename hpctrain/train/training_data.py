"""The data of a job: packed on first use, opened on all ranks, and what identifies them."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import comm, files, models
from hpctrain.config import Config
from hpctrain.data import ShardedTokens, pack
from hpctrain.data.corpus import fingerprint, text_files
from hpctrain.data.format import VERSION
from hpctrain.data.index import read_index
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
        samples = samples_of(config, tokens, key)
    return TrainingData(tokens, samples, data_facts(tokens, samples, world))


def samples_of(config: Config, tokens: ShardedTokens, key: RngKey) -> Samples:
    """Raises ValueError for too few tokens, or too many different ones."""
    check_vocabulary(config, tokens.vocabulary, tokens.path)
    tokens_of = functools.partial(
        models.get(config.model.kind).tokens, algorithm=config.tensor.algorithm, balance=config.sequence.balance
    )
    context, idle = config.model.context, config.data_parallel.idle
    return Samples(tokens, context, config.data.validation, key / "order", tokens_of, idle)


def check_vocabulary(config: Config, vocabulary: int, source: str | Path) -> None:
    if vocabulary > config.model.vocabulary:
        raise ValueError(
            f"model.vocabulary = {config.model.vocabulary} is too small for the data in {source}, "
            f"which use {vocabulary} tokens; use model.vocabulary={vocabulary} or more"
        )


def data_facts(tokens: ShardedTokens, samples: Samples, world: MPI.Intracomm | None = None) -> dict[str, Any]:
    """What a checkpoint says of the data; collective over `world`, if that is given."""
    return {
        "samples": samples.training.samples,
        "tokens": tokens.tokens,
        "end_of_document": tokens.end_of_document,
        "sha256": tokens.digest(world),
    }


def packed(config: Config) -> str:
    """The path of the packed data; packs `data.text` first where that has not been done. Raises as `find_packed`."""
    path, tokenizer = find_packed(config)
    if tokenizer:
        print(f"packing {', '.join(config.data.text)} into {path}", flush=True)
        with contextlib.suppress(FileExistsError):  # jobs that start together all pack: the first to end counts
            pack(config.data.text, path, tokenizer, replace=False)
    return path


def find_packed(config: Config) -> tuple[str, Any]:
    """The path of the packed data, and the tokenizer to pack `data.text` with where that is still to be done.

    Raises:
        ValueError, OSError: for text that cannot be found, and a `data.path` that was packed from other text.
    """
    path, text = config.data.path, config.data.text
    if not text:
        return path, None
    tokenizer = tokenizer_from_option(config.data.tokenizer)
    sources = fingerprint(text_files(text), tokenizer)
    if not path:  # named by what it holds, so that a changed text, tokenizer or format is packed anew
        path = str(Path(config.run.out) / "data" / f"{sources}-{VERSION}.h5")
    if not files.status(path):
        return path, tokenizer
    if config.data.path and read_index(Path(path)).sources != sources:
        raise ValueError(
            f"data.path = {path} was not packed from data.text = {', '.join(text)} as it is now, by data.tokenizer = "
            f"{config.data.tokenizer}: leave data.text out (data.text=[]) to train on what is packed, or give "
            "data.path another name to pack the text to"
        )
    return path, None
