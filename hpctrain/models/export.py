"""Write a model in Hugging Face's format: config.json and model.safetensors, from any grid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from hpctrain import comm
from hpctrain.grid import Grid
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.models.huggingface import Format
from hpctrain.models.spec import ModelSpec

TOKENIZER, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
OURS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
FILE_BYTES = 4 << 30  # larger models are cut into files of about this size, so that one rank never holds more


def export(
    spec: ModelSpec, model: torch.nn.Module, grid: Grid, folder: Path, end_of_document: int | None = None,
    tokenizer: Any = None,
) -> None:  # fmt: skip
    """Write the weights, in their own precision, to `folder` on the first rank; collective over the grid.

    Args:
        model: of this spec, with its `shape`.
        end_of_document: the token that config.json names so.
        tokenizer: of `data.tokenizers`, on the first rank, written beside the weights.

    Raises:
        ValueError: on every rank, when the folder cannot be written.
    """
    shape: Any = model.shape
    writer = None
    with comm.together(grid.world):
        if grid.rank == 0:
            writer = HuggingFaceWriter(folder, spec, shape, end_of_document)
            if tokenizer is not None and writer.config is not None:
                write_tokenizer(folder, tokenizer, shape.context)
    for name, weight in whole_parameters(model, grid):
        with comm.together(grid.world):
            if writer:
                writer.add(name, weight)
    with comm.together(grid.world):
        if writer:
            writer.close()


def write_tokenizer(folder: Path, tokenizer: Any, context: int) -> None:
    """So that `transformers.AutoTokenizer` loads it from the folder."""
    kind = "bytes" if tokenizer.description == "bytes" else "file"
    description = tokenizer.huggingface()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokenizer.end, "eos_token": tokenizer.end,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False, "hpctrain_tokenizer": kind,
    }  # fmt: skip
    for name, content in ((TOKENIZER, description), (TOKENIZER_SETTINGS, settings)):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def to_hugging_face(name: str, weight: torch.Tensor, format: Format, shape: Any) -> dict[str, torch.Tensor]:
    """A whole parameter as Hugging Face's tensors, by their names."""
    source = format.source(name, shape)
    if weight.dim() > 2 and source.rows:  # of experts, one after the other
        weight = weight.flatten(0, -2)
    if source.order is not None:
        ordered = torch.empty_like(weight)
        ordered[torch.from_numpy(source.order)] = weight
        weight = ordered
    parts = weight.split(source.rows) if source.rows else (weight,)
    if source.transposed and weight.dim() == 2:
        parts = tuple(part.t() for part in parts)
    return {theirs: part.contiguous() for theirs, part in zip(source.names, parts, strict=True)}


class HuggingFaceWriter:
    """Collects whole parameters and writes them in files of limited size, with an index when there are several.

    An older export in the folder stays until this one is whole, and other files stay. Where there is a config.json, all
    of the weights are.

    Attributes: `config`, what that file says; None for a model that has none.
    """

    def __init__(self, folder: Path, spec: ModelSpec, shape: Any, end_of_document: int | None):
        self.folder, self.format, self.shape = folder, spec.huggingface, shape
        self.waiting: dict[str, torch.Tensor] = {}
        self.files: list[tuple[list[str], int]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.config = self.format.config(shape, end_of_document)

    def add(self, name: str, weight: torch.Tensor) -> None:
        for theirs, tensor in to_hugging_face(name, weight, self.format, self.shape).items():
            if self.waiting and sum(t.nbytes for t in self.waiting.values()) + tensor.nbytes > FILE_BYTES:
                self._write()
            self.waiting[theirs] = tensor

    def close(self) -> None:
        self._write()
        (self.folder / "config.json").unlink(missing_ok=True)
        for old in self.folder.iterdir():
            if OURS.fullmatch(old.name):
                old.unlink()
        if len(self.files) == 1:
            (self.folder / "part-0.safetensors").rename(self.folder / "model.safetensors")
        else:
            self._name_parts()
        if self.config is not None:
            part = self.folder / "config.json.tmp"
            part.write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
            part.rename(self.folder / "config.json")

    def _name_parts(self) -> None:
        """With an index of what each holds."""
        where, size = {}, 0
        for number, (names, nbytes) in enumerate(self.files):
            final = f"model-{number + 1:05d}-of-{len(self.files):05d}.safetensors"
            (self.folder / f"part-{number}.safetensors").rename(self.folder / final)
            where.update(dict.fromkeys(names, final))
            size += nbytes
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        from safetensors.torch import save_file

        save_file(self.waiting, self.folder / f"part-{len(self.files)}.safetensors", metadata={"format": "pt"})
        self.files.append((list(self.waiting), sum(t.nbytes for t in self.waiting.values())))
        self.waiting = {}
