"""The data of a job: packed on first use, opened on all ranks, and what identifies them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import tempfile
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

    @property
    def tokens(self) -> ShardedTokens:
        """Of the first source; all have its tokenizer."""
        return self.samples.sources[0]

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
    sources = [ShardedTokens(each, comm=world) for each in source_paths(config, path)]
    with comm.together(world):
        samples = samples_of(config, sources, key)
    return TrainingData(samples, data_facts(samples, world))


def source_paths(config: Config, path: str) -> list[str]:
    """Those to train on, `path` where there is no mixture, and those that are validated on alone."""
    apart = [config.data.validation_path] if config.data.validation_path else []
    return [*([each for each, _ in config.data.mixture] or [path]), *apart]


def samples_of(config: Config, sources: list[ShardedTokens], key: RngKey) -> Samples:
    """Raises ValueError for too few tokens, too many different ones, and sources of several tokenizers."""
    for tokens in sources:
        check_vocabulary(config, tokens.vocabulary, tokens.path)
        if tokens.tokenizer_digest != sources[0].tokenizer_digest:
            raise ValueError(f"{tokens.path} was packed by another tokenizer than {sources[0].path}; pack it again")
    if any(tokens.masked for tokens in sources) and models.get(config.model.kind).own_loss:
        raise ValueError(
            f"the data have prompts, which count in no loss, but model.kind = {config.model.kind} has a loss of its own"
        )
    if any(tokens.masked for tokens in sources) and (staleness := config.data_parallel.staleness):
        raise ValueError(
            "the data have prompts, which count in no loss, and all ranks count the targets of a step together, which "
            f"data_parallel.staleness = {staleness} does not; use data_parallel.staleness=0, or data without prompts"
        )
    apart = sources.pop() if config.data.validation_path else None
    tokens_of = functools.partial(
        models.get(config.model.kind).tokens, algorithm=config.tensor.algorithm, balance=config.sequence.balance,
        window=config.model.window,
    )  # fmt: skip
    context, idle = config.model.context, config.data_parallel.idle
    weights = [weight for _, weight in config.data.mixture] or [1.0]
    return Samples(
        sources, context, config.data.validation, key / "order", tokens_of, idle, weights, apart, config.data.documents
    )


def check_vocabulary(config: Config, vocabulary: int, source: str | Path) -> None:
    if vocabulary > config.model.vocabulary:
        raise ValueError(
            f"model.vocabulary = {config.model.vocabulary} is too small for the data in {source}, "
            f"which use {vocabulary} tokens; use model.vocabulary={vocabulary} or more"
        )


def data_facts(samples: Samples, world: MPI.Intracomm | None = None) -> dict[str, Any]:
    """What a checkpoint says of the data; collective over `world`, if that is given."""
    digests = [tokens.digest(world) for tokens in samples.sources]
    return {
        "samples": samples.training.samples,
        "proportion": samples.training.counts,
        "tokens": sum(tokens.tokens for tokens in samples.sources),
        "end_of_document": samples.sources[0].end_of_document,
        "sha256": digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest(),
    }


def packed(config: Config) -> str:
    """The path of the packed data; packs `data.text` first where that has not been done. Raises as `find_packed`."""
    path, tokenizer = find_packed(config)
    if tokenizer:
        print(f"packing {', '.join(config.data.text)} into {path}", flush=True)
        _pack(config.data.text, path, tokenizer)
    return path


def packed_text(text: list[str], tokenizer: Any, out: str) -> str:
    """The path of text that is packed in the folder `out` unless it is there."""
    path = _packed_path(out, fingerprint(text_files(text), tokenizer))
    if not files.status(path):
        _pack(text, path, tokenizer)
    return path


def _packed_path(out: str, sources: str) -> str:
    """Named by what it holds, so that a changed text, tokenizer or format is packed anew."""
    return str(Path(out) / "data" / f"{sources}-{VERSION}.h5")


def _pack(text: list[str], path: str, tokenizer: Any) -> None:
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"{', '.join(text)} cannot be packed into {path}: {error}; use another run.out, or data.path where one is "
            "given"
        ) from error
    with contextlib.suppress(FileExistsError):  # jobs that start together all pack: the first to end counts
        pack(text, path, tokenizer, replace=False)


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
    path = path or _packed_path(config.run.out, sources)
    if not files.status(path):
        return path, tokenizer
    if config.data.path and read_index(Path(path)).sources != sources:
        raise ValueError(
            f"data.path = {path} was not packed from data.text = {', '.join(text)} as it is now, by data.tokenizer = "
            f"{config.data.tokenizer}: leave data.text out (data.text=[]) to train on what is packed, or give "
            "data.path another name to pack the text to"
        )
    return path, None
