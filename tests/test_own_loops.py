"""Strategies in a loop of one's own: what is forgotten, or done by torch's means, is right or refused."""

import contextlib

import pytest
import torch
from training_checks import by_messages

import hpctrain as ht
from hpctrain.convert.optimizers import watch_optimizers
from hpctrain.data_parallel import DataParallel, ParameterServer, Zero1, Zero2, Zero3

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


@pytest.fixture(autouse=True)
def another_model_was_parallelized():
    """Optimizers are looked at from then on, before the strategies look."""
    watch_optimizers()


def own_loop(make, optimizer=torch.optim.SGD, given=True, frozen=None):
    grid = ht.Grid(data=2)
    layers = torch.nn.ModuleList([ht.layers.Linear(grid, 6, 50, to="inner", dtype=torch.float64)])
    if frozen:
        layers[0].get_parameter(frozen).requires_grad_(False)
    optimizer = optimizer(layers.parameters(), lr=0.1)
    strategy = make(layers if make is Zero3 else layers.parameters(), grid, optimizer if given else None)

    def backward(finish=True):
        strategy.zero_grad()
        layers[0](torch.ones(4, 6, dtype=torch.float64), ht.layers.Tokens.of(grid, 1, 4)).sum().backward()
        if finish:
            strategy.finish_grad_sync()

    return grid, layers, optimizer, strategy, backward


@pytest.mark.parametrize("make", [DataParallel, Zero1, Zero2, Zero3, ParameterServer])
def test_a_step_of_gradients_that_nobody_summed(world, make):
    grid, layers, optimizer, strategy, backward = own_loop(make)
    with getattr(layers[0].weight, "gathered", contextlib.nullcontext()):
        before = layers[0].weight.detach().clone()
    for step in (lambda: strategy.step(0.0, 0.0), optimizer.step):
        backward(finish=False)
        with pytest.raises(RuntimeError, match="batch alone: call strategy.finish_grad_sync"):
            step()
        strategy.finish_grad_sync()
    with getattr(layers[0].weight, "gathered", contextlib.nullcontext()):
        assert torch.equal(layers[0].weight, before)


def test_a_strategy_without_the_optimizer(world):
    """What the caller updates by, and computes, is refused before the sum, and another backward after it."""
    grid, layers, optimizer, _, backward = own_loop(DataParallel, given=False)
    backward(finish=False)
    for use in (optimizer.step, lambda: torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)):
        with pytest.raises(ValueError, match=r"tokens alone; .* call its finish_grad_sync\(\)"):
            use()
    backward()
    norm = torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
    assert norm == pytest.approx(8 * (50 * 7) ** 0.5, rel=1e-12)  # sums of eight rows of ones, and of the bias
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"came twice .* or strategy\.zero_grad\(\) was not called"):
        layers[0](torch.ones(4, 6, dtype=torch.float64), ht.layers.Tokens.of(grid, 1, 4)).sum().backward()


@pytest.mark.parametrize("make", [Zero1, Zero2, Zero3, ParameterServer])
def test_what_an_optimizer_of_parts_of_weights_cannot_do(world, make):
    """Step by itself, have groups added, mix the elements of a weight."""
    grid, layers, optimizer, strategy, backward = own_loop(make)
    backward()
    with pytest.raises(RuntimeError, match=r"call that, not optimizer\.step"):
        optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with pytest.raises(RuntimeError, match="groups were changed since, as by add_param_group"):
        strategy.step(0.0, 0.0)
    with pytest.raises(ValueError, match="every element of a weight by itself, got Adafactor"):
        own_loop(make, torch.optim.Adafactor)


@pytest.mark.parametrize("make", [DataParallel, Zero1, Zero2, Zero3, ParameterServer])
def test_gradients_of_a_strategy(world, make):
    """Nobody sums them once more; clipped and gathered are those that are whole."""
    grid, layers, _, _, backward = own_loop(make)
    backward()
    with pytest.raises(ValueError, match="sum once more what .* call strategy.finish_grad_sync"):
        ht.sync_gradients(layers, grid)
    if make is DataParallel:
        assert ht.clip_grad_norm_(layers, 1e9, grid).item() == pytest.approx(8 * (50 * 7) ** 0.5, rel=1e-12)
        return
    for use in (lambda: ht.clip_grad_norm_(layers, 1.0, grid), lambda: ht.gather_gradients(layers, grid)):
        with pytest.raises(ValueError, match=r"found no whole gradients.* strategy\.step\(norm, max_norm\) clips"):
            use()
    if make in (Zero1, ParameterServer):
        with pytest.raises(ValueError, match=r"as ZeRO, clip in step\(norm, max_norm\)"):
            torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)


@pytest.mark.parametrize("use", [ht.sync_gradients, ht.gather_gradients, lambda m, g: ht.clip_grad_norm_(m, 1.0, g)])
def test_weights_in_place_of_their_model(world, use):
    """As torch.nn.utils.clip_grad_norm_ takes them."""
    grid = ht.Grid(data=world.size)
    with pytest.raises(ValueError, match=r"model must be of type Module, got generator"):
        use(ht.layers.RMSNorm(grid, 4).parameters(), grid)


def test_a_backward_of_one_replica_that_is_given_up(world):
    """Its sums were begun, and would be paired with those of the next step."""
    *_, strategy, backward = own_loop(Zero2)
    for _ in range(2 - world.rank):
        backward(finish=False)
    with pytest.raises(ValueError, match=r"zero_grad\(\) gave up those of a backward that other replicas did not"):
        strategy.finish_grad_sync()
    if world.rank == 1:
        strategy._launch(strategy.buckets[0])  # so that no sum is left under way
    strategy._settle()


def test_weights_that_are_gathered_twice(world):
    """By messages: they stay as long as the caller asked for, also when their layer computes meanwhile."""
    grid = ht.Grid(data=2)
    by_messages(grid)
    layer = ht.layers.Linear(grid, 6, 6, to="inner", dtype=torch.float64)
    model = torch.nn.Sequential(layer)
    before = layer.weight.detach().clone()
    Zero3(model, grid, None)
    with layer.weight.gathered:
        with layer.bias.gathered:
            assert layer.bias.untyped_storage().nbytes()
        layer(torch.ones(4, 6, dtype=torch.float64), ht.layers.Tokens.of(grid, 1, 4)).sum().backward()
        assert layer.weight.untyped_storage().nbytes()  # without memory, reading ends the process
        assert torch.equal(layer.weight, before)
    assert not layer.weight.untyped_storage().nbytes()


@pytest.mark.parametrize("make", [DataParallel, Zero1, Zero2, Zero3, ParameterServer])
def test_weights_that_are_frozen_or_unfrozen(world, make):
    """After the strategy was made: they would still decay, or never be trained."""
    *_, backward = own_loop(make, frozen="bias")
    backward()
    grid, layers, _, strategy, backward = own_loop(make, frozen="bias")
    layers[0].bias.requires_grad_(True)
    with pytest.raises(ValueError, match="requires its gradient now, which nobody would sum; make the strategy"):
        strategy.zero_grad()
    layers[0].requires_grad_(False)
    with pytest.raises(ValueError, match="is frozen now, and would still decay"):
        strategy.zero_grad()
