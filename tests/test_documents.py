"""Documents packed into sequences that attend to themselves alone: no leak, and the training of a program that writes
the masks out, on every kind of grid."""

import dataclasses

import pytest
import torch
from test_sequence_training import GPT, GRIDS, LLAMA
from training_checks import (
    CORNERS,
    END,
    LENGTH,
    UNEVEN,
    batches,
    check,
    document_lengths,
    fitting,
    in_turn,
    made,
    microbatches,
    train_on,
)

from hpctrain import Grid
from hpctrain.layers import Tokens
from hpctrain.pipeline import schedule

pytestmark = pytest.mark.mpi

WINDOWED = dataclasses.replace(LLAMA, window=3, dropout=0.0)


# Of tensor and pipeline axes, and of those of a sequence beside each of them; of 8 ranks the latter.
BOTH = {ranks: places + GRIDS.get(ranks, []) for ranks, places in CORNERS.items()} | {8: GRIDS[8]}


@pytest.mark.ranks(1, 2, 4, 8)
@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_equals_one_rank(world, case, shape):
    """7 tokens, dropout, two microbatches, clipping; documents of one token, of parts and of all of a sequence."""
    for data, pipeline, tensor in in_turn(BOTH, world.size, case + 1, of_8=2):
        check(Grid(data, pipeline, tensor), fitting(shape, pipeline), count=2, clip=1.0, documents=True)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("shape", "balance"), [(UNEVEN, "work"), (WINDOWED, "work"), (LLAMA, "zigzag")])
def test_long_sequences(world, case, shape, balance):
    """Of 103 tokens, which the ring cuts for each microbatch by what its documents are."""
    for data in {2: [(1, 2, 1), (1, 1, 2)], 4: [[(1, 4, 1), (1, 2, 2), (1, 1, 4)][case]]}[world.size]:
        shape = dataclasses.replace(fitting(shape, 1), context=104)
        check(Grid(data), shape, count=2, clip=0.3, balance=balance, documents=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tensor", [(2, 1, 1), (1, 2, 1)])
def test_planes(world, tensor):
    """Whose ranks attend to some of the block's sequences each."""
    check(Grid(1, 1, tensor), fitting(LLAMA, 1), count=2, clip=1.0, algorithm="summa", documents=True)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["interleaved", "zb-v", "dualpipe"])
def test_schedules(world, case, name):
    layers = schedule(name, 2, 4).graph.stages + 1
    grid = Grid([(1, 2, 1), (1, 1, 2)][case % 2], 2)
    check(grid, dataclasses.replace(GPT, layers=layers), 4, 1.0, pipeline=name, documents=True)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("recompute", ["attention", "block"])
def test_recompute(world, recompute):
    """The same bits, with dropout."""
    for data, pipeline, tensor in BOTH[world.size][-2:]:
        shape = fitting(LLAMA, pipeline)
        kept, again = (
            train_on(Grid(data, pipeline, tensor), shape, 2, 1.0, recompute=how, documents=True)[1:]
            for how in ("none", recompute)
        )
        assert kept == again


@pytest.mark.ranks(1)
@pytest.mark.parametrize("shape", [UNEVEN, WINDOWED])
def test_each_document_as_if_alone(shape):
    """Loss and gradients are the sums of those of each document by itself."""
    grid = Grid()
    batch = batches(fitting(shape, 1), 1, documents=True)[0]
    together, apart = made(grid, fitting(shape, 1)), made(grid, fitting(shape, 1))
    (packed,) = microbatches(grid, batch, 0, 1, documents=True)
    together.loss(together(packed.ids, packed.tokens), packed.targets, 1.0).backward()
    for row in batch:
        parts = row[:-1].split(document_lengths(row[:-1].tolist()))
        following = row[1:].split([len(part) for part in parts])
        for ids, targets in zip(parts, following):
            counts = len(ids) - int(ids[-1] == END)
            logits = apart(ids, Tokens.of(grid, 1, len(ids)))[:counts]
            apart.loss(logits, targets[:counts], 1.0).backward()
    for (name, one), other in zip(together.named_parameters(), apart.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12, msg=name)


FIRST = 40  # tokens of the first document, of 103


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("shape", [UNEVEN, LLAMA])
def test_no_leak(world, case, shape):
    """To the bit: a token of the first document changes nothing of the second, neither its logits nor the gradients of
    its tokens' embeddings; and nothing before its own position."""
    shape = dataclasses.replace(fitting(shape, 1), context=103)
    before = torch.arange(103) * 7 % 20 + 2
    after = before.clone()
    after[17] += 1
    for data, pipeline, tensor in in_turn(BOTH, world.size, case):
        if pipeline > 1:
            continue  # gradients of the embeddings are of the first stage, logits of the last
        model = made(Grid(data, 1, tensor), shape).eval()
        for balance in ("zigzag", "work") if model.grid.ring.size > 1 else ("none",):
            alike = [both_ways(model, ids, [(FIRST, 103 - FIRST)], balance) for ids in (before, after)]
            changed = changed_positions(world, model.grid, alike)
            assert min(changed["logits"]) == 17
            assert max(changed["logits"]) < FIRST
            assert changed["gradients"] <= set(range(FIRST))
    packed = changed_positions(world, model.grid, [both_ways(model, ids, [], "zigzag") for ids in (before, after)])
    assert max(packed["logits"]) >= FIRST
    assert max(packed["gradients"]) >= FIRST


def both_ways(model, ids, documents, balance):
    """Of one sequence the positions in the inner and in the residual layout, the logits of the former and the gradients
    of the latter."""
    grid = model.grid
    tokens = Tokens.of(grid, 1, len(ids), documents=documents, balance=balance)
    here = tokens.positions()
    x = model.embed(ids[here].repeat(tokens.sequences), tokens).detach().requires_grad_()
    y = x
    for block in model.blocks.values():
        y = block(y, tokens)
    logits = model.head(model.ln_f(y, tokens), tokens)
    weights = torch.sin(torch.arange(logits.numel(), dtype=logits.dtype)).view(logits.shape)
    (logits * weights).sum().backward()
    rows = [position for span in tokens.residual_rows() for position in span]
    return here.repeat(len(tokens.inner)).tolist(), rows, logits.detach(), x.grad


def changed_positions(world, grid, runs):
    (inner, rows, logits, grads), (_, _, other_logits, other_grads) = runs
    found = {
        "logits": {at for at, one, other in zip(inner, logits, other_logits) if not torch.equal(one, other)},
        "gradients": {at for at, one, other in zip(rows, grads, other_grads) if not torch.equal(one, other)},
    }
    everyone = world.allgather(found)
    return {name: set().union(*(each[name] for each in everyone)) for name in found}


@pytest.mark.ranks(2, 4)
def test_cut_by_the_work_of_documents(world):
    """The ring ranks hold what makes the pairs of query and key even, in whatever z block the documents are."""
    grids = [Grid((1, 2, 1)), Grid(1, 1, (1, 1, 2))] if world.size == 2 else [Grid((1, 2, 1), 1, (1, 1, 2))]
    for grid in grids:
        documents = [(300, 100), (50,) * 8]
        tokens = Tokens.of(grid, 2, 400, documents=documents, balance="work")
        everyone = world.allgather((tokens.over_sequence, tokens.documents, list(tokens.inner)))
        assert all(spans == everyone[0][0] for spans, *_ in everyone)
        assert [documents[number] for _, _, inner in everyone for number in inner] == [
            lengths for _, found, _ in everyone for lengths in found
        ]
        work = [sum(pairs(position, documents) for span in spans for position in span) for spans in everyone[0][0]]
        assert max(work) < 1.03 * sum(work) / len(work)


def pairs(position, documents):
    """Keys that the queries at this position see in both sequences."""
    seen = 0
    for lengths in documents:
        start = max(start for n in range(len(lengths)) if (start := sum(lengths[:n])) <= position)
        seen += position - start + 1
    return seen


@pytest.mark.ranks(1)
def test_what_cannot_be_is_refused():
    grid = Grid()
    for what, given in {
        "documents must be lengths for each of 2 sequences": {"documents": [(LENGTH,)]},
        "documents must be lengths of at least 1 whose sum is 7": {"documents": [(LENGTH,), (3, 3)]},
        "token slices attend to all tokens before them, got documents": {
            "documents": [(LENGTH,)] * 2,
            "part": slice(0, 3),
        },
    }.items():
        with pytest.raises(ValueError, match=what):
            Tokens.of(grid, 2, LENGTH, **given)
