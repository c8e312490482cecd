"""Mixtures of experts on every kind of grid, by every dispatch, against a loop over tokens and their experts."""

import pytest
import torch
from experts_checks import EXPERTS, TOP_K, block_of, check, close, grids, mixture, one_rank, spread, tokens_on
from layer_checks import KEY, whole

from hpctrain import Grid
from hpctrain.comm import CollectiveChecker
from hpctrain.layers import Experts, Mixture, Router, SplitBackward
from hpctrain.layers.experts import experts, grouped
from hpctrain.layers.experts.dispatch import Dispatch

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4)]

KINDS = {
    "mixtral": {},
    "not normalized": {"normalized": False, "scale": 1.5},
    "deepseek": {"scores": "sigmoid", "balance_bias": 0.1, "experts": 6, "groups": 3, "groups_kept": 2, "scale": 2.5,
                 "shared_experts": 2},
    "gelu": {"activation": "gelu", "shared_experts": 1, "shared_ffn": 3, "top_k": 1},
    "groups by their best": {"experts": 6, "groups": 2, "groups_kept": 1, "top_k": 3},
}  # fmt: skip


def counts_of(world, layer):
    """Of each expert and of what is dropped, over all ranks."""
    return world.allreduce(layer.router.record.counts.numpy()).tolist()


@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_mixtures(world, kind):
    for grid in grids(world.size):
        check(grid, 4, 5, KINDS[kind])


@pytest.mark.parametrize("dispatch", ["auto", "all_to_all", "gather", "once"])
@pytest.mark.parametrize("way", ["shared memory", "messages"])
def test_dispatches(world, dispatch, way):
    for grid in grids(world.size, way):
        check(grid, 3, 5, {"dispatch": dispatch, "top_k": 3})


@pytest.mark.parametrize("dispatch", ["all_to_all", "gather", "once"])
@pytest.mark.parametrize("way", ["shared memory", "messages"])
@pytest.mark.parametrize("policy", ["probability", "position"])
def test_the_same_pairs_are_dropped_on_every_grid(world, dispatch, way, policy):
    for grid in grids(world.size, way):
        layer, serial = check(grid, 3, 7, {"dispatch": dispatch, "capacity_policy": policy, "capacity": 0.8})
        assert counts_of(world, layer) == [*serial.counts, len(serial.dropped)]
        assert len(serial.dropped) > 0


def test_nothing_is_dropped_in_evaluation(world):
    for grid in spread(world.size):
        layer, _ = check(grid, 3, 4, {"capacity": 0.5}, training=False)
        assert layer.router.record.counts.sum() == 0


@pytest.mark.parametrize("dispatch", ["all_to_all", "gather", "once"])
@pytest.mark.parametrize("way", ["shared memory", "messages"])
def test_adversarial_routing(world, case, dispatch, way):
    """One expert that all choose, ties everywhere, all experts, fewer than ranks, one token, capacity for one."""
    hot = whole((12, 7), "x", False).abs()
    for grid in spread(world.size, way)[case % 2 :: 2 if world.size == 4 else 1]:
        options = {"dispatch": dispatch}
        layer, _ = check(grid, 3, 4, {**options, "top_k": 1, "std": 0.0}, hot)
        assert counts_of(world, layer) == [12, 0, 0, 0, 0, 0]  # exact ties: the lowest number
        layer, _ = check(grid, 3, 4, {**options, "top_k": 3}, torch.zeros(12, 7, dtype=torch.float64))
        assert counts_of(world, layer) == [12, 12, 12, 0, 0, 0]
        check(grid, 3, 4, {**options, "top_k": EXPERTS})
        check(grid, 3, 4, {**options, "experts": 2})
        for capacity in (0.0, 0.5):
            check(grid, 3, 4, {**options, "experts": 1, "top_k": 1, "capacity": capacity})
        check(grid, 1, 1, options)
        _, serial = check(grid, 3, 4, {**options, "capacity": 0.01})
        assert len(serial.dropped) >= 12 * TOP_K - 3 * EXPERTS  # one of each sequence is left


@pytest.mark.parametrize("way", ["shared memory", "messages"])
def test_ranks_that_get_nothing(world, way):
    """All tokens go to the last two experts; the ranks of the others take part."""
    bias = torch.tensor([0.0] * 7 + [9.0] * 2)
    for grid in spread(world.size, way):
        for dispatch in ("all_to_all", "gather", "once"):
            options = {"scores": "sigmoid", "experts": 9, "bias": bias, "dispatch": dispatch}
            _, serial = check(grid, 3, 4, options)
            assert {e for row in serial.chosen for e in row} == {7, 8}


def test_weight_gradients_that_are_put_off(world):
    for grid in spread(world.size):
        at_once, split = (mixture(grid, shared_experts=1) for _ in range(2))
        tokens = tokens_on(grid, 3, 5)
        x, other = (block_of(grid, tokens, whole((15, 7), "x", False)).clone().requires_grad_() for _ in range(2))
        for layer in (at_once, split):
            layer.shared.up.weight.register_hook(lambda gradient: 2 * gradient)
            layer.experts.down.register_hook(lambda gradient: 2 * gradient)
        at_once(x, tokens).square().sum().backward()
        y = split(other, tokens).square().sum()
        with SplitBackward(split) as products:
            y.backward()
        assert split.experts.up.grad is None
        assert split.experts.down.grad is not None  # as a hook sees it
        close(other.grad, x.grad)
        with torch.no_grad():
            for product in products:
                product()
        for theirs, ours in zip(at_once.parameters(), split.parameters()):
            close(ours.grad, theirs.grad)


@pytest.mark.ranks(1)
def test_what_is_computed_while_rows_travel(world, monkeypatch):
    log = []

    class Logged(Dispatch):
        def to_experts(self, x):
            return self.logged("to experts", super().to_experts(x))

        def to_tokens(self, rows):
            return self.logged("to tokens", super().to_tokens(rows))

        def logged(self, what, work):
            log.append(what)
            return work.then(lambda result: (log.append("there"), result)[1])

    def weight_gradients(*arguments):
        log.append("weight gradient")
        return grouped.weight_gradients(*arguments)

    monkeypatch.setattr(experts, "choose", lambda *_: Logged)
    monkeypatch.setattr(experts, "weight_gradients", weight_gradients)
    layer = mixture(one_rank(), shared_experts=1)
    layer.shared.register_forward_hook(lambda *_: log.append("shared"))
    for parameter in layer.shared.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: log.append("shared"))
    y = layer(whole((15, 7), "x", False).requires_grad_(), tokens_on(one_rank(), 3, 5))
    assert log == ["to experts", "there", "to tokens", "shared", "there"]
    log.clear()
    y.sum().backward()
    assert log == ["to experts", *["shared"] * 2, "there", "to tokens", *["weight gradient"] * 2, "there"]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dispatch", ["all_to_all", "gather", "once"])
@pytest.mark.parametrize("way", ["shared memory", "messages"])
def test_all_ranks_call_the_same_collectives(world, dispatch, way):
    """By the checked mode, in which every call is compared before it is made."""
    with Grid(data=world.size // 2, tensor=(1, 2, 1), expert=world.size) as grid:
        if way == "messages":
            grid.expert.one_node = False
        CollectiveChecker(grid)
        check(grid, 3, 4, {"dispatch": dispatch, "capacity": 0.8})


@pytest.mark.ranks(1)
def test_options_are_checked(world):
    grid = one_rank()
    for wrong, message in (
        ({"scores": "tanh"}, "scores must be one of softmax, sigmoid, got 'tanh'"),
        ({"top_k": 6}, "top_k must be from 1 to 5, .* got 6"),
        ({"groups": 2}, "groups must divide the experts, .* got 5 experts in 2"),
        ({"aux_scope": "batch"}, "aux_scope must be one of sequence, step, got 'batch'"),
        ({"jitter": 1.0}, "jitter must be at least 0 and below 1"),
        ({"activation": "relu"}, "activation must be one of swiglu, gelu, got 'relu'"),
        ({"dispatch": "mail"}, "dispatch must be one of auto, all_to_all, gather, once, got 'mail'"),
        ({"capacity_policy": "luck"}, "capacity_policy must be one of probability, position"),
        ({"capacity": -1.0}, "capacity must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            mixture(grid, **wrong)


@pytest.mark.ranks(1)
def test_names_and_shapes(world):
    layer = Mixture(one_rank(), 4, 6, 5, 2, shared_experts=1, balance_bias=0.1, key=KEY)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {
        "router.weight": (5, 4), "router.bias": (5,), "experts.up": (5, 2, 6, 4), "experts.down": (5, 4, 6),
        "shared.up.weight": (12, 4), "shared.down.weight": (4, 6),
    }  # fmt: skip
    assert isinstance(layer.router, Router)
    assert isinstance(layer.experts, Experts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_numbers(world, dtype):
    """Routing is of float32 at least."""
    grid = spread(world.size)[-1]
    serial, layer = mixture(one_rank(), dtype=dtype), mixture(grid, dtype=dtype)
    x = whole((20, 7), "x", False).to(dtype)
    tokens = tokens_on(grid, 4, 5)
    y, expected = layer(block_of(grid, tokens, x), tokens), serial(x, tokens_on(one_rank(), 4, 5))
    limit = 50 * torch.finfo(dtype).eps
    torch.testing.assert_close(y, block_of(grid, tokens, expected), rtol=limit, atol=limit)
    routing = layer.router(block_of(grid, tokens, x) if grid.tensor.y.size == 1 else x[:0], tokens)
    assert routing.weights.dtype is torch.float32
