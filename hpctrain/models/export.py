"""Write a model in Hugging Face's format: config.json and model.safetensors, from any grid."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch

from hpctrain import comm
from hpctrain.models.gpt2 import GPT2, GPT2Shape

FILE_BYTES = 4 << 30  # larger models are cut into files of about this size, so that one rank never holds more

# Our names, Hugging Face's, and whether their matrix is the transpose of ours.
_NAMES = [
    (r"wte\.weight", "transformer.wte.weight", False),
    (r"wpe\.weight", "transformer.wpe.weight", False),
    (r"blocks\.(\d+)\.(ln_[12])\.(\w+)", r"transformer.h.\1.\2.\3", False),
    (r"blocks\.(\d+)\.attention\.qkv\.(\w+)", r"transformer.h.\1.attn.c_attn.\2", True),
    (r"blocks\.(\d+)\.attention\.proj\.(\w+)", r"transformer.h.\1.attn.c_proj.\2", True),
    (r"blocks\.(\d+)\.mlp\.up\.(\w+)", r"transformer.h.\1.mlp.c_fc.\2", True),
    (r"blocks\.(\d+)\.mlp\.down\.(\w+)", r"transformer.h.\1.mlp.c_proj.\2", True),
    (r"ln_f\.(\w+)", r"transformer.ln_f.\1", False),
    (r"head\.weight", "lm_head.weight", False),
]


def export_gpt2(model: GPT2, grid, folder: Path, end_of_document: int | None = None) -> None:
    """Write the weights, in their own precision, to `folder` on the first rank; collective over the grid.

    Raises:
        ValueError: on every rank, when the folder cannot be written.
    """
    writer = None
    with comm.together(grid.comm):
        if grid.rank == 0:
            writer = HuggingFaceWriter(folder, model.shape, end_of_document)
    for name, weight in whole_parameters(model, grid):
        with comm.together(grid.comm):
            if writer:
                writer.add(name, weight)
    with comm.together(grid.comm):
        if writer:
            writer.close()


def gpt2_config(shape: GPT2Shape, end_of_document: int | None) -> dict:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": shape.layers,
        "n_embd": shape.width,
        "n_head": shape.heads,
        "n_positions": shape.context,
        "vocab_size": shape.vocabulary,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": shape.dropout,
        "attn_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
    }


def to_hugging_face(name: str, weight: torch.Tensor, shape: GPT2Shape) -> tuple[str, torch.Tensor]:
    """Hugging Face's name of a whole parameter, and its tensor in their layout."""
    theirs, transposed = hugging_face_name(name)
    if ".qkv." in name:  # ours: (head, {q, k, v}, feature); theirs: ({q, k, v}, head, feature)
        head_width = shape.width // shape.heads
        weight = weight.unflatten(0, (shape.heads, 3, head_width)).transpose(0, 1).flatten(0, 2)
    weight = weight.t() if transposed and weight.dim() == 2 else weight
    return theirs, weight.contiguous()


def hugging_face_name(name: str) -> tuple[str, bool]:
    """Hugging Face's name of a parameter, and whether their matrix is the transpose of ours.

    >>> hugging_face_name("blocks.3.mlp.up.bias")
    ('transformer.h.3.mlp.c_fc.bias', True)
    """
    for pattern, theirs, transposed in _NAMES:
        if match := re.fullmatch(pattern, name):
            return match.expand(theirs), transposed
    raise AssertionError(f"{name} has no Hugging Face name")


def whole_parameters(model: torch.nn.Module, grid):
    """(name, tensor) of every parameter of the model, in the same order on every rank; collective.

    The first rank gets the whole tensor, in host memory, one at a time; the others get an empty one.
    """
    here = dict(model.named_parameters())
    held = {} if grid.coords["data"] else {name: p for name, p in here.items() if p.shard.owned(grid.coords)}
    told = grid.comm.allgather({name: (p.shard, p.dtype) for name, p in held.items()})
    names = dict.fromkeys(name for shards in told for name in shards)
    for name in names:
        owners = [rank for rank, shards in enumerate(told) if name in shards]
        layer = getattr(here.get(name), "layer", None)
        if layer is not None:  # of ZeRO-3: its weights are spread over the replicas
            layer.gather()
        if grid.rank == 0:
            shard, dtype = told[owners[0]][name]
            whole = torch.empty(shard.global_shape, dtype=dtype)
            for rank in owners:
                part = told[rank][name][0]
                if rank == 0:
                    whole[part.slices] = held[name].detach().cpu().view(part.shape)
                elif math.prod(part.shape):
                    whole[part.slices] = comm.recv(torch.empty(part.shape, dtype=dtype), grid.world, rank)
            yield name, whole
        else:
            if name in held and math.prod(held[name].shard.shape):
                comm.send(held[name].detach().cpu(), grid.world, 0)
            yield name, torch.empty(0)
        if layer is not None:
            layer.release()


class HuggingFaceWriter:
    """Collects whole parameters and writes them in files of limited size, with an index when there are several.

    An older export in the folder stays until this one is whole.
    """

    def __init__(self, folder: Path, shape: GPT2Shape, end_of_document: int | None):
        self.folder, self.shape, self.held, self.files = folder, shape, {}, []
        folder.mkdir(parents=True, exist_ok=True)
        config = json.dumps(gpt2_config(shape, end_of_document), indent=2)
        (folder / "config.json").write_text(config + "\n", encoding="utf-8")

    def add(self, name: str, weight: torch.Tensor) -> None:
        name, tensor = to_hugging_face(name, weight, self.shape)
        if self.held and sum(t.nbytes for t in self.held.values()) + tensor.nbytes > FILE_BYTES:
            self._write()
        self.held[name] = tensor

    def close(self) -> None:
        self._write()
        for old in self.folder.glob("model*.safetensors*"):
            old.unlink()
        if len(self.files) == 1:
            (self.folder / "part-0.safetensors").rename(self.folder / "model.safetensors")
            return
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

        save_file(self.held, self.folder / f"part-{len(self.files)}.safetensors", metadata={"format": "pt"})
        self.files.append((list(self.held), sum(t.nbytes for t in self.held.values())))
        self.held = {}
