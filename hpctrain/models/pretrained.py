"""Start from a folder in Hugging Face's format: each rank reads just what its slices are made of."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import numpy as np
import torch

from hpctrain import files
from hpctrain.models.export import gpt2_config, hugging_face_name
from hpctrain.models.gpt2 import GPT2, GPT2Shape

CHUNK = 4 << 20  # elements read at a time
LARGEST_JSON = 64 << 20  # bytes of config.json and of an index; that of a model of 100,000 tensors has 10 MB
_FLOATS = ("F64", "F32", "F16", "BF16")
# Tensors of a GPT-2 of ours; and its causal masks, which older files have.
_KNOWN = re.compile(
    r"(transformer\.)?(wte\.weight|wpe\.weight|ln_f\.(weight|bias)|h\.\d+\.(ln_[12]|attn\.c_attn|attn\.c_proj"
    r"|mlp\.c_fc|mlp\.c_proj)\.(weight|bias)|h\.\d+\.attn\.(masked_)?bias)|lm_head\.weight"
)
_FREE = ("architectures", "embd_pdrop", "attn_pdrop", "resid_pdrop", "bos_token_id", "eos_token_id")


def load_gpt2(model: GPT2, folder: Path) -> None:
    """Fill this rank's parameters; needs no communication.

    Raises:
        ValueError: when the folder cannot be read, or holds a model of other sizes; all differences are listed.
    """
    check_config(model.shape, folder)
    with _Safetensors(folder) as tensors, torch.no_grad():
        if unknown := sorted(name for name in tensors.names() if not _KNOWN.fullmatch(name)):
            raise ValueError(
                f"model.init = {folder} holds {len(unknown)} tensors that the model has no place for, first"
                f" {unknown[0]}; it takes a plain GPT-2"
            )
        for name, p in model.named_parameters():
            theirs, transposed = hugging_face_name(getattr(p, "same_as", name))
            stored = tensors.get(theirs)
            shape = tuple(p.shard.global_shape)
            if transposed:
                shape = shape[::-1]
            if tuple(stored.get_shape()) != shape:
                raise ValueError(f"{theirs} in {folder} has the shape {tuple(stored.get_shape())}, not {shape}")
            _fill(p, stored, _columns(model.shape, ".qkv." in name), transposed)


def check_config(shape: GPT2Shape, folder: Path) -> None:
    """Raise ValueError unless the folder holds a GPT-2 of this shape."""
    try:
        told = _json(folder / "config.json")
    except ValueError as error:
        raise ValueError(f"model.init = {folder} holds no readable config.json: {error}") from error
    # what Hugging Face leaves out of the file has the value of the first GPT-2
    scales = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    usual = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, **scales}
    wanted = {key: value for key, value in gpt2_config(shape, None).items() if key not in _FREE} | scales
    wrong = [f"{k} = {got}, not {v}" for k, v in wanted.items() if (got := told.get(k, usual.get(k))) != v]
    if wrong:
        raise ValueError(f"model.init = {folder} is another model than the section [model] says: {'; '.join(wrong)}")


def _columns(shape: GPT2Shape, fused: bool) -> np.ndarray | None:
    """Where our rows are among their columns: the fused queries, keys and values are by head in ours."""
    if not fused:
        return None
    theirs = np.arange(3 * shape.width).reshape(3, shape.heads, -1)
    return theirs.transpose(1, 0, 2).reshape(-1)


def _fill(p: torch.nn.Parameter, stored, columns, transposed: bool) -> None:
    rows, *rest = p.shard.slices
    if p.numel() == 0:
        return
    ours = p.view(p.shard.shape)
    if not rest or not transposed:
        if columns is not None:  # a bias
            ours.copy_(stored[:][torch.from_numpy(columns[rows])])
        else:
            ours.copy_(stored[rows.start : rows.stop][..., rest[0]] if rest else stored[rows.start : rows.stop])
        return
    taken = torch.from_numpy(columns[rows]) if columns is not None else rows
    step = max(1, CHUNK // stored.get_shape()[1])
    (features,) = rest
    for start in range(features.start, features.stop, step):
        stop = min(start + step, features.stop)
        ours[:, start - features.start : stop - features.start].copy_(stored[start:stop][:, taken].t())


class _Safetensors:
    """The tensors of a folder, in one file or in several with an index; read by slices."""

    def __init__(self, folder: Path):
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        self.where = None
        if files.status(index):
            self.where = _json(index).get("weight_map")
            if not isinstance(self.where, dict):
                raise ValueError(f"{index} has no weight_map")
            for name, file in self.where.items():
                if not (isinstance(file, str) and re.fullmatch(r"[^/\0]+\.safetensors", file)):
                    raise ValueError(f"{index} tells of no plain name of a file beside it for {name}: {file!r:.100}")

    def __enter__(self):
        self.stack, self.open = contextlib.ExitStack(), {}
        return self

    def __exit__(self, *_):
        self.stack.close()

    def names(self) -> set[str]:
        return self._file("model.safetensors")[1] if self.where is None else set(self.where)

    def get(self, name: str):
        # GPT2Model, without the projection onto the vocabulary, names its parts without the prefix
        for known in (name, name.removeprefix("transformer.")):
            file = "model.safetensors" if self.where is None else self.where.get(known)
            if file:
                opened, names = self._file(file)
                if known in names:
                    found = opened.get_slice(known)
                    if found.get_dtype() not in _FLOATS:
                        raise ValueError(f"{known} in {self.folder / file} holds {found.get_dtype()}, no floats")
                    return found
        raise ValueError(f"{self.folder} does not hold {name}")

    def _file(self, name: str):
        """The open file of that name, and the names of its tensors."""
        from safetensors import SafetensorError, safe_open

        if name not in self.open:
            path = self.folder / name
            try:
                if not files.regular(path):
                    raise ValueError(f"{path} is missing")
                opened = self.stack.enter_context(safe_open(path, "pt"))  # checks sizes, counts and offsets
                self.open[name] = opened, set(opened.keys())
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
        return self.open[name]


def _json(path: Path) -> dict:
    """Raises ValueError, naming the file, for what cannot be read or is no object."""
    try:
        told = json.loads(files.read_bounded(path, LARGEST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(told, dict):
        raise ValueError(f"{path} holds no JSON object")
    return told
