"""The configuration: TOML and `section.key=value` overrides into dataclasses. Unknown keys are errors."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import os
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain import files
from hpctrain.algorithms import DEFAULT_OVERLAP
from hpctrain.config_checks import check
from hpctrain.grid import grid_shape

LARGEST = 1 << 20  # bytes of a file


@dataclass
class Run:
    name: str = "run"  # the run folder is out/name
    out: str = "runs"
    seed: int = 0  # of weights, sample order and dropout
    steps: int = 100
    eval_every: int = 0  # steps between validations; 0: only at the end
    eval_batches: int = 4  # validation batches, each of train.batch sequences
    device: str = "auto"  # "auto", "cpu" or "cuda"
    sample: int = 0  # tokens to generate at the end
    checkpoint_every: int = 0  # steps between checkpoints, and one at the end; 0: none by their number
    checkpoint_minutes: float = 10.0  # after so long without one, too; 0: never. One is saved at every stop
    max_seconds: float = 0.0  # save and stop after so long, as on SIGUSR1; 0: never


@dataclass
class Model:
    kind: str = "gpt2"
    layers: int = 4
    width: int = 128  # a multiple of heads
    heads: int = 4
    context: int = 128
    vocabulary: int = 257  # at least that of the data
    dropout: float = 0.0
    tied: bool = True  # input and output embeddings share one table
    init: str = ""  # start from this folder of Hugging Face's (config.json, model.safetensors), of the same sizes


@dataclass
class Data:
    path: str = ""  # the index that `hpctrain pack` wrote; with `text`, where to pack to
    text: list[str] = field(default_factory=list)  # files, directories or "python-stdlib", packed on first use; that of
    # the file does not count where data.path is an override
    tokenizer: str = "bytes"  # or a Hugging Face tokenizers JSON file; only for packing
    validation: float = 0.05  # part of the samples that is held out


@dataclass
class GridSizes:
    data: int = 1
    pipeline: int = 1
    tensor: int | list[int] = field(default_factory=lambda: [1, 1, 1])  # t for [t, 1, 1], or [x, y, z]


@dataclass
class Pipeline:
    schedule: str = "1f1b"  # one of `pipeline.NAMES`: see `hpctrain schedule --compare`
    chunks: int = 0  # stages a rank, for "interleaved"; 0: as many as the schedule has by itself
    slices: int | list[int] = 0  # of a sequence, for "terapipe": how many (0: as many as ranks), or their lengths
    partition: str | list[int] = "even"  # layers of each stage: "even", by cost "dp", "lp" or "rl", or a list


@dataclass
class Tensor:
    algorithm: str = "agarwal"  # the matrix product: "agarwal", "megatron", "cannon", "summa" or "two_half_d"
    overlap: list[str] = field(default_factory=lambda: list(DEFAULT_OVERLAP))  # of algorithms.OVERLAPS; [] for none


@dataclass
class Comm:
    all_reduce: str = "shared"  # how sums over the data axis are taken: one of algorithms.ALL_REDUCE
    watchdog: float = 600.0  # seconds in one operation after which a rank says where it is and ends the job; 0: never
    check: bool = False  # before every collective its ranks compare operation, shape, type and caller: slow


@dataclass
class Train:
    batch: int = 8  # sequences a step, over all replicas
    microbatches: int = 1  # of a replica's part of the batch
    optimizer: str = "adamw"  # one of algorithms.OPTIMIZERS
    momentum: float = 0.9  # of sgd (Nesterov's) and rmsprop; below 1
    lr: float = 1e-3
    warmup: int = 10  # steps
    weight_decay: float = 0.1
    clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    recompute: str = "none"  # in backward, instead of keeping it: "none", "attention" or every "block"


@dataclass
class Replicas:
    method: str = "ddp"  # how the replicas are kept alike: one of METHODS
    servers: int = 1  # parameter_server: so many ranks of the data axis hold the weights and take no part of the batch
    staleness: int = 0  # parameter_server: steps that a worker may be ahead of the slowest; 0: synchronous
    average_every: int = 1  # local_sgd: steps between averages of the weights; 0: only at the end (ParallelSGD)
    average_state: bool = False  # local_sgd: average the optimizer's state too; otherwise each replica keeps its own

    @property
    def idle(self) -> int:
        """The last ranks of the data axis, which compute no gradients."""
        return self.servers if self.method == "parameter_server" else 0


@dataclass
class Precision:
    compute: str = "fp32"  # of weights and activations: "fp32", "fp64", "bf16" or "fp16"
    master: str = "fp32"  # of the weights that the optimizer updates: "fp32", or "compute" for no others
    reduce: str = "fp32"  # of gradients, over microbatches and ranks: "fp32", or "compute"
    wire: str = "fp32"  # in which gradients travel over the data axis: as they are ("fp32"), or "bf16"
    loss_scale: float = 65536.0  # of the first step in fp16; then halved and doubled as gradients allow
    matmul: str = "highest"  # torch's float32 matmul precision: "highest", "high" or "medium"


@dataclass
class Checkpoint:
    keep: int = 2  # older ones are deleted once a newer one has been read back
    background: bool = True  # write while training goes on
    on_failure: str = "continue"  # when one cannot be written: "continue" without it, or "stop"


@dataclass
class Sanity:
    nonfinite: str = "stop"  # loss or gradient norm not finite: "stop", "skip" the step, or "rollback" to a checkpoint
    spike: str = "skip"  # likewise for a loss above spike_factor times the median of the last 32 steps
    spike_factor: float = 0.0  # 0: no loss is a spike
    limit: int = 10  # steps skipped or rolled back in one job, after which it stops
    check_every: int = 100  # steps between comparisons of what several ranks hold, and of their speeds; 0: never
    straggler: float = 2.0  # a rank whose own work takes this many times that of its peers is named; 0: none is


@dataclass
class Config:
    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    grid: GridSizes = field(default_factory=GridSizes)
    pipeline: Pipeline = field(default_factory=Pipeline)
    tensor: Tensor = field(default_factory=Tensor)
    comm: Comm = field(default_factory=Comm)
    train: Train = field(default_factory=Train)
    replicas: Replicas = field(default_factory=Replicas)
    precision: Precision = field(default_factory=Precision)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    sanity: Sanity = field(default_factory=Sanity)

    @property
    def ranks(self) -> int:
        return math.prod(self.grid_shape.values())

    @property
    def grid_shape(self) -> dict[str, int]:
        tensor = self.grid.tensor
        return grid_shape(self.grid.data, self.grid.pipeline, tensor if isinstance(tensor, int) else tuple(tensor))

    @property
    def folder(self) -> Path:
        return Path(self.run.out) / self.run.name


def load_config(path: str | os.PathLike | None = None, overrides: typing.Sequence[str] = ()) -> Config:
    """Read a TOML file, if one is given, apply `section.key=value` overrides, and check the result.

    Raises:
        ValueError: naming the key, what it got and what would do.

    >>> load_config(overrides=["run.steps=7", "grid.tensor=[2, 1, 1]"]).grid
    GridSizes(data=1, pipeline=1, tensor=[2, 1, 1])
    >>> load_config(overrides=["run.stesp=7"])
    Traceback (most recent call last):
    ValueError: unknown key run.stesp; did you mean run.steps?
    """
    config = Config()
    if path is not None:
        try:
            tables = tomllib.loads(files.read_bounded(path, LARGEST).decode())
        except OSError as error:
            raise ValueError(f"the configuration cannot be read: {error}") from error
        except (ValueError, RecursionError) as error:  # integers of more than 4,300 digits among them
            raise ValueError(f"{path} is not valid TOML: {error}") from error
        with _in(path):
            for section, table in tables.items():
                if not isinstance(table, dict):
                    raise ValueError(f"{section} stands outside a section; sections are {_names(config)}")
                for key, value in table.items():
                    _set(config, section, key, value)
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and key):
            raise ValueError(f"an override must read section.key=value, got {override!r}")
        _set(config, section, key, _parsed(text.strip()), text.strip())
    given = {override.partition("=")[0].strip() for override in overrides}
    if config.data.path and "data.path" in given and "data.text" not in given:
        config.data.text = []  # the file's text is not what a mistyped path should be packed from
    with _in(None if overrides else path):  # with overrides it may be them
        check(config)
    return config


@contextlib.contextmanager
def _in(path: str | os.PathLike | None):
    """Errors name the file, if there is one."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path is not None else str(error)) from error


def to_toml(config: Config) -> str:
    """The whole configuration, as `load_config` reads it."""
    lines = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        table = dataclasses.asdict(getattr(config, section.name))
        lines += [f"{key} = {_toml(value)}" for key, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def _toml(value) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the only difference for what is in use


def _set(config: Config, section: str, key: str, value, text: str | None = None) -> None:
    if section not in _names(config):
        raise ValueError(f"unknown section {section}{_hint(section, _names(config))}")
    table = getattr(config, section)
    if key not in _names(table):
        raise ValueError(f"unknown key {section}.{key}{_hint(key, _names(table), f'{section}.')}")
    wanted = typing.get_type_hints(type(table))[key]
    if wanted is str and text is not None and not isinstance(value, str):
        value = text  # run.name=2024 means the text
    setattr(table, key, _typed(f"{section}.{key}", value, wanted))


def _typed(name: str, value, wanted):
    """The value as the wanted type; whole numbers will do for reals, and one string for a list of them."""
    for each in value if isinstance(value, list) else [value]:
        if type(each) is int and not -(2**63) <= each < 2**63:
            raise ValueError(f"{name} must fit into 64 bits, got an integer of {each.bit_length()}")
        if isinstance(each, str) and not _storable(each):
            raise ValueError(f"{name} must be UTF-8 without zero bytes, got {each!r:.100}")
    plain = {int: int, float: float, bool: bool, str: str}
    options = wanted.__args__ if isinstance(wanted, types.UnionType) else (wanted,)
    for option in options:
        if option in plain and type(value) is option:
            return value
        if option is float and type(value) is int:
            return float(value)
        if typing.get_origin(option) is list:
            item = option.__args__[0]
            if type(value) is item and item is str:
                return [value]
            if isinstance(value, list) and all(type(each) is item for each in value):
                return value
    described = " or ".join(str(option).removeprefix("<class '").removesuffix("'>") for option in options)
    raise ValueError(f"{name} must be {described}, got {value!r}")


def _storable(text: str) -> bool:
    """No operating system takes a path with a zero, and no TOML file a byte that is not UTF-8."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _parsed(text: str):
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _names(thing) -> list[str]:
    return [f.name for f in dataclasses.fields(thing)]


def _hint(word: str, known: list[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {prefix}{close[0]}?" if close else f"; known are {', '.join(prefix + k for k in known)}"
