"""Memory of attention and of a model falls as one over the ranks that share a sequence, and is that of the formula."""

import math

import pytest
import torch
from training_checks import BATCH, batches, made, microbatches

from hpctrain import Grid
from hpctrain.comm.windows import Window
from hpctrain.layers import context_attention, sequence_spans
from hpctrain.layers.context.formula import bytes_in_memory
from hpctrain.models.gpt2 import GPT2Shape
from hpctrain.models.llama import LlamaShape

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]

LENGTH, WIDTH, MIB = 4096, 32, 1 << 20
GRIDS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 4: [(4, 1), (1, 4), (2, 2)]}


class Memory:
    """Counts what torch's allocator gives out in the block: `peak`, and what is `left`, in bytes over the beginning."""

    def __enter__(self):
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profiler.__enter__()
        return self

    def __exit__(self, *error):
        self._profiler.__exit__(*error)
        events = [e for e in self._profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        self.left = self.peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.left += event.nbytes()
            self.peak = max(self.peak, self.left)


def shared(grid):
    """Bytes of this rank in windows."""
    return sum(len(each.parts[each.axis.rank]) for each in grid.transport.resources if isinstance(each, Window))


@pytest.mark.parametrize(("heads", "groups"), [(8, 8), (8, 2)])
def test_attention(world, heads, groups):
    """Kept is what is left after forward, to the byte but for a few small ones; the rest is the most of a step."""
    for ring, ulysses in GRIDS[world.size]:
        grid = Grid(data=(1, ring, ulysses))
        spans = sequence_spans(LENGTH, ring, ulysses)
        due = bytes_in_memory(
            spans, ring, ulysses, grid.sequence.rank, sequences=1, heads=heads, groups=groups, width=WIDTH
        )
        count = sum(map(len, spans[grid.sequence.rank]))
        step(grid, heads, groups, count)  # windows and tables
        forward, backward = step(grid, heads, groups, count)
        # of one Ulysses rank what is given is what is kept, and q is kept as it came
        kept = due["kept"] + (out_bytes(count, heads) if ulysses > 1 else -out_bytes(count, heads))
        assert forward.left == pytest.approx(kept, rel=0.01)
        assert 0.9 * due["working"] <= backward.peak <= due["working"] + 1.01 * MIB
        pages = 2 * 4096
        assert 0 <= shared(grid) - due["shared"] <= pages * (ring > 1) + pages * (ulysses > 1)


def step(grid, heads, groups, count):
    q, k, v, grad = (torch.randn(1, n, count, WIDTH) for n in (heads, groups, groups, heads))
    for part in (q, k, v):
        part.requires_grad_()
    with Memory() as forward:
        out = context_attention(q, k, v, grid, is_causal=True, enable_gqa=True, length=LENGTH)
    with Memory() as backward:
        out.backward(grad)
    return forward, backward


def out_bytes(count, heads):
    return count * heads * WIDTH * 4


SHAPES = {
    "gpt2": GPT2Shape(layers=2, width=64, heads=4, context=513, vocabulary=23),
    "llama": LlamaShape(layers=2, width=64, heads=4, context=513, vocabulary=23, kv_heads=4, ffn=128, head_width=16),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_activations_of_a_model(world, kind):
    """What forward leaves, residual stream, norms, projections and attention, is of the local tokens alone. Where
    heads are exchanged each layer's output is there twice, as all ranks' tokens of some heads and the other way."""
    shape = SHAPES[kind]
    left = {}
    for data in [(1, *grid) for grid in GRIDS[world.size]]:
        grid = Grid(data)
        left[data] = kept_by(grid, shape)
    alone = kept_by(Grid(comm=_alone()), shape)
    for data, found in left.items():
        twice = BATCH * (shape.context - 1) * shape.width * 8 * shape.layers if data[2] > 1 else 0
        due = (alone + twice) / math.prod(data)
        assert 0.85 * due <= found <= 1.02 * due, data  # of Llama one rank keeps what its values are a part of


def kept_by(grid, shape):
    model = made(grid, shape)
    (microbatch,) = microbatches(grid, batches(shape, 1)[0], 0, 1)
    model.loss(model(microbatch.ids, microbatch.tokens), microbatch.targets, microbatch.scale).backward()  # tables
    with Memory() as forward:
        loss = model.loss(model(microbatch.ids, microbatch.tokens), microbatch.targets, microbatch.scale)
    loss.backward()
    return forward.left


def _alone():
    from mpi4py import MPI

    return MPI.COMM_SELF
