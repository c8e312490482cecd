"""Layers in a loop of one's own: what others' code makes of their gradients is right, or refused."""

import contextlib
import copy
import dataclasses
import functools
import math

import pytest
import torch
from layer_checks import DOUBLE, KEY, Layout, weights_of, whole

import hpctrain as ht
from hpctrain.data_parallel import DataParallel
from hpctrain.layers.whole_parameters import whole_parameters

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]
ROWS = 12
CLIP = 0.5


@functools.cache
def grids(ranks):
    boxes = [(1, (ranks, 1, 1)), (1, (1, ranks, 1)), (1, (1, 1, ranks)), (ranks, (1, 1, 1))]
    return [ht.Grid(data=data, tensor=box) for data, box in boxes + [(2, (2, 1, 1))] * (ranks == 4)]


def model_of(grid):
    return torch.nn.ModuleDict(
        {
            "norm": ht.layers.LayerNorm(grid, 10, key=KEY / "norm", **DOUBLE),
            "up": ht.layers.Linear(grid, 10, 14, to="inner", key=KEY / "up", **DOUBLE),
            "down": ht.layers.Linear(grid, 14, 10, to="residual", key=KEY / "down", **DOUBLE),
        }
    )


def backward(model, grid):
    """Of this rank's share of the loss."""
    share = ROWS // grid.data.size
    layout = Layout(grid, share, 1)
    x = layout.residual(whole((ROWS, 10), "x", False)[share * grid.data.rank : share * (grid.data.rank + 1)])
    h = torch.tanh(model["up"](model["norm"](x, layout.tokens), layout.tokens))
    model["down"](h, layout.tokens).square().sum().backward()


def serial(weights, optimizer, steps=3, clip=CLIP):
    """Whole weights after so many steps on one rank."""
    w, x, optimizer = weights, whole((ROWS, 10), "x", False), optimizer(weights.values())
    for _ in range(steps):
        optimizer.zero_grad()
        y = torch.nn.functional.layer_norm(x, (10,), w["norm.weight"], w["norm.bias"])
        y = torch.nn.functional.linear(y, w["up.weight"], w["up.bias"]).tanh()
        torch.nn.functional.linear(y, w["down.weight"], w["down.bias"]).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(w.values(), clip)
        optimizer.step()
    return w


def summed(ranks):
    """Each grid whose ranks sum gradients, and a model whose gradients they have summed."""
    for grid in grids(ranks):
        if needs_sum(grid):
            model = model_of(grid)
            backward(model, grid)
            ht.sync_gradients(model, grid)
            yield grid, model


def needs_sum(grid):
    """Whether some weight's gradient is a partial sum: those of norms are over z and x."""
    return grid.data.size * grid.tensor.x.size * grid.tensor.z.size > 1


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_plain_loop_equals_one_rank(world, optimizer):
    for grid in grids(world.size):
        model = model_of(grid)
        expected = serial(weights_of(grid, model), OPTIMIZERS[optimizer])
        mine = OPTIMIZERS[optimizer](model.parameters())
        for _ in range(3):
            mine.zero_grad(set_to_none=optimizer == "sgd")
            backward(model, grid)
            ht.sync_gradients(model, grid)
            ht.clip_grad_norm_(model, CLIP, grid)
            mine.step()
        gradients = ht.gather_gradients(model, grid)
        for name, weight in whole_parameters(model, grid):
            if grid.rank == 0:
                torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(gradients[name], expected[name].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_no_other_rank_has(world, frozen):
    """Experts alone, of a mixture whose router is frozen or used nowhere: nothing is left to sum, nor was it before."""
    grid = ht.Grid(data=world.size, expert=world.size)
    model = ht.layers.Mixture(grid, 8, 4, experts=world.size, top_k=1, key=KEY, **DOUBLE)
    model.router.weight.requires_grad_(not frozen)
    x, tokens = whole((6, 8), f"x{world.rank}", False), ht.layers.Tokens.of(grid, 6, 1)
    routing = model.router(x, tokens)
    routing = dataclasses.replace(routing, weights=routing.weights.detach())
    model.experts(x, routing).square().sum().backward()
    before = model.experts.down.grad.clone()
    ht.sync_gradients(model, grid)
    assert torch.equal(model.experts.down.grad, before)


@pytest.mark.parametrize("strategy", [False, True])
def test_a_weight_of_ones_own(world, strategy):
    for grid in grids(world.size):
        model, share = model_of(grid), ROWS // grid.data.size
        model.scale = torch.nn.Parameter(torch.arange(10, **DOUBLE))
        with pytest.raises(ValueError, match=r"'scale' .* say so: weight.shard = ht.Shard.whole\(weight.shape"):
            ht.sync_gradients(model, grid)
        model.scale.shard = ht.Shard.whole(model.scale.shape, ("x", "y", "z"))
        replicas = DataParallel(model.parameters(), grid) if strategy else None
        if replicas:
            replicas.zero_grad()
            replicas.enable_grad_sync()
        layout, x = Layout(grid, share, 1), whole((ROWS, 10), "x", False)
        own = layout.residual(x[share * grid.data.rank : share * (grid.data.rank + 1)])
        (model["norm"](own, layout.tokens) * layout.residual(model.scale.expand(share, -1))).square().sum().backward()
        replicas.finish_grad_sync() if replicas else ht.sync_gradients(model, grid)
        normal = torch.nn.functional.layer_norm(x, (10,))
        expected = 2 * model.scale.detach() * normal.square().sum(0)
        torch.testing.assert_close(model.scale.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("parallelized", [False, True])  # another model, since when every optimizer's step is watched
def test_a_step_before_the_sum_is_refused(world, optimizer, parallelized):
    if parallelized:
        torch.manual_seed(0)
        ht.parallelize(torch.nn.Linear(4, 4), ht.Grid(tensor=world.size))
    for grid in grids(world.size):
        model = model_of(grid)
        mine = OPTIMIZERS[optimizer](model.parameters())
        backward(model, grid)
        if not needs_sum(grid):
            mine.step()
            continue
        with pytest.raises(ValueError, match=r"tokens alone; call ht\.sync_gradients\(model, grid\)"):
            mine.step()
        with pytest.raises(ValueError, match="clip_grad_norm_ would use .* tokens alone"):
            ht.clip_grad_norm_(model, CLIP, grid)
        world.Barrier()


USES_ALL = {
    "clip": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP),
    "clip, one by one": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=False),
    "norm": lambda model: math.hypot(*(p.grad.norm() for p in model.parameters())),
    "norm by hand": lambda model: sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt(),
    "largest": lambda model: max(p.grad.abs().max() for p in model.parameters()),
    "largest of each column": lambda model: [p.grad.max(0) for p in model.parameters()],
    "in the middle": lambda model: [p.grad.median() for p in model.parameters()],
    "in order": lambda model: [p.grad.sort() for p in model.parameters()],
    "singular values": lambda model: [torch.linalg.svdvals(p.grad) for p in model.parameters() if p.dim() == 2],
    "rows": lambda model: [row.norm() for p in model.parameters() for row in p.grad],
    "half of the rows": lambda model: [2 * p.grad.chunk(2)[0].norm() for p in model.parameters()],
    "spread of copies": lambda model: [
        (2 * x).std() for x in torch._foreach_mul([p.grad.detach().clone() for p in model.parameters()], 2.0)
    ],
    "transposed": lambda model: [torch.einsum("i...,i...->", p.grad.T, p.grad.T) for p in model.parameters()],
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters()).step(lambda: torch.ones(())),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()).step(),
    "scaler": lambda model: unscale(model),
}


def unscale(model):
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


@pytest.mark.parametrize("strategy", [True, False])
@pytest.mark.parametrize("use", USES_ALL)
def test_what_needs_the_whole_gradient_is_refused(world, use, strategy):
    """After it was summed, with a strategy or without; replicas of whole weights have it."""
    for grid in grids(world.size):
        model = model_of(grid)
        replicas = DataParallel(model.parameters(), grid) if strategy else None
        if replicas:
            replicas.zero_grad()
            replicas.enable_grad_sync()
        backward(model, grid)
        if replicas:
            replicas.finish_grad_sync()
        else:
            ht.sync_gradients(model, grid) if needs_sum(grid) else None
        if grid.tensor.size == 1:
            USES_ALL[use](model)
            continue
        with pytest.raises(
            ValueError,
            match=r"this rank's .* of a gradient of shape .*ht\.clip_grad_norm_|every element of a weight by itself",
        ):
            USES_ALL[use](model)


def test_a_copy_that_a_gradient_is_added_to(world):
    """Of one which is not summed: as little summed. States of torch's optimizers are ordinary tensors."""
    for grid, model in summed(world.size):
        kept = {p: p.grad.clone() for p in model.parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        assert {type(state["momentum_buffer"]) for state in optimizer.state.values()} == {torch.Tensor}
        model.zero_grad()
        backward(model, grid)
        for p, copied in kept.items():
            refused = pytest.raises(ValueError, match=r"add_ would use .* tokens alone; call ht\.sync_gradients")
            with torch.no_grad(), contextlib.nullcontext() if p.grad.summed else refused:
                copied.mul_(0.9).add_(p.grad)
                p.add_(copied, alpha=-0.1)


def test_copies_are_as_their_sources(world):
    """Deep ones too; what is copied to one of a sum, and zeros, of which any number add up to zeros."""
    for grid, model in summed(world.size):
        kept = {p: p.grad.clone() for p in model.parameters() if p.shard.divided}  # other sums are ordinary tensors
        model.zero_grad()
        backward(model, grid)
        for p, mine in kept.items():
            mine.copy_(p.grad)
            copied = copy.deepcopy({"m": mine})["m"]
            torch.testing.assert_close(copied, mine, rtol=0, atol=0)
            shape = p.shard.global_shape
            assert [(x.summed, x.of_shape) for x in (mine, copied)] == [(p.grad.summed, shape)] * 2
            for change in (lambda x: x.zero_(), lambda x: x.fill_(0), lambda x: x.copy_(torch.ones(()))):
                changed = change(copy.deepcopy(mine))
                assert (changed.summed, changed.of_shape) == (True, shape)


def test_sums_of_ones_own_are_taken_for_what_they_are(world):
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    for grid in grids(world.size):
        model = model_of(grid)
        expected = serial(weights_of(grid, model), sgd, steps=1, clip=math.inf)
        backward(model, grid)
        for parameter in model.parameters():
            replicated = [getattr(grid.tensor, name) for name in parameter.shard.replicated if parameter.shard.partial]
            for axis in [*replicated, grid.data]:
                ht.comm.all_reduce(parameter.grad, axis)
        sgd(model.parameters()).step()
        for name, weight in whole_parameters(model, grid):
            if grid.rank == 0:
                torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-12, atol=1e-12)
