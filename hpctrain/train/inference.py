"""A trained model on any grid, for evaluation and generation: without its optimizer and its data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain import comm, files, models
from hpctrain.checkpoint import folder, index, reading
from hpctrain.config import Config, load_config
from hpctrain.config.checks import check_grid
from hpctrain.config.loading import toml_value
from hpctrain.data.index import read_index
from hpctrain.data.tokenizers import tokenizer_from_description
from hpctrain.data_parallel.optimizer_state import parameters_to_load
from hpctrain.grid import Grid
from hpctrain.grid_shape import grid_arguments
from hpctrain.layers import algorithm_of
from hpctrain.models.export import TOKENIZER, TOKENIZER_SETTINGS
from hpctrain.models.pretrained import load, read_settings
from hpctrain.models.staged_model import StagedModel
from hpctrain.randomness import RngKey
from hpctrain.train.dtypes import dtypes
from hpctrain.train.training_data import find_packed, source_paths

if TYPE_CHECKING:
    from mpi4py import MPI


# What may be given beside a trained model; all else is of its training.
SETTINGS = (
    "grid", "model", "sequence.method", "tensor.algorithm", "precision.compute", "precision.matmul", "run.device",
    "run.out", "data.path", "data.text", "data.mixture", "data.tokenizer", "data.documents",
)  # fmt: skip


@dataclass
class Trained:
    """A model in evaluation mode, with what turns text into its tokens."""

    config: Config
    grid: Grid
    model: StagedModel
    tokenizer: Any


def open_trained(source: Path, overrides: list[str], world: MPI.Intracomm) -> Trained:
    """The model of a run folder or of a folder in Hugging Face's format. Collective over `world` (mpi4py).

    Of a run these are its exported weights, or else those of its newest checkpoint. An axis of the grid that the
    overrides do not name has one rank; where they name none, the grid is the run's if that fits the ranks, and
    otherwise replicas of the whole model.

    Raises:
        ValueError, OSError: on every rank, for a folder without a model, an override of none of SETTINGS, a grid that
            the model cannot be cut for, and weights that cannot be read.
    """
    with comm.together(world):
        config = configuration(source, overrides, world.size)
        tokenizer = tokenizer_of(source, config)
        spec = models.get(config.model.kind)
        if spec.own_loss:
            raise ValueError(f"model.kind = {config.model.kind} has a loss and logits of its own")
        check_grid(config, world.size)
    grid = Grid(*grid_arguments(config.grid_shape), config.grid.expert, config.grid.expert_tensor, comm=world)
    device = comm.local_device(config.run.device, world)
    comm.decide_cuda_aware(grid, device)
    torch.set_float32_matmul_precision(config.precision.matmul)
    master, precision = dtypes(config.precision)
    exported = exported_in(source)
    model = spec.build(
        grid, spec.shape(vars(config.model)), algorithm=algorithm_of(grid, config.tensor.algorithm, ()),
        key=RngKey(config.run.seed), dtype=precision.compute if exported else master, device=device,
    )  # fmt: skip
    with comm.together(world):
        if exported:
            load(spec, model, exported)
        else:
            _load_checkpoint(model, source / "checkpoints")
            for parameter in model.parameters():
                if parameter.requires_grad:  # but the biases of routers, of many small steps
                    parameter.data = parameter.detach().to(precision.compute)
    return Trained(config, grid, model.eval(), tokenizer)


def exported_in(source: Path) -> Path | None:
    """The folder in Hugging Face's format: the source, or what a run left in it."""
    return next((path for path in (source, source / "model") if files.status(path / "config.json")), None)


def _undivided() -> list[str]:
    """Overrides: how a training cut its pipeline and shared its weights does not matter to what was trained."""
    default = Config()
    sections = {"pipeline": default.pipeline, "data_parallel": default.data_parallel}
    settings = {f"{name}.{key}": value for name, each in sections.items() for key, value in vars(each).items()}
    return [*(f"{key}={toml_value(value)}" for key, value in settings.items()), "train.microbatches=1"]


def configuration(source: Path, overrides: list[str], ranks: int) -> Config:
    """Of a run folder, or as a config.json has it."""
    if files.status(source / "config.toml"):
        path: Path | None = source / "config.toml"
        given = _undivided()
    elif files.status(source / "config.json"):
        settings = read_settings(source / "config.json")
        formats = {kind: models.get(kind).huggingface for kind in ("gpt2", "llama", "mixtral")}
        found = next((of for of in formats.values() if settings.get("model_type") in of.model_types), None)
        if found is None:
            known = ", ".join(name for of in formats.values() for name in of.model_types)
            raise ValueError(f"{source}/config.json is of model_type {settings.get('model_type')}, not one of {known}")
        path, given = None, [f"model.{key}={toml_value(value)}" for key, value in found.options(settings).items()]
    else:
        raise ValueError(f"{source} is neither a run folder (config.toml) nor one of Hugging Face's (config.json)")
    alone = [f"grid.{axis}=1" for axis in ("data", "sequence", "pipeline", "tensor", "expert", "expert_tensor")]
    names = [override.partition("=")[0].strip() for override in overrides]
    given_grid = any(name.startswith("grid.") for name in names)
    config = load_config(path, [*given, *(alone if given_grid else ()), *overrides])
    for name in names:
        if not {name, name.partition(".")[0]}.intersection(SETTINGS):
            raise ValueError(
                f"{name} is of a training, and changes nothing of a trained model: leave it out; what may be given is "
                f"of [grid] and [model], or {', '.join(SETTINGS[2:])}"
            )
    if config.ranks != ranks and not given_grid:
        config = load_config(path, [*given, *alone, f"grid.data={ranks}", *overrides])
    return config


def tokenizer_of(source: Path, config: Config) -> Any:
    """The one of `data.tokenizers` that a run, or a folder in Hugging Face's format, was trained with.

    Raises:
        ValueError, OSError: where neither the folder nor the run's data have it.
    """
    return tokenizer_from_description(*_described_tokenizer(source, config))


def _described_tokenizer(source: Path, config: Config) -> tuple[str, str]:
    """Its description, and where that is from."""
    exported = exported_in(source)
    if exported and files.status(exported / TOKENIZER):
        path = exported / TOKENIZER
        settings = exported / TOKENIZER_SETTINGS
        if files.status(settings) and read_settings(settings).get("hpctrain_tokenizer") == "bytes":
            return "bytes", str(path)
        return path.read_text(encoding="utf-8"), str(path)
    if not files.status(source / "config.toml"):
        raise ValueError(f"{source} has no {TOKENIZER}")
    packed, tokenizer = find_packed(config)
    if tokenizer is not None:
        return tokenizer.description, config.data.tokenizer
    data = source_paths(config, packed)[0]
    return read_index(Path(data)).tokenizer, data


def _load_checkpoint(model: torch.nn.Module, root: Path) -> None:
    steps = folder.steps(root)
    if not steps:
        raise ValueError(f"{root.parent} has neither exported weights (model/) nor checkpoints")
    node = index.read(folder.place(root, steps[0]))
    names = {p: getattr(p, "same_as", name) for name, p in model.named_parameters()}
    reading.load(node, parameters_to_load(names, reading.described(node.manifest)))
