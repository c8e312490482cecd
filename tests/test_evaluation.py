"""`hpctrain eval`: replicas that have other numbers of windows, and data that one rank cannot read."""

import dataclasses

import numpy as np
import pytest
from test_mixtral import MIXTRAL
from training_checks import UNEVEN, made, train_on

from hpctrain import Grid
from hpctrain.train.evaluation import evaluate

pytestmark = pytest.mark.mpi


class Corpus:
    end_of_document = 0

    def __init__(self, tokens, vocabulary):
        self.tokens, self.vocabulary, self.tokenizer = tokens, vocabulary, self

    def read(self, start, count):
        return np.arange(start, start + count) * 7 % self.vocabulary

    def decode(self, ids):
        return "a" * len(ids)


class Broken(Corpus):
    def read(self, start, count):
        raise OSError("the disk is gone")


@pytest.mark.ranks(1)
def test_data_that_cannot_be_read_end_the_job(world):
    """On this rank: the error is none that all ranks raise and one of them tells."""
    grid = Grid(data=1)
    model, *_ = train_on(grid, UNEVEN, count=1, clip=0.0, steps=1)
    with pytest.raises(RuntimeError, match="windows from token 0 on cannot be read: the disk is gone"):
        evaluate(model, grid, Broken(100, UNEVEN.vocabulary), UNEVEN.context, 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("windows", [1, 2, 3])
def test_experts_that_replicas_share(world, windows):
    """A replica without windows takes part in the exchanges of the others."""
    from mpi4py import MPI

    shape = dataclasses.replace(MIXTRAL, layers=2)
    corpus = Corpus(windows * shape.context - 3, shape.vocabulary)
    found = []
    for grid in (Grid(comm=MPI.COMM_SELF), Grid(data=2, expert=2)):
        (loss,) = evaluate(made(grid, shape), grid, corpus, shape.context, 1)
        found.append((loss.total, loss.tokens, loss.bytes))
    assert found[1] == pytest.approx(found[0], rel=1e-12)
