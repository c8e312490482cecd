"""What `hpctrain eval` does about data that one rank cannot read."""

import pytest
from training_checks import UNEVEN, train_on

from hpctrain import Grid
from hpctrain.train.evaluation import evaluate

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1)]


class Broken:
    tokens, vocabulary, end_of_document = 100, UNEVEN.vocabulary, 0

    def read(self, start, count):
        raise OSError("the disk is gone")


def test_data_that_cannot_be_read_end_the_job(world):
    """On this rank: the error is none that all ranks raise and one of them tells."""
    grid = Grid(data=1)
    model, *_ = train_on(grid, UNEVEN, count=1, clip=0.0, steps=1)
    with pytest.raises(RuntimeError, match="windows from token 0 on cannot be read: the disk is gone"):
        evaluate(model, grid, Broken(), UNEVEN.context, 2)
