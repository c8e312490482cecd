"""What scripts do with gradients of replicas before these are summed, and with what stands for them."""

import copy
import gc
import weakref

import pytest
import torch
from parallelize_checks import numbers
from torch import nn

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

GRIDS = {2: [{"data": 2}], 4: [{"data": 4}, {"data": 2, "tensor": 2}]}
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x):
        return self.second(self.norm(self.first(x)).tanh())


def loss_of(model, seed):
    return model(numbers(3, 4, seed=seed)).square().sum()


def both(sizes, zero):
    torch.manual_seed(1)
    grid, serial = ht.Grid(**sizes), Network().double()
    return grid, serial, ht.parallelize(copy.deepcopy(serial), grid, zero=zero)


def backward(model, grid):
    """The mean over the replicas; of their sum, where nobody divides it."""
    if grid is None:
        return
    loss_of(model, grid.data.rank).backward()


def serial_backward(serial, grid, divisor):
    (sum(loss_of(serial, rank) for rank in range(grid.data.size)) / divisor).backward()


@torch.no_grad()
def by_lists(model):
    parameters = [*model.parameters()]
    torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.1)


@torch.no_grad()
def by_keyword(model):
    for p in model.parameters():
        torch.add(p, other=p.grad, alpha=-0.1, out=p)


def by_data(model):
    for p in model.parameters():
        p.data -= 0.1 * p.grad


def by_clamping(model):
    nn.utils.clip_grad_value_(model.parameters(), 0.3)
    torch.optim.SGD(model.parameters(), 0.1).step()


def by_copies(model):
    norms = sum(g.norm() for g in copy.deepcopy([p.grad for p in model.parameters()]))
    for p in model.parameters():
        p.grad.mul_(1 / norms)
    torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize("zero", [None, 0])
@pytest.mark.parametrize("update", [by_lists, by_keyword, by_data, by_clamping, by_copies])
def test_updates(world, update, zero):
    """Of the mean with zero=0; without, refused on all ranks before the sum, and right after it."""
    for sizes in GRIDS[world.size]:
        grid, serial, model = both(sizes, zero)
        serial_backward(serial, grid, 1 if zero is None else grid.data.size)
        backward(model, grid)
        if zero is None:
            with pytest.raises(ValueError, match=r"not summed yet; call ht.sync_gradients\(model\) after"):
                update(model)
            ht.sync_gradients(model)
        for each in (serial, model):
            update(each)
        gathered = ht.gather_state_dict(model)
        if grid.rank == 0:
            torch.testing.assert_close(gathered, dict(serial.state_dict()), **CLOSE)


def by_assigning(p):
    p.grad = p.grad.clamp(-1, 1)


NOT_LINEAR = {
    "clamped": by_assigning,
    "signs": lambda p: p.grad.copy_(p.grad.sign()),
    "square": lambda p: p.grad.mul_(p.grad),
    "by lists": lambda p: torch._foreach_mul_([p.grad], [p.grad]),
    "where": lambda p: p.grad.masked_fill_(p.grad > 1, 1.0),
    "absolute": lambda p: p.grad.abs_(),
    "power": lambda p: p.grad**2,
    "remainder": lambda p: p.grad % 0.1,
    "logarithm": lambda p: p.grad.log1p(),
    "by keyword": lambda p: torch.mul(p.grad, other=p.grad),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", NOT_LINEAR)
def test_what_is_not_linear(world, case):
    """Of the sum it is something else than the sum of what it is of each."""
    grid, _, model = both({"data": 2}, None)
    backward(model, grid)
    with pytest.raises(ValueError, match=r"not summed yet; call ht.sync_gradients\(model\) after"):
        NOT_LINEAR[case](model.first.weight)
    model.first.weight.grad.mul_(0.5).masked_fill_(torch.eye(6, 4) > 0, 0.0).add_(model.first.weight.grad)
    ht.sync_gradients(model)
    NOT_LINEAR[case](model.first.weight)


@pytest.mark.ranks(4)
def test_what_is_added_to_zeros(world):
    """Of a divided weight these are a part, and of no replica."""
    grid, _, model = both({"data": 2, "tensor": 2}, None)
    backward(model, grid)
    p = model.first.weight
    zeros, gradient = torch.zeros_like(p), p.grad
    updates = (
        lambda: torch.addcmul(zeros, gradient, gradient), lambda: p.data.sub_(0.9 * zeros + gradient),
        lambda: p.data.sub_(torch._foreach_add([zeros], [gradient])[0]),
    )  # fmt: skip
    for update in updates:
        with pytest.raises(ValueError, match=r"not summed yet; call ht.sync_gradients\(model\) after"):
            update()


@pytest.mark.ranks(4)
def test_gradients_of_divided_and_whole_weights(world):
    torch.manual_seed(1)
    serial = nn.ModuleList(nn.Linear(4, 6) for _ in range(2)).double()
    model = ht.parallelize(copy.deepcopy(serial), ht.Grid(data=2, tensor=2), replicate=["0"], zero=0)
    for m in (serial, model):
        sum(layer(numbers(3, 4)).square().sum() for layer in m).backward()
        whole, divided = (layer.weight.grad for layer in m)
        whole.add_(divided)
        torch.add(whole, divided, out=whole)
    torch.testing.assert_close(model[0].weight.grad.as_subclass(torch.Tensor), serial[0].weight.grad, **CLOSE)


def test_norms_of_gradients_that_one_replica_has(world):
    """After the sum all have them, as parts of which torch takes the norm of the whole."""
    for sizes in GRIDS[world.size]:
        grid, serial, model = both(sizes, None)
        loss_of(serial, 0).backward()
        if grid.data.rank == 0:
            loss_of(model, 0).backward()
        ht.sync_gradients(model)
        found, expected = (nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, serial))
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(
    "clear",
    [
        lambda g: g.data.zero_(), lambda g: g.detach().zero_(), lambda g: g.fill_(0), lambda g: g.mul_(0.0),
        lambda g: g.zero_(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("made_by", ["parallelize", "layers"])
def test_gradients_that_are_cleared_by_hand(world, made_by, clear):
    """They are no sums any more, to which a backward would add."""
    if made_by == "layers":
        grid = ht.Grid(data=world.size)
        model = ht.layers.Linear(grid, 4, 6, to="inner", key=ht.RngKey(1), dtype=torch.float64)
        inputs = numbers(3, 4), ht.layers.Tokens.of(grid, sequences=1, length=3)
    else:
        grid, _, model = both(GRIDS[world.size][-1], None)
        inputs = (numbers(3, 4),)
    norms = []
    for _ in range(2):
        model(*inputs).square().sum().backward()
        ht.sync_gradients(model, grid)
        norms.append(ht.clip_grad_norm_(model, 1e9, grid))
        for p in model.parameters():
            clear(p.grad)
    torch.testing.assert_close(norms[0], norms[1], rtol=0, atol=0)


@pytest.mark.parametrize("zero", [None, 0, 1])
def test_hooks_that_would_see_one_replica(world, zero):
    """Be it in a loop of one's own, or of a trainer's."""
    for sizes in GRIDS[world.size]:
        grid, _, model = both(sizes, zero)
        if zero is None:
            ht.Trainer(model, grid, torch.optim.SGD(model.parameters(), 0.1), loss=loss_of)
        for p in (model.norm.weight, model.first.weight):
            with pytest.raises(ValueError, match=r"hook on its gradient, which would see that of one replica's batch"):
                p.register_hook(lambda gradient: gradient.clamp(-1, 1))


@pytest.mark.parametrize("zero", [0, 1])
def test_copies_of_the_model(world, zero):
    """Nobody sums their gradients."""
    for sizes in GRIDS[world.size]:
        grid, _, model = both(sizes, zero)
        copied = copy.deepcopy(model)
        backward(copied, grid)
        optimizer = torch.optim.SGD(copied.parameters(), 0.1)
        for use in (optimizer.step, lambda copied=copied: nn.utils.clip_grad_norm_(copied.parameters(), 0.1)):
            with pytest.raises(ValueError, match="the gradients of the replicas are not summed yet"):
                use()


@pytest.mark.parametrize("zero", [None, 0, 1])
def test_a_dropped_model_is_freed(world, zero):
    """With gradients there, of which Python's collector does not see what has them."""
    for sizes in GRIDS[world.size]:
        grid, _, model = both(sizes, zero)
        backward(model, grid)
        if zero is None:
            ht.sync_gradients(model)
        torch.optim.SGD(model.parameters(), 0.1).step()
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
