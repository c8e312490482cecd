"""What the pipeline's executor runs: a rank's stages on the microbatches of one step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hpctrain.layers.past import Past


class Stages:
    """The stages of a model such as `models.gpt2.GPT2`; see `pipeline.executor.Work`.

    Args:
        microbatches: of `train.batches.Microbatch`.
        slices: lengths of the token slices that every sequence is cut into; none where it is not.
        scale: what losses are multiplied by.
    """

    def __init__(self, model, microbatches: list, slices: Sequence[int] = (), scale: float = 1.0):
        self.model, self.microbatches, self.scale = model, microbatches, scale
        starts = [0, *itertools.accumulate(slices)]
        self.parts = [slice(*ends) for ends in itertools.pairwise(starts)]
        self.pasts: dict[tuple, Past] = {}

    def tokens(self, action):
        tokens = self.microbatches[action.microbatch].tokens
        if not self.parts:
            return tokens
        past = self.pasts.setdefault(action[1:4], Past())
        return tokens.part(self.parts[action.slice], past)

    def room(self, action):
        return self.model.room(self.tokens(action))

    def forward(self, action, inputs):
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

    def compute(self, action, x, tokens):
        return self.model(x, tokens, action.stage)

    def carried(self, action):
        return self.pasts[action[1:4]].carried()
