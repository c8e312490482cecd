"""Cross entropy against torch's own, on every tensor grid of the ranks there are."""

import math

import pytest
import torch
import torch.nn.functional as F
from layer_checks import DOUBLE, Layout, tensor_grids, whole

from hpctrain import Grid
from hpctrain.layers import CrossEntropy
from hpctrain.shard import split

pytestmark = pytest.mark.mpi

SEQUENCES, LENGTH = 3, 4
ROWS = SEQUENCES * LENGTH


def shares(layout, layer, logits, targets, scale):
    """The loss from all ranks' shares, and this rank's block of the gradient."""
    block = layout.inner(logits.detach()).clone().requires_grad_()
    share = layer(block, targets[layout.block], scale)
    share.backward()
    return layout.grid.comm.allreduce(share.item()), block.grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 1])  # outside and inside the vocabulary
@pytest.mark.parametrize("vocabulary", [32, 13, 2])
def test_cross_entropy(world, vocabulary, ignore_index, smoothing):
    targets = torch.arange(ROWS) * 5 % vocabulary
    targets[3:7] = ignore_index
    logits = whole((ROWS, vocabulary), "logits", False).mul(50).requires_grad_()  # far apart
    arguments = {"label_smoothing": smoothing, "ignore_index": ignore_index}
    expected = F.cross_entropy(logits, targets, reduction="sum", **arguments) * 0.07
    expected.backward()
    for grid in tensor_grids(world):
        layout = Layout(grid, SEQUENCES, LENGTH)
        loss, gradient = shares(layout, CrossEntropy(grid, vocabulary, **arguments), logits, targets, 0.07)
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(gradient, layout.inner(logits.grad), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocabulary", [13, 2])
def test_z_loss(world, vocabulary, smoothing):
    """The square of the normaliser's logarithm is added for each row that counts; not in evaluation."""
    targets = torch.arange(ROWS) * 5 % vocabulary
    targets[3:7] = -100
    logits = whole((ROWS, vocabulary), "logits", False).mul(5).requires_grad_()
    plain = F.cross_entropy(logits, targets, reduction="sum") * 0.07
    added = 0.3 * logits.logsumexp(1)[targets >= 0].square().sum() * 0.07
    expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing) * 0.07 + added
    expected.backward()
    for grid in tensor_grids(world):
        layout = Layout(grid, SEQUENCES, LENGTH)
        layer = CrossEntropy(grid, vocabulary, smoothing, z_loss=0.3)
        loss, gradient = shares(layout, layer, logits, targets, 0.07)
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(gradient, layout.inner(logits.grad), rtol=1e-12, atol=1e-14)
        assert shares(layout, layer.eval(), logits, targets, 0.07)[0] == pytest.approx(plain.item(), rel=1e-12)


def test_all_rows_ignored(world):
    """No loss and no gradient, where torch's mean would be NaN."""
    for grid in tensor_grids(world):
        layout = Layout(grid, SEQUENCES, LENGTH)
        layer = CrossEntropy(grid, 13, label_smoothing=0.2)
        loss, gradient = shares(layout, layer, whole((ROWS, 13), "logits"), torch.full((ROWS,), -100), 1.0)
        assert loss == 0
        assert not gradient.any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore_index", [-100, 1])
@pytest.mark.parametrize("anything", [math.nan, math.inf, -math.inf])
def test_ignored_rows_may_hold_anything(world, anything, ignore_index, smoothing):
    """As where the logits of padding overflow."""
    targets = torch.arange(ROWS) * 5 % 13
    targets[3:7] = ignore_index
    ignored = targets == ignore_index
    logits = whole((ROWS, 13), "logits", False)
    arguments = {"label_smoothing": smoothing, "ignore_index": ignore_index}
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, targets, reduction="sum", **arguments)
    expected.backward()
    assert not leaf.grad[ignored].any()
    logits[ignored] = anything
    for grid in tensor_grids(world):
        layout = Layout(grid, SEQUENCES, LENGTH)
        loss, gradient = shares(layout, CrossEntropy(grid, 13, **arguments), logits, targets, 1.0)
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(gradient, layout.inner(leaf.grad), rtol=1e-12, atol=1e-14)


def test_words_that_are_masked_out(world):
    """With logits of -inf, all that a rank holds: no weight, no gradient."""
    logits, targets = whole((ROWS, 8), "logits", False), torch.arange(ROWS) % 2 + 4
    logits[:, :4] = -math.inf
    logits[::3, 6:] = -math.inf
    logits.requires_grad_()
    expected = F.cross_entropy(logits, targets, reduction="sum")
    expected.backward()
    for grid in tensor_grids(world):
        layout = Layout(grid, SEQUENCES, LENGTH)
        loss, gradient = shares(layout, CrossEntropy(grid, 8), logits, targets, 1.0)
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(gradient, layout.inner(logits.grad), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("wrong", [13, -1, 10**9])
def test_a_target_outside_the_vocabulary_is_not_trained_on_in_silence(world, wrong):
    targets = torch.arange(ROWS) % 13
    targets[-1] = wrong
    for grid in tensor_grids(world):
        layout = Layout(grid, SEQUENCES, LENGTH)
        loss, gradient = shares(layout, CrossEntropy(grid, 13), whole((ROWS, 13), "logits"), targets, 1.0)
        assert math.isnan(loss)
        nan = torch.zeros(ROWS, 13)
        nan[-1] = math.nan
        assert torch.equal(gradient.isnan(), layout.inner(nan).isnan())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_exchange_of_two_numbers_a_row(world, smoothing):
    for grid in tensor_grids(world):
        layout = Layout(grid, SEQUENCES, LENGTH)
        logits, targets = whole((ROWS, 13), "logits"), torch.arange(ROWS)
        grid.transport.traffic.clear()
        shares(layout, CrossEntropy(grid, 13, label_smoothing=smoothing), logits, targets, 1.0)
        x, y, rows = grid.tensor.x.size, grid.tensor.y.size, layout.tokens.sequences * LENGTH
        table = grid.transport.traffic.table().values()
        assert [cell["calls"] for cell in table] == [1] * (x * y > 1)
        assert sum(cell["received"] for cell in table) == (x * y - 1) * 2 * rows * 8


@pytest.mark.ranks(1, 2)
def test_cross_entropy_refuses_a_second_backward(world):
    """The first one uses up what forward kept; a second must not silently give something else."""
    grid = Grid(tensor=world.size)
    words = split(8, world.size, world.rank)
    logits = torch.zeros(4, words.stop - words.start, requires_grad=True, **DOUBLE)
    share = CrossEntropy(grid, 8)(logits, torch.zeros(4, dtype=torch.int64), 1.0)
    share.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward a second time"):
        share.backward()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("smoothing", [-0.1, 1.5])
def test_label_smoothing_is_from_0_to_1(world, smoothing):
    with pytest.raises(ValueError, match=f"label_smoothing must be from 0 to 1, got {smoothing}"):
        CrossEntropy(Grid(tensor=world.size), 8, label_smoothing=smoothing)
