"""Generate text with the whole grid."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.grid import Grid
from hpctrain.layers.context.sharded_kv_cache import ShardedKVCache
from hpctrain.layers.kv_cache import InferenceCache
from hpctrain.models.staged_model import StagedModel
from hpctrain.pipeline import forward_only
from hpctrain.pipeline.actions import Action
from hpctrain.pipeline.executor import Executor, StageWork
from hpctrain.randomness import RngKey


def generate(
    model: StagedModel, grid: Grid, prompt: list[int], count: int, vocabulary: int, key: RngKey,
    temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0, end: int | None = None,
    documents: int | None = None,
) -> list[int]:  # fmt: skip
    """Up to `count` tokens that follow `prompt`, drawn below `vocabulary`; the same on every rank, and on every grid.

    Keys and values of earlier tokens are kept, spread over the ranks that share a sequence, until there are more tokens
    than `context`, of which the last are seen. The replicas all do the same work, to rounding where they share experts:
    what the first one draws is the next token of all, so that they end together.

    Args:
        temperature: of the softmax; 0 takes the likeliest token.
        top_k: how many of the likeliest are drawn from; 0: all.
        top_p: draw from the fewest likeliest that have this probability together.
        end: a token after which nothing follows.
        documents: the token that ends documents, of a model whose documents see themselves alone; None of one that sees
            all.
    """
    drawing = model.placement[0, model.last] * grid.ulysses.size * grid.tensor.size  # the first rank of the last stage
    executor = Executor(grid.pipeline, forward_only(grid.pipeline.size, 1, model.placement))
    ids, context, first = list(prompt), model.shape.context, 0
    cache: InferenceCache | ShardedKVCache | None = None
    passed: int | None = None  # tokens that the cache has, from the first of the document on
    cached = hasattr(model.tokens(1, 1), "part")
    model.eval()
    with torch.no_grad():
        for draw in key.uniform(0, count).tolist():
            start = _document_start(ids, documents)
            if passed is None or start > first:
                first, passed = start, 0
                cache = InferenceCache() if grid.sequence.size == 1 else ShardedKVCache(grid.sequence)
            seen = ids[first:]
            window = torch.tensor(seen[-context:])
            tokens = model.tokens(1, len(window))
            if cached and len(seen) <= context:
                tokens, passed = tokens.part(slice(passed, len(seen)), cache), len(seen)
            logits = executor.run(_LastLogits(model, window, tokens))
            chosen = torch.zeros(1, dtype=torch.int64)
            if logits:
                chosen[0] = chosen_by(logits[0][:vocabulary].double(), draw, temperature, top_k, top_p)
            comm.broadcast(chosen, grid.world, root=drawing)
            ids.append(int(chosen))
            if ids[-1] == end:
                break
    return ids[len(prompt) :]


def _document_start(ids, end) -> int:
    """Number of the first token of the last token's document, of those that `end` ends.

    >>> _document_start([1, 9, 2, 9], 9), _document_start([9, 9, 3], 9), _document_start([9, 3], None)
    (2, 2, 0)
    """
    return next((place + 1 for place in range(len(ids) - 2, -1, -1) if ids[place] == end), 0)


def chosen_by(logits: torch.Tensor, draw: float, temperature: float, top_k: int = 0, top_p: float = 1.0) -> int:
    """The token at `draw`, from 0 to 1, of the distribution; arguments as of `generate`.

    >>> logits = torch.tensor([1.0, 4.0, 3.0, 2.0])
    >>> [chosen_by(logits, draw, 1.0, top_k=2) for draw in (0.0, 0.7, 0.75, 1.0)], chosen_by(logits, 0.9, 0.0)
    ([1, 1, 2, 2], 1)
    """
    if temperature == 0:
        return int(logits.argmax())
    probabilities = (logits / temperature).softmax(0)
    ordered, by_size = probabilities.sort(descending=True, stable=True)
    if top_k:
        ordered[top_k:] = 0
    before = (ordered / ordered.sum()).cumsum(0).roll(1)
    before[0] = 0
    ordered[before >= top_p] = 0
    kept = torch.zeros_like(probabilities)
    kept[by_size] = ordered
    reached = int(torch.searchsorted(kept.cumsum(0), draw * kept.sum(), right=True))
    return min(reached, int(kept.nonzero().max()))


class _LastLogits(StageWork):
    """The stages over one sequence, of which the last returns the logits of the last position, (vocabulary,)."""

    def __init__(self, model: StagedModel, window: torch.Tensor, tokens):
        self.model, self.tokens = model, tokens
        self.ids = window[tokens.positions()].repeat(tokens.sequences).to(model.device)

    def message_spec(self, action: Action):
        return self.model.message_spec(self.tokens, action.stage)

    def forward(self, action: Action, inputs: list[torch.Tensor]):
        y = self.model(inputs[0] if inputs else self.ids, self.tokens, action.stage)
        if action.stage < self.model.last:
            return y
        return self.model.last_logits(y, self.tokens)
