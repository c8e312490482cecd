"""Gradients and the optimizer's state, gathered and given back; averaged, compiled and functional copies of a model."""

import copy
import io

import pytest
import torch
from parallelize_checks import CLOSE
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


class Network(nn.Module):
    """Divided unevenly, tied, whole and unused weights, and one of no dims."""

    def __init__(self):
        super().__init__()
        self.table, self.scale, self.unused = nn.Embedding(7, 4), nn.Parameter(torch.ones(())), nn.Linear(3, 3)
        self.norm, self.body = nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.body(self.norm(self.table(ids))) * self.scale)


def network():
    torch.manual_seed(0)
    return Network().double()


def adamw(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], 0.1, amsgrad=True)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def step(model, optimizer, number, grid=None):
    ids = (torch.arange(6) + number) % 7
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(ids), (ids + 2) % 7).backward()
    optimizer.step()


def same_weights(model, serial, grid):
    gathered = ht.gather_state_dict(model, grid)
    if grid.rank == 0:
        torch.testing.assert_close(gathered, dict(serial.state_dict()), **CLOSE)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_optimizers(world, make):
    """Trained, gathered, given back to a plain model and to a divided one, trained on: as one rank alone."""
    grid = ht.Grid(tensor=2)
    serial, model = network(), ht.parallelize(network(), grid)
    plain, other = network(), ht.parallelize(network(), grid, replicate=["body.0"])
    theirs, ours, plains, others = map(make, (serial, model, plain, other))
    for number in range(2):
        step(serial, theirs, number)
        step(model, ours, number)
    gradients = ht.gather_gradients(model)
    expected = {name: p.grad for name, p in serial.named_parameters() if p.grad is not None}
    assert "unused.weight" not in expected
    state = ht.gather_optimizer_state(model, ours)
    if grid.rank == 0:
        torch.testing.assert_close(gradients, expected, **CLOSE)
        torch.testing.assert_close(state, theirs.state_dict(), **CLOSE)
    else:
        assert gradients == state == {}
    state, weights = world.bcast((state, ht.gather_state_dict(model)))
    plains.load_state_dict(state)
    ht.load_optimizer_state(other, others, state)
    for copied, optimizer in ((plain, plains), (other, others)):
        copied.load_state_dict(weights)
        step(copied, optimizer, 2)
    step(serial, theirs, 2)
    step(model, ours, 2)
    torch.testing.assert_close(dict(plain.state_dict()), dict(serial.state_dict()), **CLOSE)
    same_weights(model, serial, grid)
    same_weights(other, serial, grid)


def test_states_that_cannot_be_put_together(world):
    grid = ht.Grid(tensor=2)
    model = ht.parallelize(network(), grid)
    optimizer = sgd(model)
    with pytest.raises(ValueError, match=r"weight 0 of the optimizer, of shape \(2, 2\), is none of the model's; make"):
        ht.gather_optimizer_state(model, torch.optim.SGD([nn.Parameter(torch.ones(2, 2))]))
    with pytest.raises(ValueError, match="must be whole on every rank: load its file on each of them"):
        ht.load_optimizer_state(model, optimizer, {})
    with pytest.raises(ValueError, match="of an optimizer with more weights than this one"):
        ht.load_optimizer_state(model, optimizer, {"state": {99: {"a": 1}}, "param_groups": []})
    text = r"'row' of shape \({},\) is not of the shape of its weight, \(7, 4\), which is divided"
    factored = {"state": {1: {"row": torch.ones(7)}}, "param_groups": []}
    with pytest.raises(ValueError, match=text.format(7)):
        ht.load_optimizer_state(model, optimizer, factored)
    optimizer.state[model.table.weight]["row"] = torch.ones(5)
    with pytest.raises(ValueError, match=text.format(5)):
        ht.gather_optimizer_state(model, optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_state_of_whole_weights(world, fused):
    """As that of a program without ranks, loaded as if there were none here."""
    model, plain = ht.parallelize(network(), ht.Grid(tensor=2)), network()
    ours, theirs = (torch.optim.AdamW(each.parameters(), fused=fused) for each in (model, plain))
    ids = torch.tensor([1, 2, 3, 6])
    for each, optimizer in ((plain, theirs), (model, ours)):
        each(ids).square().sum().backward()
        optimizer.step()
    ours.load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match="'exp_avg' is of a whole weight, .* by ht.load_optimizer_state"):
        ours.step()
    ht.load_optimizer_state(model, ours, theirs.state_dict())
    ours.step()
    fresh = torch.optim.AdamW(model.parameters(), fused=fused)
    ht.load_optimizer_state(model, fresh, theirs.state_dict())
    with pytest.raises(ValueError, match="a tensor of optimizer.state_dict.. of a parallelized model is divided over"):
        torch.save(fresh.state_dict(), io.BytesIO())


def test_a_copy_that_is_trained(world):
    """Its gradients are known as parts, and as those of one replica, which nobody averages."""
    ids = torch.tensor([1, 2, 3, 6])
    serial = network()
    serial(ids).square().sum().backward()
    copied = copy.deepcopy(copy.deepcopy(ht.parallelize(network(), ht.Grid(tensor=2))))
    copied(ids).square().sum().backward()
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (copied, serial)]
    torch.testing.assert_close(*norms, **CLOSE)
    original = ht.parallelize(network(), ht.Grid(data=2), zero=0)
    copied = copy.deepcopy(original)
    optimizer = torch.optim.SGD(copied.parameters(), 0.1)
    copied(ids).square().sum().backward()
    with pytest.raises(ValueError, match="sync_gradients"):
        optimizer.step()
    ht.sync_gradients(copied)
    optimizer.step()
    assert original.head.weight.grad is None


class Passing(nn.Module):
    """As wrappers of peft's, it passes on what it has not itself."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, x):
        return 2 * self.model(x)


def test_a_copy_of_what_passes_attributes_on(world):
    grid, x = ht.Grid(tensor=2), torch.ones(2, 4, dtype=torch.float64)
    for make in (
        lambda layer: ht.parallelize(Passing(layer), grid),
        lambda layer: Passing(ht.parallelize(layer, grid)),
    ):
        torch.manual_seed(0)
        layer = nn.Linear(4, 6).double()
        expected = 2 * layer(x)
        model = make(layer)
        copied = copy.deepcopy(model)
        assert type(copied) is type(model)
        torch.testing.assert_close(copied(x), expected, **CLOSE)
        assert not {*copied.parameters()} & {*model.parameters()}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("zero", [0, None])
def test_updates_by_hand(world, zero):
    """With the mean of the replicas' gradients, whatever is computed first; refused where nobody has taken it."""

    ids = torch.tensor([[1, 2, 3, 6], [5, 0, 2, 2]])

    def update(model, ids, share):
        sums = {p: torch.zeros_like(p) for p in model.parameters()}
        for _ in range(2):
            model.zero_grad()
            (model(ids).square().sum() * share).backward()
            for p in filter(lambda p: p.grad is not None, model.parameters()):
                sums[p].mul_(0.9).add_(p.grad)
                with torch.no_grad():
                    p.add_(p.grad, alpha=-1e-3)
                p.data.add_(sums[p], alpha=-1e-3)

    grid = ht.Grid(data=2, tensor=world.size // 2)
    model, serial = ht.parallelize(network(), grid, zero=zero), network()
    if zero is None:
        model(ids[grid.data.rank]).square().sum().backward()
        with torch.no_grad(), pytest.raises(ValueError, match="sync_gradients"):
            model.head.weight.add_(model.head.weight.grad)
        with torch.no_grad(), pytest.raises(ValueError, match="sync_gradients"):
            model.norm.weight.sub_(model.norm.weight.grad)
        return
    update(model, ids[grid.data.rank], 1)
    update(serial, ids.flatten(), 0.5)
    if world.size == 2:  # of parts it would be another
        for each, own, share in ((model, ids[grid.data.rank], 1), (serial, ids.flatten(), 0.5)):
            each.zero_grad()
            (each(own).square().sum() * share).backward()
        norms = [
            sum(p.grad.data.norm(2).item() ** 2 for p in each.parameters() if p.grad is not None)
            for each in (model, serial)
        ]
        torch.testing.assert_close(*map(torch.tensor, norms), **CLOSE)
    whole = ht.gather_state_dict(model)
    if world.rank == 0:
        torch.testing.assert_close(whole, serial.state_dict(), **CLOSE)


def test_gradients_of_replicas(world):
    grid = ht.Grid(data=2)
    model = ht.parallelize(nn.Linear(3, 2), grid)
    model(torch.full((1, 3), 1.0 + grid.rank)).sum().backward()
    with pytest.raises(ValueError, match="gradients of the replicas are not summed yet; .* before ht.gather_gradients"):
        ht.gather_gradients(model)
    ht.sync_gradients(model)
    gathered = ht.gather_gradients(model)
    if grid.rank == 0:
        assert torch.equal(gathered["weight"], torch.full((2, 3), 3.0))


def test_averages(world):
    """Exponential averages of the weights, by deepcopy and as torch's AveragedModel keeps them."""
    grid = ht.Grid(tensor=2)
    ids = torch.arange(7)
    results = []
    for model in (network(), ht.parallelize(network(), grid)):
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        simple = AveragedModel(model)
        mine = copy.deepcopy(model)
        optimizer = adamw(model)
        for number in range(3):
            step(model, optimizer, number)
            averaged.update_parameters(model)
            simple.update_parameters(model)
            with torch.no_grad():
                for old, new in zip(mine.parameters(), model.parameters()):
                    old.lerp_(new, 0.5)
        torch.optim.swa_utils.update_bn([ids, ids.flip(0)], simple)
        copies = [averaged.module, simple.module, mine]
        states = [dict(m.state_dict()) if not results else ht.gather_state_dict(m, grid) for m in copies]
        results.append((states, [m.eval()(ids) for m in (averaged, simple, mine)]))
    (states, outputs), (gathered, got) = results
    torch.testing.assert_close(got, outputs, **CLOSE)
    if grid.rank == 0:
        torch.testing.assert_close(gathered, states, **CLOSE)


def test_a_gathered_state_is_a_copy(world):
    """Statistics too, of the weights that it has."""
    grid = ht.Grid(tensor=2)
    model = ht.parallelize(network(), grid)
    best = ht.gather_state_dict(model)
    before = copy.deepcopy(best)
    step(model, sgd(model), 0)
    torch.testing.assert_close(best, before, rtol=0, atol=0)


class Counted(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        self.loaded = state


def test_extra_state(world):
    """Of a module, which need not be a tensor."""
    model = ht.parallelize(nn.Sequential(Counted(3, 4)), ht.Grid(tensor=2))
    gathered = world.bcast(ht.gather_state_dict(model))
    model.load_state_dict(gathered)
    assert model[0].loaded == gathered["0._extra_state"] == {"calls": 3}


def test_a_file(world):
    grid = ht.Grid(tensor=2)
    model, file = ht.parallelize(network(), grid), io.BytesIO()
    torch.save(ht.gather_state_dict(model), file)
    if grid.rank == 0:
        file.seek(0)
        plain = Network().double()
        plain.load_state_dict(torch.load(file))
        torch.testing.assert_close(dict(plain.state_dict()), dict(network().state_dict()), rtol=0, atol=0)


COMPILED = {
    "after": lambda grid: torch.compile(ht.parallelize(network(), grid), backend="eager"),
    "before": lambda grid: ht.parallelize(torch.compile(network(), backend="eager"), grid),
    "in place": lambda grid: in_place(grid),
}


def in_place(grid):
    model = network()
    model.compile(backend="eager")
    return ht.parallelize(model, grid)


@pytest.mark.parametrize("when", COMPILED)
def test_compiled(world, when):
    serial, model = network(), COMPILED[when](ht.Grid(tensor=2))
    results = []
    for m in (serial, model):
        optimizer = sgd(m)
        losses = []
        for length in (4, 7, 3):
            optimizer.zero_grad()
            loss = m(torch.arange(length)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=1e-12)


def test_functional_call(world):
    """Of the model's own weights, a copy's, and whole ones that are not divided; others are refused, and nothing is
    left changed."""
    serial, model = network().eval(), ht.parallelize(network(), ht.Grid(tensor=2)).eval()
    ids, call = torch.arange(5), torch.func.functional_call
    given = {name: 2 * p.detach() for name, p in serial.named_parameters()}
    torch.testing.assert_close(call(model, dict(model.named_parameters()), ids), serial(ids), **CLOSE)
    doubled = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(call(model, dict(doubled.named_parameters()), ids), call(serial, given, ids), **CLOSE)
    scaled = {"scale": torch.tensor(3.0)}
    torch.testing.assert_close(call(model, scaled, ids), call(serial, scaled, ids), **CLOSE)
    for m in (model, doubled):
        for run in (call, torch.func.grad(lambda *arguments: call(*arguments).sum(), 1)):
            with pytest.raises(ValueError, match=r"gives another tensor for the weight 'weight' of table, .*load"):
                run(m, given, ids)
    torch.testing.assert_close(model(ids), serial(ids), **CLOSE)
