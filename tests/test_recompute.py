"""Activations that are computed once more: the same bits, in less memory."""

import dataclasses

import pytest
import torch
from training_checks import UNEVEN, batches, by_messages, fitting, microbatches

from hpctrain import Grid, RngKey
from hpctrain.choices import DEFAULT_OVERLAP, OVERLAPS
from hpctrain.config import DataParallelConfig
from hpctrain.data_parallel import make
from hpctrain.layers import algorithm_of
from hpctrain.models.gpt2 import GPT2
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi

GRIDS = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, (2, 1, 1)), (1, 1, (1, 1, 2))],
    4: [(2, 2, 1), (2, 1, (1, 2, 1)), (1, 1, (2, 1, 2))],
    8: [(2, 2, (1, 1, 2))],
}


def trained(grid, shape, recompute, method="ddp"):
    made = algorithm_of(grid, "agarwal", DEFAULT_OVERLAP if method == "zero3" else OVERLAPS)
    model = GPT2(grid, shape, algorithm=made, recompute=recompute, key=RngKey(3), dtype=torch.float64)
    optimizer = make_optimizer(model.parameters(), 0.1)
    trainer = Trainer(
        model, grid, optimizer, 2, max_norm=1.0, strategy=make(DataParallelConfig(method), model, grid, optimizer)
    )
    return [trainer.step(microbatches(grid, batch, step, 2)) for step, batch in enumerate(batches(shape))]


@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_same_bits(world, dropout):
    """Losses and norms of two steps, of which the second depends on the gradients of the first."""
    for place in GRIDS[world.size]:
        grid = Grid(*place)
        shape = dataclasses.replace(fitting(UNEVEN, place[1]), dropout=dropout)
        kept = trained(grid, shape, "none")
        assert trained(grid, shape, "attention") == kept
        assert trained(grid, shape, "block") == kept


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("way", ["windows", "messages"])
def test_same_bits_where_weights_are_freed(world, way):
    """ZeRO-3: forward runs while backward does."""
    grid = Grid(data=world.size)
    if way == "messages":
        by_messages(grid)
    assert trained(grid, UNEVEN, "block", "zero3") == trained(grid, UNEVEN, "none", "zero3")


def test_less_is_kept(world):
    """Bytes that autograd keeps of a forward of nine blocks."""
    grid = Grid(comm=type(world).Split(world, world.rank))
    kept = {}
    for recompute in ("none", "attention", "block"):
        shape = dataclasses.replace(UNEVEN, dropout=0.1)
        model = GPT2(grid, shape, recompute=recompute, key=RngKey(3))
        batch = microbatches(grid, batches(shape)[0], 0, 1)[0]
        storages = {}

        def note(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = model(batch.ids, batch.tokens)
        kept[recompute] = sum(storages.values())
        del y
    assert kept["block"] < kept["attention"] < kept["none"]
    assert kept["block"] < kept["none"] / 4
