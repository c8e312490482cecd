"""Auxiliary losses, biases and jitter of routers: grid-free, once a token, whatever is accumulated or recomputed."""

import dataclasses
import functools
import math

import pytest
import torch
from experts_checks import (
    EXPERTS,
    TOP_K,
    Serial,
    block_of,
    close,
    compare_gradients,
    grids,
    mixture,
    one_rank,
    spread,
    tokens_on,
)
from layer_checks import KEY, whole
from torch.utils.checkpoint import checkpoint

from hpctrain.data_parallel import MixedDataParallel, Precision
from hpctrain.layers import LoadBalance, Tokens
from hpctrain.layers.experts.auxiliary import add_loss
from hpctrain.layers.recompute import recomputed
from hpctrain.shard import split
from hpctrain.train.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4)]

SEQUENCES, LENGTH = 4, 5
LOSSES = {"aux_loss": 0.3, "z_loss": 0.07}


def microbatches(grid, count):
    """This rank's tokens of a step in so many parts, with the share that each sequence has in the step."""
    part = split(SEQUENCES, grid.replica.size, grid.replica.rank)
    edges = [part.start + (part.stop - part.start) * m // count for m in range(count + 1)]
    made = (Tokens.of(grid, stop - start, LENGTH, start) for start, stop in zip(edges, edges[1:]))
    return [dataclasses.replace(tokens, share=1 / SEQUENCES) for tokens in made]


def train(grid, layer, x, parts=1, recompute=False):
    """Gradients of the sum of outputs times a seed, and of the auxiliary losses; returns the blocks of x."""
    seed, blocks = whole(x.shape, "seed", False), []
    for tokens in microbatches(grid, parts):
        blocks.append(block_of(grid, tokens, x).clone().requires_grad_())
        y = recomputed(layer, blocks[-1], tokens) if recompute else layer(blocks[-1], tokens)
        (y * block_of(grid, tokens, seed)).sum().backward()
    return torch.cat([block.grad for block in blocks])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_auxiliary_losses(world, parts, recompute, scores):
    options = {**LOSSES, "scores": scores, "capacity": 1.0}
    x = whole((SEQUENCES * LENGTH, 7), "x", False)
    serial = Serial(mixture(one_rank(), **options))
    theirs = x.clone().requires_grad_()
    y = serial(theirs, SEQUENCES)
    losses = serial.auxiliary(SEQUENCES)
    ((y * whole(x.shape, "seed", False)).sum() + sum(losses)).backward()
    aux_loss, z_loss = (loss.item() for loss in losses)
    for grid in grids(world.size):
        layer = mixture(grid, **options)
        words = f"{grid.describe().splitlines()[0]}, expert {grid.expert.size}"
        grad = train(grid, layer, x, parts, recompute)
        expected = [block_of(grid, tokens, theirs.grad) for tokens in microbatches(grid, parts)]
        close(grad, torch.cat(expected), words)
        compare_gradients(grid, layer, serial, words)
        balance = LoadBalance(layer, grid)
        (load,) = balance.finish_step().values()
        assert balance.layers == ["router"]
        assert list(load.counts) == serial.counts
        assert load.dropped == len(serial.dropped) > 0
        assert math.isclose(load.aux_loss, aux_loss, rel_tol=1e-12)
        assert math.isclose(load.z_loss, z_loss, rel_tol=1e-12)
        (again,) = balance.finish_step().values()
        assert again.counts == (0,) * EXPERTS
        assert again.aux_loss == again.dropped == 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_auxiliary_losses_of_a_step(world, recompute, scores):
    """Of all tokens together, in two microbatches whose forwards come first."""
    options = {**LOSSES, "scores": scores, "aux_scope": "step"}
    x = whole((SEQUENCES * LENGTH, 7), "x", False)
    serial = Serial(mixture(one_rank(), **options))
    theirs = x.clone().requires_grad_()
    y = serial(theirs, SEQUENCES)
    losses = serial.auxiliary(1)
    assert not math.isclose(losses[0].item(), serial.auxiliary(SEQUENCES)[0].item(), rel_tol=1e-3)
    (y.sum() + sum(losses)).backward()
    for grid in grids(world.size):
        layer, words = mixture(grid, **options), f"{grid.describe().splitlines()[0]}, expert {grid.expert.size}"
        parts = microbatches(grid, 2)
        blocks = [block_of(grid, tokens, x).clone().requires_grad_() for tokens in parts]
        run = functools.partial(recomputed, layer) if recompute else layer
        for y in [run(*each) for each in zip(blocks, parts)]:
            y.sum().backward()
        for block, tokens in zip(blocks, parts):
            close(block.grad, block_of(grid, tokens, theirs.grad), words)
        compare_gradients(grid, layer, serial, words)
        with pytest.raises(ValueError, match="wants all forwards of a step before its first backward"):
            layer(blocks[0], parts[0])
        (load,) = LoadBalance(layer, grid).finish_step().values()
        assert math.isclose(load.aux_loss, losses[0].item(), rel_tol=1e-12)
        assert math.isclose(load.z_loss, losses[1].item(), rel_tol=1e-12)
        assert list(load.counts) == serial.counts
        layer(blocks[0], parts[0])  # the next step


@pytest.mark.ranks(1)
def test_auxiliary_loss_of_transformers(world):
    """Theirs is of all tokens too, and counts a token for each of its experts: top_k times ours."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    layer, x = mixture(one_rank(), aux_loss=0.3, aux_scope="step"), whole((SEQUENCES * LENGTH, 7), "x", False)
    theirs = 0.3 * load_balancing_loss_func((x @ layer.router.weight.T,), EXPERTS, TOP_K) / TOP_K
    train(one_rank(), layer, x)
    (load,) = LoadBalance(layer, one_rank()).finish_step().values()
    assert math.isclose(load.aux_loss, theirs.item(), rel_tol=1e-6)  # theirs counts in float32


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("scope", ["sequence", "step"])
def test_sequences_without_tokens(world, scope):
    for grid in grids(world.size)[:2]:
        layer, tokens = mixture(grid, **LOSSES, aux_scope=scope), Tokens.of(grid, SEQUENCES, 0)
        layer(block_of(grid, tokens, torch.zeros(0, 7, dtype=torch.float64)), tokens).sum().backward()
        assert layer.router.record.losses.tolist() == [0.0, 0.0]


def test_no_auxiliary_loss_in_evaluation(world):
    x = whole((SEQUENCES * LENGTH, 7), "x", False)
    for grid in grids(world.size)[:2]:
        with_losses, without = mixture(grid, **LOSSES).eval(), mixture(grid)
        assert torch.equal(train(grid, with_losses, x), train(grid, without, x))
        assert with_losses.router.record.losses.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_biases_follow_the_load(world, scores):
    """After a step, by the sign of mean - count; experts are chosen by them and weighed without."""
    rate, x = 0.125, whole((SEQUENCES * LENGTH, 7), "x", False)
    serial = Serial(mixture(one_rank(), scores=scores, balance_bias=rate))
    expected = []
    for _ in range(4):
        serial(x, SEQUENCES)
        counts = serial.counts
        mean = SEQUENCES * LENGTH * TOP_K / EXPERTS
        for e, count in enumerate(counts):
            serial.weights["router.bias"][e] += rate * ((mean > count) - (mean < count))
        expected.append((tuple(counts), serial.weights["router.bias"].clone()))
    assert len({counts for counts, _ in expected}) > 1  # biases change what is chosen
    for grid in spread(world.size):
        layer = mixture(grid, scores=scores, balance_bias=rate)
        balance = LoadBalance(layer, grid)
        for counts, bias in expected:
            train(grid, layer, x, parts=2, recompute=True)
            assert balance.finish_step()["router"].counts == counts
            assert torch.equal(layer.router.bias, bias)
            assert layer.router.bias.grad is None
        train(grid, layer, x)
        balance.finish_step(update=False)
        assert torch.equal(layer.router.bias, expected[-1][1])


def test_a_bias_is_no_weight(world):
    """Nor where all parameters are unfrozen."""
    for grid in spread(world.size):
        layer, tokens = mixture(grid, scores="sigmoid", balance_bias=0.1), tokens_on(grid, SEQUENCES, LENGTH)
        layer.requires_grad_(True)
        layer(block_of(grid, tokens, whole((SEQUENCES * LENGTH, 7), "x", False)), tokens).square().sum().backward()
        assert layer.router.bias.grad is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_torch_computes_once_more_counts_once(world, use_reentrant):
    for grid in grids(world.size)[:2] + spread(world.size)[:1]:
        records = []
        for again in (False, True):
            layer, tokens = mixture(grid, **LOSSES, capacity=0.5), tokens_on(grid, SEQUENCES, LENGTH)
            x = block_of(grid, tokens, whole((SEQUENCES * LENGTH, 7), "x", False)).clone().requires_grad_()
            y = checkpoint(layer, x, tokens, use_reentrant=use_reentrant) if again else layer(x, tokens)
            y.square().sum().backward()
            records.append((layer.router.record.counts.tolist(), layer.router.record.losses.tolist()))
        assert records[0] == records[1]


def test_recompute_keeps_the_routing(world):
    """Weights that change in between, as of no optimizer, show that experts are not chosen again."""
    x = whole((SEQUENCES * LENGTH, 7), "x", False)
    for grid in spread(world.size):
        layer = mixture(grid, scores="sigmoid", balance_bias=0.1)
        tokens = tokens_on(grid, SEQUENCES, LENGTH)
        grads = []
        for changes in (False, True):
            block = block_of(grid, tokens, x).clone().requires_grad_()
            y = recomputed(layer, block, tokens)
            if changes:
                layer.router.bias.data = layer.router.bias.data.flip(0) * 100
            y.square().sum().backward()
            grads.append(block.grad)
        assert torch.equal(*grads)


def test_jitter_depends_on_no_grid(world):
    x = whole((SEQUENCES * LENGTH, 7), "x", False)
    options = {"jitter": 0.3}
    (tokens,) = microbatches(one_rank(), 1)
    whole_layer = mixture(one_rank(), **options)
    y = whole_layer(x, tokens)
    assert not torch.allclose(y, mixture(one_rank())(x, tokens))
    assert not torch.allclose(y, whole_layer(x, dataclasses.replace(tokens, step=1)))
    assert torch.equal(whole_layer.eval()(x, tokens), mixture(one_rank())(x, tokens))
    for grid in spread(world.size):
        (tokens,) = microbatches(grid, 1)
        layer = mixture(grid, **options)
        close(layer(block_of(grid, tokens, x), tokens), block_of(grid, tokens, y.detach()))


def test_jitter_is_of_the_router_s_input(world):
    router = mixture(one_rank(), jitter=0.25).router
    rows = tokens_on(one_rank(), 2, 3)
    factors = router._jitter(router(torch.zeros(6, 7, dtype=torch.float64), rows).rows, step=5)
    assert factors.min() > 0.75
    assert factors.max() < 1.25
    assert factors.std() > 0.1
    expected = (KEY / "router" / "jitter").uniform(0, 42, 5).view(6, 7) * 0.5 + 0.75
    close(factors, expected)


@pytest.mark.ranks(1)
def test_a_loss_comes_once_however_its_carrier_is_used(world):
    x, parameter = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    y = add_loss(x, (parameter * 5).sum())
    (y.sum() + 7 * y.square().sum()).backward()
    assert parameter.grad.tolist() == [5.0, 5.0]
    assert x.grad.tolist() == [15.0] * 3


@pytest.mark.ranks(1)
def test_parts_of_sequences_are_refused(world):
    from hpctrain.layers.kv_cache import KVCache

    tokens = dataclasses.replace(tokens_on(one_rank(), 2, 4), share=0.5).part(slice(0, 2), KVCache())
    x = whole((4, 7), "x", False)
    for option in ("aux_loss", "capacity"):
        with pytest.raises(ValueError, match=f"{option} is for whole sequences of 4 tokens"):
            mixture(one_rank(), **{option: 1.0})(x, tokens)
    mixture(one_rank(), z_loss=1.0)(x, tokens).sum().backward()
    alone = Tokens.of(one_rank(), 2, 4, part=slice(0, 2), kv_cache=KVCache())
    mixture(one_rank(), aux_loss=1.0)(x, alone).sum().backward()  # which count in no loss unless they say so


@pytest.mark.ranks(1, 2)
def test_tokens_of_one_microbatch_count_in_auxiliary_losses(world):
    """As a mean over the sequences of all replicas, unless they say otherwise."""
    x = whole((SEQUENCES * LENGTH, 7), "x", False)
    for grid in grids(world.size):
        tokens, layer = tokens_on(grid, SEQUENCES, LENGTH), mixture(grid, **LOSSES)
        assert tokens.share == 1 / SEQUENCES
        assert tokens_on(grid, SEQUENCES, LENGTH, share=0.5).share == 0.5
        layer(block_of(grid, tokens, x), tokens)
        (load,) = LoadBalance(layer, grid).finish_step().values()
        assert load.aux_loss > 0
        assert load.z_loss > 0
        assert Tokens.of(grid, 0, LENGTH).local_rows == 0


@pytest.mark.ranks(1)
def test_auxiliary_losses_of_a_whole_model_in_float16(world):
    """Are scaled as its loss is: here the gradient is theirs alone."""
    grid, norms = one_rank(), []
    tokens = tokens_on(grid, SEQUENCES, LENGTH)
    for dtype in (torch.float32, torch.float16):
        layer = mixture(grid, **LOSSES, dtype=torch.float32)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        precision = Precision(compute=dtype, loss_scale=256.0)
        strategy = MixedDataParallel(layer.parameters(), grid, optimizer, precision=precision)
        assert (strategy.loss_scale == 1) == (dtype == torch.float32)
        trainer = Trainer(layer, grid, optimizer, strategy=strategy, loss=lambda model, x: 0 * model(x, tokens).sum())
        _, norm = trainer.step([whole((SEQUENCES * LENGTH, 7), "x", False).to(dtype)])
        norms += [norm, trainer.report()["aux_loss"]]
        assert layer.router.loss_scale == 1, "in a loop of one's own later"
    assert norms[0] > 0
    assert norms[2:] == pytest.approx(norms[:2], rel=1e-2)
