"""Hugging Face's models as a whole, and peft's: what they do to all of their weights, after parallelize."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain import comm
from hpctrain.convert.refusals import place
from hpctrain.convert.state_dict import gather_state_dict
from hpctrain.grid import Grid

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:  # need not be there
    PreTrainedModel = torch.nn.Module


class DividedPretrained(PreTrainedModel):
    """Mixin for a PreTrainedModel with divided weights in it, be it the model or a part of it.

    Attributes: `hpctrain_grid`.
    """

    hpctrain_grid: Grid
    prefix = ""  # the name of the type is written into config.json, and what can be recorded is looked up by it

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        **options: Any,
    ):
        """Whole weights, written by the first rank. Collective over the grid, unless a state dict is given."""
        if state_dict is not None:
            super().save_pretrained(save_directory, is_main_process, state_dict, **options)
            return
        save = super().save_pretrained
        _save_whole(self, lambda weights: save(save_directory, is_main_process, weights, **options))

    def resize_token_embeddings(self, *sizes: Any, **options: Any):
        if not sizes and not options:
            return self.get_input_embeddings()
        raise ValueError(
            f"{place()}: resize_token_embeddings of a {type(self).__name__} whose embeddings are divided over ranks;"
            " call it before parallelize"
        )

    def init_continuous_batching(self, *arguments: Any, **options: Any):
        """`generate_batch` calls this. Errors of its forwards are logged, and no tokens returned, so that it is refused
        here where it would fail."""
        if self.hpctrain_grid.tensor.size * self.hpctrain_grid.sequence.size > 1:
            raise ValueError(
                f"{place()}: continuous batching of a {type(self).__name__} keeps all keys and values, which are "
                "divided over ranks; call generate with padded sequences"
            )
        return super().init_continuous_batching(*arguments, **options)


class DividedAdapters(torch.nn.Module):
    """Mixin for a PeftModel with divided weights in it.

    Attributes: `hpctrain_grid`; `peft_config`, by the names of its adapters.
    """

    hpctrain_grid: Grid
    peft_config: dict[str, Any]
    prefix = ""

    def save_pretrained(
        self, save_directory: str | Path, *arguments: Any, state_dict: dict[str, torch.Tensor] | None = None,
        **options: Any,
    ):  # fmt: skip
        """Whole weights of the adapters, written by the first rank. Collective over the grid, unless a state dict is
        given.

        Raises:
            ValueError: for a state dict, which has no prompts that are computed from weights.
        """
        save = super().save_pretrained  # type: ignore[misc]  # peft's
        if state_dict is not None:
            learned = [name for name, config in self.peft_config.items() if config.is_prompt_learning]
            if learned and "get_prompt_embedding_to_save" not in vars(self):
                raise ValueError(
                    f"{place()}: save_pretrained(state_dict=...) of the adapter {learned[0]!r}, whose prompts all ranks"
                    " compute from their parts of its weights; call save_pretrained(folder) on every rank, without"
                    " state_dict"
                )
            save(save_directory, *arguments, state_dict=state_dict, **options)
            return
        _save_whole(self, lambda weights: save(save_directory, *arguments, state_dict=weights, **options))


def _save_whole(model: DividedPretrained | DividedAdapters, save: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """`save` the whole weights, on the first rank. Collective over the grid."""
    weights = gather_state_dict(model)
    with whole_prompts(model, weights), comm.together(model.hpctrain_grid.world):
        if model.hpctrain_grid.rank == 0:
            save(weights)


@contextlib.contextmanager
def whole_prompts(model: Any, weights: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within the block the first rank alone may save the prompts of a model of peft's: what is computed from the
    weights of their encoders, and these weights, which are among the whole ones that it has. Collective at its start.
    """
    if not has_prompts(model):
        yield
        return
    encoders = getattr(model, "prompt_encoder", torch.nn.ModuleDict())
    prompts = {name: model.get_prompt_embedding_to_save(name) for name in encoders}
    model.get_prompt_embedding_to_save = prompts.__getitem__
    kept = [(module, dict(module._parameters)) for module in encoders.modules()]
    for path, module in encoders.named_modules(prefix="prompt_encoder"):
        for name in module._parameters:
            module._parameters[name] = weights.get(f"{path}.{name}")
    try:
        yield
    finally:
        del model.get_prompt_embedding_to_save
        for module, parameters in kept:
            module._parameters.update(parameters)


def has_prompts(module: torch.nn.Module) -> bool:
    """Whether it is a model of peft's, which may have learned prompts."""
    return hasattr(type(module), "get_prompt_embedding_to_save")


def is_pretrained(module: torch.nn.Module) -> bool:
    kinds = type(module).__mro__
    return any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in kinds)
