"""Weights that are read, written or watched outside of their own module, in parallelized models: as in plain torch."""

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from parallelize_checks import CLOSE, numbers, tensor_grids
from read_weights import IDS, Body, Tied, check_weights, made, train
from torch import nn

import hpctrain as ht
from hpctrain.shard import split

pytestmark = pytest.mark.mpi


class Transposed(Body):
    def forward(self, ids):
        h = F.linear(self.first(self.table(ids)), self.first.weight.t(), self.second.bias)
        return F.linear(h, self.attention.in_proj_weight[:, :5]) + self.body(ids).sum()


class Standardised(Body):
    def forward(self, ids):
        weight = self.filter.weight
        weight = (weight - weight.mean((1, 2), keepdim=True)) / (weight.std((1, 2), keepdim=True) + 1e-3)
        return self.body(ids) + F.conv1d(self.table(ids), weight, self.filter.bias)


class Penalised(Body):
    def forward(self, ids):
        h = self.body(ids)
        for module in (self.first, self.second, self.attention.out_proj):
            square = module.weight @ module.weight.mT
            h = h + (square - torch.eye(module.weight.size(0), dtype=h.dtype)).square().sum() / len(module.weight)
        return h * self.first.weight.abs().max() + sum(p.square().sum() / p.numel() for p in self.parameters())


class Listed(Body):
    def forward(self, ids):
        return (
            self.body(ids) + F.linear(self.table(ids), *self.kept[:1]).sum() + (self.kept[1] * self.norm.weight).sum()
        )


class Looked(Body):
    """Without a gradient, and of a weight that is frozen."""

    def __init__(self):
        super().__init__()
        self.second.weight.requires_grad_(False)

    def forward(self, ids):
        with torch.no_grad():
            scale = (0.5 * self.first.weight).norm() + torch.stack([p.sum() for p in self.parameters()]).sum()
            scale = scale + self.table.weight[3, 2] + F.embedding(ids, self.table.weight).mean()
        return self.body(ids) * scale + self.second.weight.square().sum()


class Detached(Body):
    """Without a gradient, by `.detach()` and `.data`, and written to, as averaged copies of weights are."""

    def forward(self, ids):
        self.second.bias.data.mul_(0.5).add_(self.norm.bias.data, alpha=0.5)
        self.second.bias.data = 0.5 * self.second.bias.data + self.norm.bias.data
        self.filter.bias.data[1] = self.first.bias.detach().max() + self.first.bias.detach().std()
        h = F.linear(self.table(ids), self.first.weight.detach())
        return self.body(ids) + h.sum() * self.table.weight.data.norm() / len(self.first.weight.data)


READS = {kind.__name__: kind for kind in (Tied, Transposed, Standardised, Penalised, Listed, Looked, Detached)}


@pytest.mark.parametrize("case", READS)
def test_reads(world, case):
    for grid in tensor_grids(world):
        serial = made(READS[case])
        model = ht.parallelize(made(READS[case]), grid)
        losses = [train(m, torch.optim.SGD(m.parameters(), 0.002)) for m in (serial, model)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-11), case
        assert len(set(world.allgather(tuple(losses[1])))) == 1
        check_weights(model, serial, grid)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.1, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adam foreach": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, foreach=True, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, weight_decay=0.1, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "one's own": lambda p: Own(p),
}


class Own(torch.optim.Optimizer):
    """As people write them."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                speed = self.state[p].setdefault("speed", torch.zeros_like(p.data))
                speed.mul_(0.5).add_(p.grad + 0.1 * p)
                p.data.add_(speed, alpha=-0.05)
                p *= 0.99
                slow = self.state[p].setdefault("slow", p.clone())
                slow += (p.data - slow) * 0.5
                p -= 0.01 * p.grad
                p.clamp_(-2.0, 2.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(world, name):
    """On the parts alone, without a message; made before the line, too."""
    grid = tensor_grids(world)[-1]
    serial, model = made(Tied), made(Tied)
    optimizer = OPTIMIZERS[name](model.parameters())
    ht.parallelize(model, grid)
    expected = train(serial, OPTIMIZERS[name](serial.parameters()))
    assert train(model, optimizer) == pytest.approx(expected, rel=1e-9)
    check_weights(model, serial, grid, rtol=1e-8, atol=1e-9)
    before = grid.transport.traffic.total("calls")
    optimizer.step()
    assert grid.transport.traffic.total("calls") == before


def test_writes(world):
    """In place: every rank keeps its part of what one rank would make."""

    def change(model):
        with torch.no_grad():
            model.first.weight.normal_()
            nn.init.kaiming_uniform_(model.second.weight, a=2.0)
            nn.init.trunc_normal_(model.filter.weight, std=0.1)
            nn.init.ones_(model.norm.bias)
            model.table.weight[2] = 0.25
            model.norm.weight.copy_(torch.arange(5.0))
            model.attention.in_proj_weight += numbers(18, 6)
            model.attention.out_proj.weight.div_(model.attention.out_proj.weight.norm())
            torch.mul(model.first.bias, 3.0, out=model.first.bias)
        model.second.bias.data = torch.arange(5, dtype=torch.float64)

    grid = tensor_grids(world)[-1]
    serial, model = made(Tied), ht.parallelize(made(Tied), grid)
    identities = [id(p) for p in model.parameters()]
    for m in (serial, model):
        torch.manual_seed(8)
        change(m)
    assert identities == [id(p) for p in model.parameters()]
    state = torch.get_rng_state()
    assert all(torch.equal(state, other) for other in world.allgather(state))
    check_weights(model, serial, grid)


def test_merging_as_peft_does(world):
    """It adds to `.data` what it computed from whole weights."""

    def merge(layer):
        layer.weight.data += numbers(5, 3)
        layer.weight.data *= numbers(5).view(-1, 1) / layer.weight.data.norm(dim=1, keepdim=True)
        layer.bias.data = layer.bias.data + numbers(5)

    torch.manual_seed(3)
    serial = nn.Linear(3, 5).double()
    model = ht.parallelize(copy.deepcopy(serial), tensor_grids(world)[-1])
    for layer in (serial, model):
        types.FunctionType(merge.__code__, {"__name__": "peft.tuners.lora", "numbers": numbers})(layer)
    gathered = ht.gather_state_dict(model)
    if world.rank == 0:
        torch.testing.assert_close(gathered, dict(serial.state_dict()), **CLOSE)


def test_whole_weights_of_the_module_in_apply(world):
    """Distributions that follow the shape, and reset_parameters, are those of the whole weight."""

    def initialise(module):
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            with torch.no_grad():
                module.weight += module.weight.shape[0] + module.weight.std()
        elif isinstance(module, nn.Embedding):
            nn.init.orthogonal_(module.weight)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    grid = tensor_grids(world)[-1]
    serial, model = made(Tied), ht.parallelize(made(Tied), grid)
    for m in (serial, model):
        m.first.weight.grad = torch.full_like(m.first.weight, 2.0)
        torch.manual_seed(8)
        m.apply(initialise)
        m.filter.reset_parameters()
    assert model.first.weight.grad.shape == model.first.weight.detach().shape
    check_weights(model, serial, grid)
    assert train(model, torch.optim.SGD(model.parameters(), 0.002)) == pytest.approx(
        train(serial, torch.optim.SGD(serial.parameters(), 0.002)), rel=1e-11
    )


WRITES = {
    "a view": (lambda m: m.table.weight[2].fill_(0), r"fill_ writes to a view of a weight .* would be lost"),
    "into a view": (lambda m: torch.add(torch.ones(5), 1, out=m.table.weight[2]), r"add writes to a view of a weight"),
    "transposed": (lambda m: m.first.weight.t().zero_(), r"zero_ writes to a view of a weight"),
    "by shape": (lambda m: nn.init.xavier_normal_(m.first.weight), r"xavier_normal_ would take the shape of a part"),
    "orthogonal": (lambda m: nn.init.orthogonal_(m.first.weight), r"orthogonal_|writes to a view of a weight"),
    "dirac": (lambda m: nn.init.dirac_(m.filter.weight), r"dirac_ would take the shape of a part"),
    "resize": (lambda m: m.first.weight.resize_(2, 2), r"resize_ gives the weight 'first\.weight'.* another shape"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", WRITES)
def test_writes_that_would_be_lost(world, case):
    write, text = WRITES[case]
    model = ht.parallelize(made(Tied), ht.Grid(tensor=world.size))
    with torch.no_grad(), pytest.raises(ValueError, match=rf"line \d+ of .*test_parallelize_weights\.py.*{text}"):
        write(model)


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, ids):
        h = self.table(ids)
        for layer in self.layers:
            h = layer(h).tanh()
        return F.linear(h, self.layers[0].weight) * self.layers[1].weight.norm()


@pytest.mark.parametrize("method", ["DataParallel", "Zero1", "Zero2", "Zero3"])
def test_replicas(world, method):
    """ZeRO-3 has freed a layer's weights when they are read outside of it."""
    grid = ht.Grid(**{1: {}, 2: {"tensor": 2}, 4: {"data": 2, "tensor": 2}}[world.size])
    serial, model = made(Stacked), ht.parallelize(made(Stacked), grid)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    parameters = model if method == "Zero3" else list(model.parameters())
    replicas = getattr(ht.data_parallel, method)(parameters, grid, optimizer)
    trainer = ht.Trainer(model, grid, optimizer, loss=lambda m, ids: m(ids).square().sum(), strategy=replicas)
    whole = torch.optim.AdamW(serial.parameters(), 0.01)
    ids = IDS[:2]
    mine = ids[split(2, grid.data.size, grid.data.rank)]
    for _ in range(3):
        whole.zero_grad()
        expected = serial(ids).square().sum()
        expected.backward()
        whole.step()
        loss, _ = trainer.step([mine])
        assert loss == pytest.approx(expected.item(), rel=1e-10)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.mT @ grad


class Apart(torch.autograd.Function):
    """In the newer way."""

    @staticmethod
    def forward(x, weight):
        return x @ weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    backward = Product.backward


@pytest.mark.ranks(2)
@pytest.mark.parametrize("function", [Product, Apart])
def test_functions_of_ones_own(world, function):
    """Are refused a divided weight, and are right with the whole one."""
    torch.manual_seed(0)
    serial, x = nn.Linear(4, 6).double(), numbers(3, 6)
    model, found = ht.parallelize(copy.deepcopy(serial), ht.Grid(tensor=2)), []
    with pytest.raises(
        ValueError, match=rf"line .* {function.__name__} is given the weight 'weight'.*; give it weight"
    ):
        function.apply(x, model.weight)
    for each in (serial, model):
        function.apply(x, each.weight * 1).square().sum().backward()
        found.append(each.weight.grad.norm())
    torch.testing.assert_close(found[1], found[0], **CLOSE)
