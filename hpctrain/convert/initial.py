"""Initial weights of modules that were built on the meta device, drawn slice by slice.

The distributions are those of torch's modules, of GPT-2 and of the models of Hugging Face's that draw as its
PreTrainedModel does; the numbers come from counter-based streams, so that they depend on the seed and the parameter's
name and not on the grid.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hpctrain.convert.pretrained import is_pretrained
from hpctrain.randomness import RngKey


def initial_numbers(module: torch.nn.Module, name: str, path: str, config: Any):
    """A function of a RngKey, giving the function (start, count) -> numbers that fills the parameter.

    Args:
        path: name of the parameter in the model.
        config: as `config_around` gives it.

    Raises:
        ValueError: when the module's distribution is not known.
    """
    kind, weight = type(module).__name__, name.endswith("weight")
    unknown = ValueError(
        f"{path} is on the meta device, and how a {kind} is initialised is not known; build it on a device"
    )
    if not type(module).__module__.startswith(("torch.nn.", "transformers.")):  # an heir may draw others
        raise unknown
    if "Norm" in kind:
        return _constant(1.0 if weight else 0.0)
    std = None if config is None else _deviation(config)
    if isinstance(module, nn.Embedding):
        return _without_row(_normal(1.0 if std is None else std), module.padding_idx, module.embedding_dim)
    if kind == "Conv1D" or (std is not None and isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))):
        if std is None:  # of Hugging Face's, but in none of its models
            raise unknown
        if config.model_type == "gpt2" and path.endswith("c_proj.weight"):
            std = std / math.sqrt(2 * config.n_layer)
        return _normal(std) if weight else _constant(0.0)
    if isinstance(module, nn.MultiheadAttention) and not name.startswith("bias_"):
        shape = module.get_parameter(name).shape
        return _uniform(math.sqrt(6 / sum(shape))) if weight else _constant(0.0)  # Glorot and Bengio's
    if type(module) is nn.modules.linear.NonDynamicallyQuantizableLinear and not weight:
        return _constant(0.0)  # the output projection of nn.MultiheadAttention
    if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        return _uniform(1 / math.sqrt(max(1, module.weight[0].numel())))
    raise unknown


def config_around(model: torch.nn.Module, path: str) -> Any:
    """That of the model of Hugging Face's which draws the weights of the module: the nearest that has it, or None."""
    names = path.split(".") if path else []
    around = [model.get_submodule(".".join(names[:count])) for count in range(len(names) + 1)]
    return next((module.config for module in reversed(around) if is_pretrained(module)), None)


def _deviation(config) -> float:
    """The standard deviation of all weights, as PreTrainedModel._init_weights finds it."""
    if hasattr(config, "initializer_range"):
        return config.initializer_range or 0.02
    of_text = getattr(config.get_text_config(), "initializer_range", 0.02)
    return getattr(config, "init_std", getattr(config, "initializer_factor", of_text))


def check_model(model: torch.nn.Module) -> None:
    """Raise ValueError for a model of Hugging Face's that draws other weights than most, and is on the meta device, be
    it in another."""
    for module in (model, *filter(is_pretrained, model.modules())):
        draws = getattr(type(module), "_init_weights", None)
        known = draws is None or draws.__qualname__.partition(".")[0] in ("PreTrainedModel", "GPT2PreTrainedModel")
        if not known and any(parameter.is_meta for parameter in module.parameters()):
            raise ValueError(
                f"the model is on the meta device, and how a {type(module).__name__} is initialised is not known; build"
                " it on a device"
            )


def check_buffers(module: torch.nn.Module) -> None:
    """Raise ValueError when the module has buffers of its own on the meta device and what they hold is not known."""
    lost = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
    if lost and type(module).__name__ != "LlamaRotaryEmbedding" and not hasattr(module, "reset_running_stats"):
        raise ValueError(f"what its buffer {lost[0]!r} on the meta device holds is not known; build it on a device")


def give_buffers(module: torch.nn.Module) -> None:
    """Fill the module's own buffers that are on the meta device."""
    lost = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    if lost and type(module).__name__ == "LlamaRotaryEmbedding":
        with torch.device("cpu"):
            module._buffers.update(type(module)(module.config)._buffers)
    elif lost and (reset := getattr(module, "reset_running_stats", None)):  # others are refused by `check_buffers`
        for name, buffer in lost.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        reset()


def _constant(value: float):
    return lambda key: lambda start, count: torch.full((count,), value, dtype=torch.float64)


def _normal(std: float):
    return lambda key: lambda start, count: key.normal(start, count) * std


def _uniform(bound: float):
    return lambda key: lambda start, count: (key.uniform(start, count) * 2 - 1) * bound


def _without_row(draw, row: int | None, width: int):
    """Zeros in one row of a table."""
    if row is None:
        return draw

    def make(key: RngKey):
        numbers = draw(key)

        def zeroed(start, count):
            index = torch.arange(start, start + count) // width
            return numbers(start, count).masked_fill_(index == row, 0.0)

        return zeroed

    return make
