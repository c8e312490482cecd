"""What the pipeline's executor runs: a rank's stages on the microbatches of one step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hpctrain.layers import Tokens
from hpctrain.layers.kv_cache import KVCache
from hpctrain.models.staged_model import StagedModel
from hpctrain.pipeline.actions import Action
from hpctrain.pipeline.executor import StageWork

if TYPE_CHECKING:
    from hpctrain.train.batches import Microbatch


class Stages(StageWork):
    """The stages of a model on microbatches.

    Args:
        slices: lengths of the token slices that every sequence is cut into; none where it is not.
        scale: what losses are multiplied by.

    Raises:
        ValueError: for slices that do not add up to the sequences of the microbatches.
    """

    def __init__(
        self, model: StagedModel, microbatches: Sequence[Microbatch], slices: Sequence[int] = (), scale: float = 1.0
    ):
        self.model, self.microbatches, self.scale = model, microbatches, scale
        starts = [0, *itertools.accumulate(slices)]
        lengths = {each.tokens.whole for each in microbatches} if slices else set()
        if lengths - {starts[-1]}:
            raise ValueError(
                f"slices={list(slices)} must add up to the tokens of every sequence, {starts[-1]}, got sequences of "
                f"{', '.join(map(str, sorted(lengths)))}"
            )
        self.parts = [slice(*ends) for ends in itertools.pairwise(starts)]
        self.kv_caches: dict[tuple, KVCache] = {}

    def tokens(self, action: Action) -> Tokens:
        tokens = self.microbatches[action.microbatch].tokens
        if self.scale != 1:
            tokens = dataclasses.replace(tokens, share=tokens.share * self.scale)
        if not self.parts:
            return tokens
        kv_cache = self.kv_caches.setdefault(action.microbatch_unit, KVCache())
        return tokens.part(self.parts[action.slice], kv_cache)

    def message_spec(self, action: Action) -> tuple[tuple[int, ...], torch.dtype, torch.device | None]:
        return self.model.message_spec(self.tokens(action), action.stage)

    def forward(self, action: Action, inputs: list[torch.Tensor]) -> torch.Tensor:
        batch, tokens = self.microbatches[action.microbatch], self.tokens(action)
        x = inputs[0] if inputs else self._cut(batch.ids, action)
        y = self.compute(action, x, tokens)
        if action.stage < self.model.last:
            return y
        return self.model.loss(y, self._cut(batch.targets, action), batch.scale * self.scale)

    def _cut(self, ids, action):
        """The action's slice of (sequences × length,)."""
        if not self.parts:
            return ids
        whole = self.microbatches[action.microbatch].tokens.whole
        return ids.view(-1, whole)[:, self.parts[action.slice]].reshape(-1)

    def compute(self, action: Action, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return self.model(x, tokens, action.stage)

    def carried(self, action: Action) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self.kv_caches[action.microbatch_unit].carried()
