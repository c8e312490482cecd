"""Write a model in Hugging Face's format: config.json and model.safetensors, from any grid."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch

from hpctrain import comm, files
from hpctrain.grid import Grid
from hpctrain.layers.whole_parameters import whole_state
from hpctrain.models.huggingface import Format
from hpctrain.models.spec import ModelSpec

CONFIG, TOKENIZER, TOKENIZER_SETTINGS = "config.json", "tokenizer.json", "tokenizer_config.json"
OURS = r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
FILE_BYTES = 4 << 30  # larger models are cut into files of about this size, so that one rank never holds more


def export(
    spec: ModelSpec, model: torch.nn.Module, grid: Grid, folder: Path, end_of_document: int | None = None,
    tokenizer: Any = None,
) -> None:  # fmt: skip
    """Write the parameters and the buffers that `state_dict()` has, in their own precision, to `folder` on the first
    rank; collective over the grid. Until all are on disk, what the folder had stays as it was.

    Args:
        model: of this spec, with its `shape`.
        end_of_document: the token that config.json names so.
        tokenizer: of `data.tokenizers`, on the first rank, written beside the weights.

    Raises:
        ValueError, OSError: on every rank, when the folder cannot be written.
    """
    shape: Any = model.shape
    writer = None
    with contextlib.ExitStack() as stack:
        with comm.together(grid.world):
            if grid.rank == 0:
                writer = HuggingFaceWriter(stack.enter_context(files.draft(folder)), spec, shape, end_of_document)
        for name, weight in whole_state(model, grid):
            with comm.together(grid.world):
                if writer:
                    writer.add(name, weight)
        with comm.together(grid.world):
            if writer:
                writer.publish(folder, tokenizer)
                stack.close()


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

    Args:
        draft: an empty folder, as of `files.draft`; what is whole is published from there.
    """

    def __init__(self, draft: Path, spec: ModelSpec, shape: Any, end_of_document: int | None):
        self.draft, self.format, self.shape = draft, spec.huggingface, shape
        self.waiting: dict[str, torch.Tensor] = {}
        self.files: list[tuple[list[str], int]] = []
        self.config = self.format.config(shape, end_of_document)

    def add(self, name: str, weight: torch.Tensor) -> None:
        for theirs, tensor in to_hugging_face(name, weight, self.format, self.shape).items():
            if self.waiting and sum(t.nbytes for t in self.waiting.values()) + tensor.nbytes > FILE_BYTES:
                self._write()
            self.waiting[theirs] = tensor

    def publish(self, folder: Path, tokenizer: Any = None) -> None:
        """Let it take the place of an older export in the folder, where other files stay. Where there is a config.json,
        all is there.

        Args:
            tokenizer: of `data.tokenizers`, written beside the weights of a model that has a config.json.
        """
        self._write()
        self._name_files()
        if self.config is not None:
            if tokenizer is not None:
                self._write_tokenizer(tokenizer)
            self._write_json(CONFIG, self.config)
        files.place(self.draft, folder, last=CONFIG, older=OURS)

    def _name_files(self) -> None:
        """With an index of what each holds, where there are several."""
        if len(self.files) == 1:
            self._part(0).rename(self.draft / "model.safetensors")
            return
        where, size = {}, 0
        for number, (names, nbytes) in enumerate(self.files):
            final = f"model-{number + 1:05d}-of-{len(self.files):05d}.safetensors"
            self._part(number).rename(self.draft / final)
            where.update(dict.fromkeys(names, final))
            size += nbytes
        self._write_json("model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})

    def _write_tokenizer(self, tokenizer: Any) -> None:
        """So that `transformers.AutoTokenizer` loads it from the folder."""
        kind = "bytes" if tokenizer.description == "bytes" else "file"
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokenizer.end, "eos_token": tokenizer.end,
            "model_max_length": self.shape.context,
            "clean_up_tokenization_spaces": False, "hpctrain_tokenizer": kind,
        }  # fmt: skip
        self._write_json(TOKENIZER, tokenizer.huggingface())
        self._write_json(TOKENIZER_SETTINGS, settings)

    def _write_json(self, name: str, content: Any) -> None:
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        (self.draft / name).write_text(text, encoding="utf-8")

    def _part(self, number: int) -> Path:
        return self.draft / f"part-{number}.safetensors"

    def _write(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file(self.waiting, self._part(len(self.files)), metadata={"format": "pt"})
        except SafetensorError as error:  # as of a full disk
            raise OSError(f"the weights cannot be written to {self.draft.parent}: {error}") from error
        self.files.append((list(self.waiting), sum(t.nbytes for t in self.waiting.values())))
        self.waiting = {}
