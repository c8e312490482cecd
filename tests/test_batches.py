"""Batches: each sequence of the order on one replica and one z block, its targets one token on; validation apart."""

import numpy as np
import pytest

from hpctrain import Grid, RngKey
from hpctrain.data import SampleOrder, ShardedTokens, pack
from hpctrain.data.tokenizers import tokenizer_from_option
from hpctrain.grid_shape import all_grids
from hpctrain.pipeline import one_f_one_b
from hpctrain.train.batches import Samples

pytestmark = pytest.mark.mpi

CONTEXT, BATCH, MICROBATCHES = 6, 5, 2


@pytest.fixture
def tokens(world, tmp_path_factory):
    """600 bytes of which no 7 that follow each other come twice."""
    path = None
    if world.rank == 0:
        folder = tmp_path_factory.mktemp("batches")
        (folder / "text.txt").write_text("".join(f"{number:03d}" for number in range(200)))
        path = str(folder / "data.h5")
        pack([str(folder / "text.txt")], path, tokenizer_from_option("bytes"))
    return ShardedTokens(world.bcast(path), comm=world)


def sequences_of(batches):
    """(ids, targets, scale, first) of all sequences that this rank is given, of microbatches and of validation."""
    found = []
    for batch in batches:
        ids, targets = batch.ids.view(-1, CONTEXT), batch.targets.view(-1, CONTEXT)
        found += [(i.tolist(), t.tolist(), batch.scale) for i, t in zip(ids, targets)]
    return found


def test_targets_are_the_tokens_that_follow(world, tokens):
    """Of rows of the packed text, at multiples of the context."""
    whole = np.empty(tokens.tokens, np.int64)
    tokens.read(0, tokens.tokens, whole)
    whole = whole.tolist()
    for data, pipeline, box in all_grids(world.size):
        if pipeline > 1 or box[1] > 1:
            continue  # the first stage has the ids, the last the targets
        grid = Grid(data, pipeline, box)
        samples = Samples(tokens, CONTEXT, 0.25, RngKey(1))
        total = (tokens.tokens - 1) // CONTEXT
        starts = {tuple(whole[s * CONTEXT : s * CONTEXT + CONTEXT + 1]): s for s in range(total)}
        order = one_f_one_b(1, MICROBATCHES)
        training, validation = set(), set()
        for number in range(3):
            step = samples.training_step(grid, number, BATCH, order, "cpu", number)
            assert {batch.tokens.share for batch in step} == {1 / BATCH}  # of what is a mean over the step's sequences
            held = sequences_of(step)
            here = [starts[tuple(ids + targets[-1:])] for ids, targets, _ in held]
            assert all(ids[1:] == targets[:-1] for ids, targets, _ in held)
            assert {scale for *_, scale in held} <= {1 / (BATCH * CONTEXT)}
            # the ranks of x see the same sequences
            everywhere = grid.data.comm.allgather(grid.tensor.z.comm.allgather(here))
            given = [start for replica in everywhere for block in replica for start in block]
            assert sorted(given) == sorted(samples.training[number * BATCH : (number + 1) * BATCH].tolist())
            training |= set(given)
        for batch in samples.validation_batches(grid, BATCH, 100, order, "cpu"):
            assert not any(each.tokens.share for each in batch)
            held = sequences_of(batch)
            validation |= {starts[tuple(ids + targets[-1:])] for ids, targets, _ in held}
            assert {scale for *_, scale in held} <= {1 / (samples.held_out * CONTEXT)}
        validation = set().union(*world.allgather(validation))
        assert validation == set(range(total - round(total * 0.25), total))
        assert training.isdisjoint(validation)


CUT = {2: [(1, 2, 1), (1, 1, 2)], 4: [(2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)]}


@pytest.mark.ranks(*CUT)
def test_ranks_that_share_sequences(world, tokens, monkeypatch):
    """Each token of the batch is on one rank of one replica, with the one after it as its target, wherever that is; a
    rank reads its own, and one more a run."""
    whole = np.empty(tokens.tokens, np.int64)
    tokens.read(0, tokens.tokens, whole)
    reads, read = [], ShardedTokens.read
    monkeypatch.setattr(ShardedTokens, "read", lambda self, *given: (reads.append(given[1]), read(self, *given))[1])
    for data in CUT[world.size]:
        grid, samples = Grid(data), Samples(tokens, CONTEXT, 0.25, RngKey(1))
        order = samples.training[0:BATCH]
        mine, reads[:] = {}, []
        for batch in samples.training_step(grid, 0, BATCH, one_f_one_b(1, MICROBATCHES), "cpu", 0):
            assert batch.scale == 1 / (BATCH * CONTEXT)
            part = batch.tokens
            places = [(sequence, at) for sequence in part.inner for span in part.spans for at in span]
            mine |= dict(zip(places, zip(batch.ids.tolist(), batch.targets.tolist()), strict=True))
        runs = len(part.spans) * len({sequence for sequence, _ in mine})
        assert sum(reads) == len(mine) + runs
        everyone = world.allgather(mine)
        assert sum(map(len, everyone)) == BATCH * CONTEXT
        found = {place: pair for each in everyone for place, pair in each.items()}
        assert len(found) == BATCH * CONTEXT
        for (sequence, at), pair in found.items():
            start = int(order[sequence]) * CONTEXT + at
            assert pair == (whole[start], whole[start + 1])
        # the ranks of a replica have the same sequences
        sequences = grid.sequence.comm.allgather(sorted({sequence for sequence, _ in mine}))
        assert all(each == sequences[0] for each in sequences if each)


def test_each_batch_is_put_in_order_once(world, tokens, monkeypatch):
    """A step asks for its own, and for the next one, which it has the system read."""
    asked, at = [], SampleOrder.at
    monkeypatch.setattr(SampleOrder, "at", lambda self, positions: (asked.append(positions[0]), at(self, positions))[1])
    grid, samples = Grid(world.size), Samples(tokens, CONTEXT, 0.25, RngKey(1))
    for number in (0, 1, 2, 1):  # the last one again, as after a step that led back to a checkpoint
        samples.training_step(grid, number, BATCH, one_f_one_b(1, MICROBATCHES), "cpu", number)
    assert [int(first) for first in asked] == [0, BATCH, 2 * BATCH, 3 * BATCH, BATCH, 2 * BATCH]


def test_all_tokens_are_in_samples_but_those_that_make_no_whole_one(world, tokens):
    samples = Samples(tokens, CONTEXT, 0.25, RngKey(1))
    total = samples.training.samples + samples.held_out
    assert total * CONTEXT < tokens.tokens <= (total + 1) * CONTEXT
    with pytest.raises(ValueError, match="too few for a training and a validation sample of model.context = 600"):
        Samples(tokens, 600, 0.25, RngKey(1))
