"""Hugging Face's models as a whole: what they do to all of their weights, after parallelize."""

from __future__ import annotations

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
        state_dict = gather_state_dict(self)
        with comm.together(self.hpctrain_grid.world):
            if self.hpctrain_grid.rank == 0:
                super().save_pretrained(save_directory, is_main_process, state_dict, **options)

    def resize_token_embeddings(self, *sizes: Any, **options: Any):
        if not sizes and not options:
            return self.get_input_embeddings()
        raise ValueError(
            f"{place()}: resize_token_embeddings of a {type(self).__name__} whose embeddings are divided over ranks;"
            " call it before parallelize"
        )


def is_pretrained(module: torch.nn.Module) -> bool:
    kinds = type(module).__mro__
    return any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in kinds)
