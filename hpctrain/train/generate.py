"""Generate text with the whole grid."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.grid import Grid
from hpctrain.pipeline import Executor, forward_only
from hpctrain.randomness import RngKey


def generate(
    model: torch.nn.Module, grid: Grid, prompt: list[int], count: int, vocabulary: int, key: RngKey,
    temperature: float = 0.8,
) -> list[int]:  # fmt: skip
    """`count` tokens that follow `prompt`, drawn below `vocabulary`; the same on every rank, and on every grid.

    The replicas all do the same work. The last `context` tokens are seen.
    """
    executor = Executor(grid.pipeline, forward_only(grid.pipeline.size, 1, model.placement))
    ids = list(prompt)
    draws = key.uniform(0, count).tolist()
    model.eval()
    with torch.no_grad():
        for draw in draws:
            stages = _LastLogits(model, torch.tensor(ids[-model.shape.context :]))
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

    def __init__(self, model, ids):
        self.model = model
        self.tokens = model.tokens(1, len(ids))
        self.ids = ids[self.tokens.positions()].repeat(self.tokens.sequences).to(model.device)

    def message_spec(self, action):
        return self.model.message_spec(self.tokens)

    def forward(self, action, inputs):
        y = self.model(inputs[0] if inputs else self.ids, self.tokens, action.stage)
        if action.stage < self.model.last:
            return y
        return self.model.last_logits(y, self.tokens)
