"""Linear, Embedding, Dropout and what all layers share, on every tensor grid of the ranks there are."""

import contextlib
import math
import time

import pytest
import torch
import torch.nn.functional as F
from layer_checks import DOUBLE, KEY, Layout, check, gradients_over, randomise, tensor_grids, weights_of, whole

from hpctrain import Grid
from hpctrain.comm import Watchdog
from hpctrain.data_parallel import DataParallel
from hpctrain.layers import Attention, Dropout, Embedding, Linear, Mixture, SplitBackward, Tokens, algorithm_of
from hpctrain.layers.box import BoxProduct
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.shard import split

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4, 6, 8)]


@pytest.mark.parametrize("way", ["shared memory", "messages"])
@pytest.mark.parametrize(("sequences", "length"), [(4, 6), (3, 5), (1, 1)])
@pytest.mark.parametrize(("n_in", "n_out", "unit"), [(8, 16, 1), (7, 5, 1), (3, 1, 1), (12, 6, 3)])
def test_linear(world, n_in, n_out, unit, sequences, length, way):
    for grid in tensor_grids(world, way):
        layout = Layout(grid, sequences, length, unit)
        x = whole((sequences * length, n_in), "x")

        def serial(w, x):
            return F.linear(x, w["weight"], w["bias"])

        up = Linear(grid, n_in, n_out, to="inner", out_unit=unit if n_out % unit == 0 else 1, key=KEY, **DOUBLE)
        with torch.no_grad():
            up.bias.copy_(whole((n_out,), "bias", False)[up.bias.shard.slices])
        if n_out % unit == 0:
            check(layout, up, serial, x, layout.residual, layout.inner)

        x = whole((sequences * length, n_in), "x")
        down = Linear(grid, n_in, n_out, to="residual", in_unit=unit, key=KEY, **DOUBLE)
        with torch.no_grad():
            down.bias.copy_(whole((n_out,), "bias", False)[down.bias.shard.slices])
        check(layout, down, serial, x, layout.inner, layout.residual)


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize("overlap", [(), ("input_gradient",)])
@pytest.mark.parametrize("to", ["inner", "residual"])
def test_linear_where_a_node_holds_some_of_the_ranks_along_an_axis(world, to, overlap):
    """Ranks along one axis share memory, while their neighbours along another do for some of them and not for others:
    all lay out their summands alike."""
    for grid in tensor_grids(world, "last rank elsewhere"):
        layout, x = Layout(grid, 4, 6), whole((24, 8), "x")
        layer = Linear(grid, 8, 12, to=to, algorithm=algorithm_of(grid, "agarwal", overlap), key=KEY, **DOUBLE)
        ends = (layout.residual, layout.inner) if to == "inner" else (layout.inner, layout.residual)
        check(layout, randomise(layer), lambda w, x: F.linear(x, w["weight"], w["bias"]), x, *ends)


@pytest.mark.ranks(4, 8)
def test_the_input_is_not_gathered_into_memory_that_the_next_sum_gives_back(world, monkeypatch):
    """z across nodes, b's axis in shared memory: a rank that is late for its weight gradient, while the others are in
    the next backward, still finds its input."""
    backwards = 3
    for grid in tensor_grids(world):
        if grid.tensor.x.size == 1 or grid.tensor.z.size == 1:
            continue
        monkeypatch.setattr(grid.tensor.z, "one_node", False)
        layout = Layout(grid, 4, 6)
        algorithm = algorithm_of(grid, "agarwal", overlap=["input_gradient"])
        layer = Linear(grid, 8, 12, to="inner", bias=False, algorithm=algorithm, key=KEY, **DOUBLE)
        weight_gradient = BoxProduct.weight_gradient

        def late(*args, rank=grid.rank, weight_gradient=weight_gradient):
            time.sleep(0.2 * (rank % 2))
            return weight_gradient(*args)

        with monkeypatch.context() as patch:
            patch.setattr(BoxProduct, "weight_gradient", late)
            inputs = [whole((24, 8), f"x{n}", False) for n in range(backwards)]
            ys = [layer(layout.residual(x).requires_grad_(), layout.tokens) for x in inputs]
            seed = whole((24, 12), "seed", False)
            for y in ys:
                y.backward(layout.inner(seed))
        expected = seed.T @ sum(inputs)
        torch.testing.assert_close(layer.weight.grad, expected[layer.weight.shard.slices], rtol=1e-12, atol=1e-12)


def with_late_sums(grid):
    """A layer whose sums of weight gradients over z are put off under a strategy, its layout, an input and a seed."""
    algorithm = algorithm_of(grid, "agarwal", overlap=["weight_gradient"])
    layer = Linear(grid, 8, 6, to="inner", algorithm=algorithm, key=KEY, **DOUBLE)
    x, seed = whole((12, 8), "x", False), whole((12, 6), "seed", False)
    return Layout(grid, 4, 3), layer, DataParallel(layer.parameters(), grid), x, seed


def test_a_step_that_was_given_up_leaves_no_gradient(world):
    """Weight gradients whose sum over z was put off in a step that never ended are not part of the next one."""
    for grid in tensor_grids(world):
        layout, layer, replicas, x, seed = with_late_sums(grid)
        for given_up in (True, False):
            replicas.zero_grad()
            if not given_up:
                replicas.enable_grad_sync()
            y = layer(layout.residual(x), layout.tokens)
            y.backward(layout.inner(seed))
            if given_up:
                continue
            replicas.finish_grad_sync()
        expected = (seed.T @ x)[layer.weight.shard.slices]
        torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(1, 2, 4)
def test_gradients_that_the_caller_is_given(world):
    """What torch.autograd.grad computes is no part of the gradient of a later backward, which does not overwrite it."""
    for grid in tensor_grids(world):
        layout, layer, replicas, x, seed = with_late_sums(grid)
        mine = layout.residual(x).clone().requires_grad_()
        replicas.zero_grad()
        y = layer(mine, layout.tokens)
        torch.autograd.grad(y, mine, layout.inner(seed), retain_graph=True)
        (given,) = torch.autograd.grad(y, layer.weight, layout.inner(seed), retain_graph=True)
        replicas.enable_grad_sync()
        y.backward(2 * layout.inner(seed))
        replicas.finish_grad_sync()
        expected = (seed.T @ x)[layer.weight.shard.slices]
        torch.testing.assert_close(layer.weight.grad, 2 * expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(1, 2)
def test_a_later_backward_writes_over_no_gradient_of_the_caller(world):
    """Those of tables and of experts lie in their buckets, too."""
    for grid in tensor_grids(world):
        layout = Layout(grid, 4, 3)
        table = Embedding(grid, 7, 8, key=KEY, **DOUBLE), torch.arange(12)[layout.block] % 7
        mixture = Mixture(grid, 8, 6, 4, 2, key=KEY, **DOUBLE), layout.residual(whole((12, 8), "x", False))
        for layer, x in (table, mixture):
            weights = list(layer.parameters())
            replicas = DataParallel(weights, grid)
            replicas.zero_grad()
            y = layer(x, layout.tokens).sum()
            given = torch.autograd.grad(y, weights, retain_graph=True)
            kept = [gradient.clone() for gradient in given]
            (2 * y).backward()
            assert all(map(torch.equal, given, kept))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["agarwal", "summa"])
def test_hooks_see_gradients_that_would_be_put_off(world, name, split):
    """Until the sum over z of the last backward, or by SplitBackward."""
    for grid in tensor_grids(world):
        if name == "summa" and grid.tensor.z.size > 1:
            continue
        tokens = Tokens.of(grid, 4, 3, algorithm=name)
        algorithm = algorithm_of(grid, name, overlap=["weight_gradient"])
        hooked, plain = (Linear(grid, 8, 6, to="inner", algorithm=algorithm, key=KEY, **DOUBLE) for _ in range(2))
        hooked.weight.register_hook(lambda gradient: 3 * gradient)
        x = torch.ones(tokens.local_rows, hooked.weight.shape[1], **DOUBLE)
        for layer in (hooked, plain):
            replicas = DataParallel(layer.parameters(), grid)
            replicas.zero_grad()
            for last in (False, True):
                if last:
                    replicas.enable_grad_sync()
                with SplitBackward(hooked) if split else contextlib.nullcontext():
                    layer(x, tokens).sum().backward()
            replicas.finish_grad_sync()
        torch.testing.assert_close(hooked.weight.grad, 3 * plain.weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", ["agarwal", "summa", "two_half_d"])
def test_outputs_may_be_changed_in_place(world, name):
    """On every grid: torch refuses it of views that an autograd function made."""
    for grid in tensor_grids(world):
        try:
            algorithm = algorithm_of(grid, name)
        except ValueError:  # not on this one
            continue
        tokens, columns = Tokens.of(grid, 4, 3, algorithm=name), split(8, grid.tensor.y.size, grid.tensor.y.rank)
        ids = torch.arange(tokens.sequences * tokens.length) % 7
        options = {"algorithm": algorithm, "key": KEY, **DOUBLE}
        layers = [
            Embedding(grid, 7, 8, **DOUBLE), Linear(grid, 8, 12, to="inner", **options),
            Linear(grid, 12, 8, to="residual", **options), Attention(grid, 8, 4, **options),
        ]  # fmt: skip
        for number, layer in enumerate(layers):
            x = torch.ones(tokens.local_rows, columns.stop - columns.start, **DOUBLE)
            x = [ids, x, layers[1](x, tokens).detach(), x][number]
            found = []
            for change in (lambda y: y.mul_(3).relu_(), lambda y: (y * 3).relu()):
                change(layer(x, tokens)).square().sum().backward()
                found.append([p.grad.clone() for p in layer.parameters()])
                layer.zero_grad()
            for ours, theirs in zip(*found):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vocabulary", [32, 13, 2])
def test_embedding(world, vocabulary):
    for grid in tensor_grids(world):
        sequences, length, width = 3, 4, 5
        layout = Layout(grid, sequences, length)
        layer = Embedding(grid, vocabulary, width, key=KEY, **DOUBLE)
        ids = torch.arange(sequences * length) * 7 % vocabulary
        weights = weights_of(grid, layer)
        expected = F.embedding(ids, weights["weight"])
        seed = whole(expected.shape, "seed", False)
        expected.backward(seed)
        y = layer(ids[layout.block], layout.tokens)
        assert torch.equal(y, layout.residual(expected).detach())
        y.backward(layout.residual(seed))
        for _, gradient in gradients_over(grid, layer).items():
            if grid.rank == 0:
                torch.testing.assert_close(gradient, weights["weight"].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2, 3, 4)
def test_ids_outside_of_the_table(world):
    """Their rows are NaN, as zeros would train on unnoticed; other rows and their gradients are as ever."""
    for grid in tensor_grids(world):
        layout = Layout(grid, 3, 4)
        layer = Embedding(grid, 7, 5, key=KEY, **DOUBLE)
        ids = torch.tensor([0, 7, 6, -1, 3, 3, 100, 2, 1, -8, 5, 4])
        outside = (ids < 0) | (ids > 6)
        if grid.tensor.x.size == 1:
            with pytest.raises(IndexError):
                layer.lookup(ids)
            continue
        weights = weights_of(grid, layer)
        expected = F.embedding(ids.where(~outside, 0), weights["weight"])
        y = layer(ids[layout.block], layout.tokens)
        found = layout.residual(expected.detach().masked_fill(outside[:, None], math.nan))
        torch.testing.assert_close(y.detach(), found, rtol=0, atol=0, equal_nan=True)
        seed = whole(expected.shape, "seed", False)
        expected.backward(seed.masked_fill(outside[:, None], 0.0))
        y.backward(layout.residual(seed))
        for _, gradient in gradients_over(grid, layer).items():
            if grid.rank == 0:
                torch.testing.assert_close(gradient, weights["weight"].grad, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_frequent_word_is_summed_in_float32(world):
    """In bfloat16, 256 + 1 is 256."""
    for grid in tensor_grids(world):
        layout = Layout(grid, 4, 250)
        layer = Embedding(grid, 7, 5, key=KEY, dtype=torch.bfloat16)
        y = layer(torch.full((1000,), 3)[layout.block], layout.tokens)
        y.backward(torch.ones_like(y))
        rows, columns = layer.weight.shard.slices
        expected = torch.zeros(7, 5).index_fill_(0, torch.tensor(3), 1000.0)[rows, columns]
        assert torch.equal(layer.weight.grad.float(), expected)


def test_dropout_masks_do_not_depend_on_the_grid(world):
    alone = Dropout(Grid(comm=world.__class__(world.Split(world.rank))), 0.4, 6, key=KEY)
    ones = torch.ones(20, 6)
    expected = alone(ones, Tokens.of(Grid(comm=world.Split(world.rank)), 4, 5, first=2, step=9))
    kept = expected[expected > 0]
    assert 0.3 < len(kept) / 120 < 0.9
    assert torch.allclose(kept, torch.tensor(1 / (1 - round(0.4 * 65536) / 65536)))
    for grid in tensor_grids(world):
        layout = Layout(grid, 4, 5)
        layer = Dropout(grid, 0.4, 6, key=KEY)
        tokens = Tokens.of(grid, 4, 5, first=2, step=9)
        assert torch.equal(layer(layout.residual(ones), tokens), layout.residual(expected))
        other = layer(layout.residual(ones), Tokens.of(grid, 4, 5, first=2, step=10))
        assert world.allreduce(int(not torch.equal(other, layout.residual(expected)))) > 0
        layer.eval()
        assert layer(ones, tokens) is ones


def test_dropout_masks_beside_another_default_device(world):
    """Of sequences in slices, whose masks are several, or none."""
    grid = Grid(tensor=(1, 1, world.size))
    layer = Dropout(grid, 0.4, 6, key=KEY)
    for sequences in (4, 1):
        tokens = Tokens.of(grid, sequences, 5, part=slice(1, 3))
        x = torch.ones(tokens.local_rows, 6)
        expected = layer(x, tokens)
        with torch.device("meta"):
            assert torch.equal(layer(x, tokens), expected)


def test_every_element_of_a_weight_lives_on_one_rank(world):
    """No rank holds a whole weight, and together they hold each element once."""
    for grid in tensor_grids(world):
        layer = Attention(grid, 16, 4, key=KEY)
        for name in ("qkv.weight", "proj.weight"):
            weight = layer.get_parameter(name)
            assert weight.shape == weight.shard.shape
            held = world.allgather(weight.shard.slices)
            count = torch.zeros(weight.shard.global_shape)
            for slices in held:
                count[slices] += 1
            assert torch.equal(count, torch.ones_like(count))
            if world.size > 1:
                assert weight.numel() < math.prod(weight.shard.global_shape)


@pytest.mark.ranks(1, 2, 4)
def test_a_frozen_weight(world):
    """Its gradient is not computed; that of the input is the same."""
    for grid in tensor_grids(world):
        layout = Layout(grid, 4, 3)
        layer = Linear(grid, 8, 6, to="inner", key=KEY, **DOUBLE)
        found = []
        for frozen in (False, True):
            layer.weight.requires_grad_(not frozen)
            x = layout.residual(whole((12, 8), "x", False)).requires_grad_()
            layer.zero_grad()
            layer(x, layout.tokens).square().sum().backward()
            found.append(x.grad)
        torch.testing.assert_close(*found, rtol=0, atol=0)
        assert layer.weight.grad is None


@pytest.mark.ranks(2)
def test_descriptions_of_weights_are_watched(world):
    """A rank that gathers whole weights alone is stuck in a collective on objects."""
    grid = Grid(data=2)
    watchdog = Watchdog(grid, 600.0)
    list(whole_parameters(Linear(grid, 8, 6, to="inner", key=KEY), grid))
    assert ("world", "all_gather_object") in {(axis, name) for _, axis, name, _ in watchdog._done}


@pytest.mark.ranks(1, 2, 3)
def test_standalone_layers_follow_torch_s_seed(world):
    """Without a key, torch.manual_seed on the first rank decides, as for torch's own layers."""
    grid = Grid(tensor=world.size)
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed + 1000 * world.rank)
        made.append(weights_of(grid, Linear(grid, 6, 8, to="inner"))["weight"])
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    torch.manual_seed(1)
    first, second = (weights_of(grid, Linear(grid, 6, 8, to="inner"))["weight"] for _ in range(2))
    assert not torch.equal(first, second)
