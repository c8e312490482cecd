"""`context_attention`: torch's `scaled_dot_product_attention` for sequences that are cut over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain import comm
from hpctrain.grid import Grid
from hpctrain.layers.context.attention import Context, attend
from hpctrain.layers.context.dropout import AttentionDropout
from hpctrain.layers.context.mask import Mask
from hpctrain.layers.context.spans import Spans, sequence_spans, span_length
from hpctrain.layers.dropout import check_probability
from hpctrain.randomness import RngKey, check_key


def context_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grid: Grid,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    length: int | None = None,
    balance: str = "zigzag",
    spans: Sequence[Spans] | None = None,
    window: int = 0,
    documents: Sequence[int] | Sequence[Sequence[int]] | None = None,
    dropout_key: RngKey | None = None,
    step: int = 0,
) -> torch.Tensor:
    """Attention of this rank's tokens to all tokens of their sequences, of which `grid.sequence` has the others.

    The arguments and the result are those of `torch.nn.functional.scaled_dot_product_attention`, of the local tokens:
    (sequences, heads, local tokens, head width). Differentiable, once. Collective over grid.ring and grid.ulysses, and
    so is backward; any numbers of tokens, heads and ranks will do. Cut a sequence, and all that goes with its
    positions, by `ht.layers.sequence_spans`; on one rank it is whole.

    Args:
        key, value: with `enable_gqa` their heads may be a divisor of the query's.
        attn_mask: refused; say who sees whom by the options below.
        is_causal: attend to no later position.
        length: tokens of a whole sequence, by default those of all ranks.
        balance, spans: how the sequences are cut: as `sequence_spans(length, ring, ulysses, balance, masks)` says, or
            the positions that each rank of grid.sequence holds, ascending.
        window: attend to positions fewer than so many away; 0 for all.
        documents: lengths of the documents packed one after the other in every sequence, or in each; attend within
            one's own.
        dropout_key, step: name the dropout masks, which are then the same ones on any number of ranks.

    Raises:
        ValueError: on every rank alike, for what does not fit together.
    """
    documents = _tuples(documents)
    options = (
        attn_mask is None, dropout_p, is_causal, scale, enable_gqa, length, balance, _tuples(spans), window,
        documents, repr(dropout_key), step,
    )  # fmt: skip
    sequence = grid.sequence
    mine = tuple(query.shape), tuple(key.shape), tuple(value.shape), {query.dtype, key.dtype, value.dtype}, options
    everyone = comm.all_gather_object(mine, sequence) if sequence.size > 1 else [mine]
    _check(everyone)  # what all ranks have gathered, so that it fails on all or on none
    tokens = [shape[2] for shape, *_ in everyone]
    length = sum(tokens) if length is None else length
    masks = _masks(documents, len(query), is_causal, window)
    if spans is None:
        spans = sequence_spans(length, grid.ring.size, grid.ulysses.size, balance, masks)
    _check_spans(spans, tokens, length)
    for mask in masks:
        mask.document_ranges(length)
    dropout = None
    if dropout_p:
        assert dropout_key is not None  # checked
        dropout = AttentionDropout(check_key(dropout_key), dropout_p, step, length, query.shape[1], range(len(query)))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    return attend(query, key, value, Context(grid.ring, grid.ulysses, tuple(spans), masks, scale, dropout))


def _tuples(nested):
    """Lists, tensors and arrays as tuples of numbers."""
    if hasattr(nested, "tolist"):
        nested = nested.tolist()
    return tuple(map(_tuples, nested)) if isinstance(nested, (list, tuple)) else nested


def _masks(documents, sequences, causal, window):
    """One for each sequence."""
    documents = () if documents is None else documents
    is_tuple = isinstance(documents, tuple)
    if is_tuple and all(isinstance(length, int) for length in documents):
        return (Mask(causal, window, documents),) * sequences
    if not is_tuple or len(documents) != sequences or not all(isinstance(lengths, tuple) for lengths in documents):
        raise ValueError(f"documents must be lengths, or lengths for each of {sequences} sequences, got {documents}")
    return tuple(Mask(causal, window, lengths) for lengths in documents)


def _check(everyone):
    for rank, other in enumerate(everyone):
        query, key, value, dtypes, options = other
        if len(query) != 4 or key != value or len(key) != 4 or (query[0], *query[2:]) != (key[0], *key[2:]):
            raise ValueError(
                "query, key and value must be (sequences, heads, local tokens, head width), key and value alike, got"
                f" {query}, {key} and {value} on rank {rank} of the sequence"
            )
        if len(dtypes) > 1:
            raise ValueError(f"query, key and value must have one dtype, got {', '.join(sorted(map(str, dtypes)))}")
        first = everyone[0]
        if [(s[:2], s[3]) for s in other[:3]] != [(s[:2], s[3]) for s in first[:3]] or other[3:] != first[3:]:
            raise ValueError(
                "all ranks of the sequence must call context_attention with the same options, and with tensors that"
                f" differ in local tokens alone; rank {rank} has {other}, rank 0 {first}"
            )
    (sequences, heads, _, _), (_, groups, *_), *_ = everyone[0]
    without_mask, dropout_p, _, _, enable_gqa, _, _, _, window, _, dropout_key, _ = everyone[0][4]
    if not without_mask:
        raise ValueError("attn_mask is of one rank's tokens; say is_causal, window or documents instead")
    if heads != groups and (not enable_gqa or heads % groups):
        raise ValueError(f"{groups} key heads for {heads} query heads: they must divide them, with enable_gqa=True")
    check_probability(dropout_p)
    if dropout_p and dropout_key == "None":
        raise ValueError("dropout_p needs dropout_key=ht.RngKey(...), which names the masks on all ranks alike")
    if not isinstance(window, int) or window < 0:
        raise ValueError(f"window must be a number of tokens, or 0 for all, got {window}")


def _check_spans(spans, tokens, length):
    due = [span_length(part) for part in spans]
    if due != tokens or sum(due) != length:
        raise ValueError(
            f"a sequence of {length} tokens is {due} on the ranks of grid.sequence, but they have {tokens}; cut it by"
            " ht.layers.sequence_spans, and say length where ranks have no equal parts"
        )
    ordered = [list(part) == sorted(part, key=lambda span: span.start) for part in spans]
    positions = sorted((span.start, span.stop) for part in spans for span in part)
    if not all(ordered) or any(a[1] != b[0] for a, b in zip([(0, 0), *positions], positions)):
        raise ValueError(f"spans must be ascending on each rank, and every position on one, got {spans}")
