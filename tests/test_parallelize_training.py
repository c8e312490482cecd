"""Training a parallelized model, on tensor and data axes: equal to the plain loop on one rank."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from layer_checks import whole
from parallelize_checks import CLOSE, numbers
from torch import nn

import hpctrain as ht
from hpctrain.shard import split

pytestmark = pytest.mark.mpi

BATCH = 9
GRIDS = {
    1: [{}],
    2: [{"tensor": 2}, {"data": 2}],
    3: [{"tensor": 3}, {"data": 3}],
    4: [{"tensor": (2, 2, 1)}, {"data": 2, "tensor": 2}, {"data": 4}],
    6: [{"data": 2, "tensor": 3}],
    8: [{"data": 2, "tensor": (2, 1, 2)}],
}


class Gate(nn.Bilinear):
    """Of a forward of its own: it stays whole."""

    def forward(self, x):
        return super().forward(x, x)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 12), nn.LayerNorm(12)
        )
        self.mixer = nn.TransformerEncoderLayer(4, 2, 7, dropout=0.0, batch_first=True)
        self.gate = Gate(4, 4, 4)
        self.head, self.unused = nn.Linear(12, 10), nn.Linear(3, 3)

    def forward(self, x):
        x = self.mixer(self.body(x).view(-1, 3, 4))
        return self.head((x + self.gate(x)).flatten(1))


def batch(step):
    return numbers(BATCH, 1, 4, 4, seed=step), torch.arange(BATCH) * (step + 3) % 10


def loss_of(model, part):
    x, y = part
    return F.cross_entropy(model(x), y, reduction="sum") / BATCH


def network():
    torch.manual_seed(2)
    return Network().double()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", ["loop", "trainer"])
def test_three_steps(world, optimizer, way):
    for sizes in GRIDS[world.size]:
        grid = ht.Grid(**sizes)
        serial = network()
        model = ht.parallelize(copy.deepcopy(serial), grid)
        ours, theirs = (OPTIMIZERS[optimizer](m.parameters()) for m in (model, serial))
        trainer = ht.Trainer(model, grid, ours, loss=loss_of, max_norm=0.5) if way == "trainer" else None
        mine = split(BATCH, grid.data.size, grid.data.rank)
        for step in range(3):
            theirs.zero_grad()
            expected = loss_of(serial, batch(step))
            expected.backward()
            expected_norm = nn.utils.clip_grad_norm_(serial.parameters(), 0.5)
            theirs.step()
            part = tuple(tensor[mine] for tensor in batch(step))
            if trainer:
                loss, norm = trainer.step([part])
            else:
                ours.zero_grad()
                share = loss_of(model, part)
                share.backward()
                ht.sync_gradients(model)
                norm = float(ht.clip_grad_norm_(model, 0.5))
                ours.step()
                loss = grid.data.comm.allreduce(share.item())
            assert loss == pytest.approx(expected.item(), rel=1e-11)
            assert norm == pytest.approx(expected_norm.item(), rel=1e-11)
        gathered = ht.gather_state_dict(model)
        if grid.rank == 0:
            for name, tensor in serial.state_dict().items():
                if way == "trainer" and "unused" in name:
                    continue  # its gradient is none here and zero there: weight decay makes a difference
                torch.testing.assert_close(gathered[name], tensor, rtol=1e-9, atol=1e-9, msg=name)
        copies = world.allgather(model.gate.weight.detach())
        assert all(torch.equal(copies[0], other) for other in copies)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_norm_in_autocast(world, dtype):
    """Statistics of all replicas, in float32, as torch takes them; the result in the dtype of what came in."""
    grid = ht.Grid(**GRIDS[world.size][-1])
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4))
    model = ht.parallelize(copy.deepcopy(serial), grid)
    images = numbers(BATCH, 1, 3, 3).float()
    mine = split(BATCH, grid.data.size, grid.data.rank)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        expected, got = serial(images), model(images[mine])
    assert got.dtype == expected.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected[mine], rtol=4 * eps, atol=4 * eps)
    for name, buffer in serial.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, rtol=1e-5, atol=1e-5)
    got.float().square().sum().backward()
    ht.sync_gradients(model)
    assert model[1].weight.grad.isfinite().all()


def test_batch_norm_of_one_number_a_channel(world):
    """Refused on all ranks, as by torch: the variance would be NaN."""
    grid = ht.Grid(data=world.size)
    torch.manual_seed(0)
    model = ht.parallelize(nn.BatchNorm1d(3), grid)
    with pytest.raises(ValueError, match="more than (one number a|1 value per) channel"):
        model(torch.ones(int(world.rank == 0), 3))
    assert torch.equal(model.running_var, torch.ones(3))


def test_accumulation(world):
    """Several batches of a step are summed, with one sum over replicas."""
    grid = ht.Grid(**GRIDS[world.size][-1])
    serial = network().eval()
    for module in serial.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats, module.momentum = True, 0.0
    model = ht.parallelize(copy.deepcopy(serial), grid, replicate=["gate"])
    model.train = lambda mode=True: model  # statistics of the whole batch would not be those of its parts
    trainer = ht.Trainer(model, grid, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss_of)
    mine = split(BATCH, grid.data.size, grid.data.rank)
    x, y = (tensor[mine] for tensor in batch(0))
    loss, _ = trainer.step([(x[:1], y[:1]), (x[1:], y[1:])])
    assert loss == pytest.approx(loss_of(serial, batch(0)).item(), rel=1e-12)
    loss_of(serial, batch(0)).backward()
    torch.optim.SGD(serial.parameters(), lr=0.1).step()
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        torch.testing.assert_close(gathered, dict(serial.state_dict()), **CLOSE)


def test_not_finite(world):
    grid = ht.Grid(tensor=world.size)
    torch.manual_seed(0)
    model = ht.parallelize(nn.Linear(4, 4), grid)
    before = model.weight.detach().clone()
    trainer = ht.Trainer(model, grid, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda m, x: m(x).sum())
    with pytest.raises(FloatingPointError, match="not both finite"):
        trainer.step([torch.full((1, 4), torch.inf)])
    assert torch.equal(model.weight.detach(), before)


def test_gradients_that_only_some_replicas_have(world):
    grid = ht.Grid(data=world.size)
    torch.manual_seed(0)
    model = ht.parallelize(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), grid)
    model[0](torch.ones(1, 2)).sum().backward()
    if grid.data.rank == world.size - 1:
        model[1](torch.ones(1, 2)).sum().backward()
    ht.sync_gradients(model)
    assert torch.equal(model[0].bias.grad, torch.full((2,), float(world.size)))
    assert torch.equal(model[1].bias.grad, torch.ones(2))
    for parameter in model.parameters():
        parameter.grad = None
    ht.sync_gradients(model)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("made_by", ["parallelize", "layers"])
def test_a_second_sum_in_a_step_is_refused(world, made_by):
    """It would multiply the gradients by the number of replicas, in silence; another backward makes it one sum again.
    The last replica has an empty batch, and no gradients."""
    torch.manual_seed(0)
    grid = ht.Grid(data=world.size)
    if made_by == "layers":
        model = ht.layers.Linear(grid, 2, 2, to="inner", key=ht.RngKey(1))
        tokens = ht.layers.Tokens.of(grid, sequences=1, length=1)
        inputs = torch.ones(1, 2), tokens
    else:
        model, inputs = ht.parallelize(nn.Linear(2, 2), grid), (torch.ones(1, 2),)

    def backward():
        if grid.data.rank < world.size - 1:
            model(*inputs).sum().backward()

    backward()
    ht.sync_gradients(model, grid)
    expected = torch.full((2,), float(world.size - 1))
    with pytest.raises(
        ValueError, match="ht.sync_gradients was called twice: the gradients are the sums over the repl"
    ):
        ht.sync_gradients(model, grid)
    assert torch.equal(model.bias.grad.as_subclass(torch.Tensor), expected)
    for parameter in model.parameters():
        parameter.grad.zero_()  # zero_grad(set_to_none=False) leaves the same tensor
    backward()
    ht.sync_gradients(model, grid)
    assert torch.equal(model.bias.grad.as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize("way", ["loop", "trainer"])
def test_models_of_layers(world, way):
    """sync, clip_grad_norm_ and Trainer complete the partial sums of ht.layers too."""
    grid = ht.Grid(**GRIDS[world.size][-1])
    layer = ht.layers.Linear(grid, 6, 4, to="inner", key=ht.RngKey(1), dtype=torch.float64)
    weight = whole((4, 6), "weight")
    with torch.no_grad():
        layer.weight.copy_(weight[layer.weight.shard.slices])
    tokens = ht.layers.Tokens.of(grid, sequences=3, length=2)
    x, y, z = grid.tensor.x, grid.tensor.y, grid.tensor.z
    rows = split(3, z.size, z.rank)
    rows = numbers(6, 6)[2 * rows.start : 2 * rows.stop].split(list(tokens.rows.sizes))[x.rank]
    x = rows[:, split(6, y.size, y.rank)]

    def share(layer, x):
        return (layer(x, tokens) ** 2).sum()

    bias = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    expected = (F.linear(numbers(6, 6), weight, bias) ** 2).sum() * grid.data.size
    expected.backward()
    expected_norm = torch.cat([weight.grad.flatten(), bias.grad]).norm()
    if way == "trainer":
        trainer = ht.Trainer(layer, grid, torch.optim.SGD(layer.parameters(), lr=0.1), loss=share)
        loss, norm = trainer.step([x])
        assert loss == pytest.approx(expected.item(), rel=1e-12)
    else:
        share(layer, x).backward()
        ht.sync_gradients(layer, grid)
        norm = float(ht.clip_grad_norm_(layer, math.inf, grid))
    assert norm == pytest.approx(float(expected_norm), rel=1e-12)
    for parameter, dense in ((layer.weight, weight), (layer.bias, bias)):
        torch.testing.assert_close(parameter.grad, dense.grad[parameter.shard.slices], **CLOSE)
