"""Attention of cut sequences against torch's dense attention of whole ones."""

import functools
import itertools
import math

import torch
import torch.nn.functional as F
from test_context_spans import dense

from hpctrain import Grid, RngKey
from hpctrain.layers.context import attention
from hpctrain.layers.context.attention import Context, attend
from hpctrain.layers.context.block import CpuFlash
from hpctrain.layers.context.mask import Mask
from hpctrain.layers.context.spans import sequence_spans

KEY = RngKey(5, "context")
SEQUENCES, WIDTH = 2, 8


def grids(world, one_node=True):
    """Every ring × Ulysses of the ranks there are; else by messages, with sends that wait."""
    return _grids(world.size, one_node)


@functools.cache  # a grid makes several communicators
def _grids(ranks, one_node):
    made = [Grid(data=(1, ring, ranks // ring)) for ring in range(1, ranks + 1) if ranks % ring == 0]
    for grid in made:
        grid.transport.synchronous = not one_node
        grid.ring.one_node &= one_node
        grid.ulysses.one_node &= one_node
    return made


def use_tiles(monkeypatch):
    """Whole causal sequences of any length are cut into tiles of two tokens. Returns a list, of the kinds computed."""
    kinds, forward = [], CpuFlash.forward
    monkeypatch.setattr(attention, "TILED", range(1, 1025))
    monkeypatch.setattr(CpuFlash, "triangle", 2)
    monkeypatch.setattr(CpuFlash, "forward", staticmethod(lambda b: kinds.append(b.tile.kind) or forward(b)))
    return kinds


@functools.cache
def tensors(heads, kv_heads, length, dtype=torch.float64, sequences=SEQUENCES):
    """Whole q, k, v and the gradient of the output, the same on every rank."""
    shapes = [(sequences, count, length, WIDTH) for count in (heads, kv_heads, kv_heads, heads)]
    return tuple((KEY / n).normal(0, math.prod(shape)).view(shape).to(dtype) for n, shape in enumerate(shapes))


@functools.cache
def serial(q, k, v, grad, masks, keep=None):
    """Output and gradients by a dense mask for each sequence, in float64; `keep` are the factors of dropout."""
    q, k, v = (part.to(torch.float64, copy=True).requires_grad_() for part in (q, k, v))
    seen = torch.stack([torch.from_numpy(dense(mask, q.shape[2])) for mask in masks])[:, None]
    many = [part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v)]
    if keep is None:
        out = F.scaled_dot_product_attention(q, *many, seen)
    else:
        scores = (q @ many[0].mT / math.sqrt(q.shape[3])).masked_fill(~seen, -math.inf)
        out = scores.softmax(-1) * keep @ many[1]
    out.backward(grad.double())
    return [part.detach() for part in (out, q.grad, k.grad, v.grad)]


def local(whole, spans):
    return torch.cat([whole[:, :, :0], *(whole[:, :, span.start : span.stop] for span in spans)], 2)


def run(grid, whole, masks, balance="zigzag", dropout=None, spans=None):
    """Output and gradients of this rank's tokens, and its spans."""
    q, k, v, grad = whole
    spans = tuple(spans or sequence_spans(q.shape[2], grid.ring.size, grid.ulysses.size, balance, masks))
    mine = spans[grid.sequence.rank]
    q, k, v = (local(part, mine).requires_grad_() for part in (q, k, v))
    context = Context(grid.ring, grid.ulysses, spans, tuple(masks), q.shape[3] ** -0.5, dropout)
    out = attend(q, k, v, context)
    out.backward(local(grad, mine))
    return [out.detach(), q.grad, k.grad, v.grad], mine


def check(grid, whole, masks, rtol, **options):
    """Output and gradients are the serial ones to `rtol` of the largest element of them all."""
    expected = serial(*whole, tuple(masks), options.pop("keep", None))
    found, mine = run(grid, whole, masks, **options)
    limit = rtol * max(part.abs().max().item() for part in expected)
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, expected):
        assert ours.shape == local(theirs, mine).shape, name
        wrong = (ours.double() - local(theirs, mine)).abs()
        assert (wrong <= limit).all(), f"{name}: {wrong.max()} on {mine} of {masks[0]}, {grid.shape}"


def all_masks(length):
    """Causal or not, windows narrower and wider than a rank's part, packed documents, all of it together."""
    documents = tuple(d for d in (length // 2, length // 3, length - length // 2 - length // 3) if d)
    for causal, window, cut in itertools.product((True, False), (0, 3), ((), documents)):
        yield Mask(causal, window, cut)
