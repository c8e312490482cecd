"""Generate text with the whole grid."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.layers import Tokens
from hpctrain.pipeline import Executor, forward_only
from hpctrain.randomness import Key


def generate(model, grid, prompt: list[int], count: int, vocabulary: int, key: Key, temperature: float = 0.8):
    """`count` tokens that follow `prompt`, drawn below `vocabulary`; the same on every rank, and on every grid.

    The replicas all do the same work. The last `context` tokens are seen.
    """
    executor = Executor(grid.pipeline, forward_only(grid.pipeline.size, 1, model.placement))
    ids = list(prompt)
    draws = key.uniform(0, count).tolist()
    model.eval()
    with torch.no_grad():
        for draw in draws:
            stages = _LastLogits(model, grid, torch.tensor(ids[-model.shape.context :]))
            logits = executor.run(stages)
            chosen = torch.zeros(1, dtype=torch.int64)
            if logits:
                probabilities = (logits[0][:vocabulary].double() / temperature).softmax(0)
                chosen[0] = min(int(torch.searchsorted(probabilities.cumsum(0), draw)), vocabulary - 1)
            comm.broadcast(chosen, grid.pipeline, root=model.placement[0, model.last])
            ids.append(int(chosen))
    return ids[len(prompt) :]


class _LastLogits:
    """The stages over one sequence, of which the last returns the logits of the last position, (vocabulary,)."""

    def __init__(self, model, grid, ids):
        self.model = model
        self.tokens = Tokens.of(grid, 1, len(ids), algorithm=model.algorithm)
        self.ids = ids.repeat(self.tokens.sequences).to(model.device)

    def room(self, action):
        return self.model.room(self.tokens)

    def forward(self, action, inputs):
        y = self.model(inputs[0] if inputs else self.ids, self.tokens, action.stage)
        if action.stage < self.model.last:
            return y
        # The sequence lies on the first rank over which rows are spread; every rank has its part of the vocabulary.
        algorithm, vocabulary = self.model.algorithm, self.model.shape.vocabulary
        parts = [algorithm.inner(vocabulary, rank=rank) for rank in range(algorithm.columns.size)]
        counts = tuple(part.stop - part.start for part in parts)
        here = y[-1:].flatten() if self.tokens.inner else y.new_empty(counts[algorithm.columns.rank])
        comm.broadcast(here.contiguous(), algorithm.rows)
        return comm.all_gather(here, algorithm.columns, counts).cpu()
