"""The data axis by the one line, in the loop of one rank: gradients averaged, torch's optimizers spread."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hpctrain as ht
from hpctrain.shard import split

pytestmark = pytest.mark.mpi

BATCH = 9
GRIDS = {
    1: [{}],
    2: [{"data": 2}],
    3: [{"data": 3}],
    4: [{"data": 2, "tensor": 2}, {"data": 4}],
}
LEVELS = (0, 1, 2, 3)


class Network(nn.Module):
    """Weights that are divided, whole, tied, frozen, and without a gradient; statistics over the whole batch."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)) for _ in range(2))
        self.norm, self.gate = nn.BatchNorm1d(6), nn.Bilinear(6, 6, 6)
        self.head, self.unused = nn.Linear(6, 11, bias=False), nn.Linear(3, 3)
        self.frozen, self.scale = nn.Linear(6, 6).requires_grad_(False), nn.Parameter(torch.ones(()))
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.frozen(self.table(ids))
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x.tanh())  # biases before it have gradients
        return self.head(x + self.gate(x, x) * self.scale)


def network():
    torch.manual_seed(2)
    return Network().double()


def batch(step):
    return torch.arange(BATCH) * (step + 3) % 11, torch.arange(BATCH) * (step + 5) % 11


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def clip_of_torch(model, optimizer):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clip_of_scaler(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(list(model.parameters()), 0.5, 1.0, foreach=False)


def clip_of_ours(model, optimizer):
    plain = not hasattr(model, "hpctrain_grid")
    return clip_of_torch(model, optimizer) if plain else ht.clip_grad_norm_(model, 0.5)


def weights_agree(model, serial, grid, **close):
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        for name, tensor in serial.state_dict().items():
            torch.testing.assert_close(gathered[name], tensor, msg=lambda text, name=name: f"{name}: {text}", **close)


@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize("zero", LEVELS)
@pytest.mark.parametrize(
    ("optimizer", "clip"), [("sgd", clip_of_torch), ("adamw", clip_of_scaler), ("adamw", clip_of_ours)]
)
def test_a_loop_of_one_rank(world, zero, optimizer, clip):
    """Uneven batches. In every other step two backwards are added up, and the first is looked at in between; the last
    step goes on with the gradients of the one before."""
    for sizes in GRIDS[world.size]:
        grid = ht.Grid(**sizes)
        serial = network()
        model = ht.parallelize(copy.deepcopy(serial), grid, zero=zero)
        mine = split(BATCH, grid.data.size, grid.data.rank)
        sides = [(serial, slice(None), 1), (model, mine, grid.data.size)]
        optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m, *_ in sides]
        for step in range(4):
            norms = []
            for (m, rows, replicas), each in zip(sides, optimizers):
                if step != 3:
                    each.zero_grad(set_to_none=step != 2)
                for part in range(1 + step % 2):
                    if part:
                        norms.append(float(nn.utils.clip_grad_norm_(m.parameters(), 1.0)))
                    ids, targets = (x[rows] for x in batch(step + part))
                    (F.cross_entropy(m(ids), targets, reduction="sum") * replicas / BATCH).backward()
                norms.append(float(clip(m, each)))
                each.step()
            assert norms[len(norms) // 2 :] == pytest.approx(norms[: len(norms) // 2], rel=1e-11)
        weights_agree(model, serial, grid, rtol=1e-10, atol=1e-11)


def parallel(grid, zero):
    serial = network()
    return serial, ht.parallelize(copy.deepcopy(serial), grid, zero=zero)


def loss_of(model, grid, step):
    """The mean over the replica's own batch."""
    ids, targets = (x[:8] for x in batch(step))
    return (
        F.cross_entropy(model(ids), targets)
        if grid is None
        else F.cross_entropy(model(ids[grid.data.rank :: grid.data.size]), targets[grid.data.rank :: grid.data.size])
    )


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("zero", LEVELS)
def test_closures_and_two_optimizers(world, zero):
    """As Lightning steps; one optimizer for the table alone, whose state was loaded."""
    grid = ht.Grid(**GRIDS[world.size][0])
    serial, model = parallel(grid, zero)
    for m, where in ((serial, None), (model, grid)):
        table = torch.optim.AdamW([m.table.weight], lr=0.02)
        rest = torch.optim.SGD([p for p in m.parameters() if p is not m.table.weight], lr=0.1, momentum=0.5)
        for step in range(3):

            def closure(m=m, where=where, step=step, optimizers=(table, rest)):
                for each in optimizers:
                    each.zero_grad()
                loss = loss_of(m, where, step)
                loss.backward()
                return loss

            assert rest.step(closure).item() > 0
            table.step()
        assert all(p is q for p, q in zip(table.param_groups[0]["params"], [m.table.weight]))
    weights_agree(model, serial, grid, rtol=1e-10, atol=1e-11)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("zero", LEVELS)
def test_a_replica_without_samples(world, zero):
    grid = ht.Grid(**GRIDS[world.size][0])
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    model = ht.parallelize(copy.deepcopy(serial), grid, zero=zero)
    x = torch.ones(2, 3, dtype=torch.float64)
    for m, replicas in ((serial, 1), (model, grid.data.size)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            if m is serial or grid.data.rank == 0:
                (m(x).square().sum() * replicas / 2).backward()
            if m is serial:
                nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            else:
                ht.clip_grad_norm_(m, 0.1)
            optimizer.step()
    weights_agree(model, serial, grid, rtol=1e-11, atol=1e-12)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_states_gathered_and_given_back(world, zero):
    """To a plain model, to a tensor axis, and to replicas that spread them otherwise; all train on as one rank."""
    grid, others = ht.Grid(**GRIDS[world.size][0]), [ht.Grid(tensor=world.size), ht.Grid(data=world.size)]
    serial, model = parallel(grid, zero)
    theirs, ours = (adamw_of_groups(m) for m in (serial, model))
    for step in range(2):
        one_step(serial, None, theirs, step)
        one_step(model, grid, ours, step)
    gradients, state = ht.gather_gradients(model), ht.gather_optimizer_state(model, ours)
    if grid.rank == 0:
        expected = {name: p.grad for name, p in serial.named_parameters() if p.grad is not None}
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(state, theirs.state_dict(), rtol=1e-9, atol=1e-11)
    state, weights = world.bcast((state, ht.gather_state_dict(model)))
    plain = network()
    plain.load_state_dict(weights)
    again = ht.parallelize(copy.deepcopy(plain), others[0])
    spread = ht.parallelize(copy.deepcopy(plain), others[1], zero=zero % 3 + 1)
    sides = [(plain, None), (again, None), (spread, others[1]), (model, grid)]
    optimizers = [*(adamw_of_groups(m) for m, _ in sides[:3]), ours]
    optimizers[0].load_state_dict(copy.deepcopy(state))
    for (m, _), optimizer in zip(sides[1:], optimizers[1:]):
        if m is spread and zero == 1:  # whose parts are whole before they are spread
            optimizer.load_state_dict(copy.deepcopy(state))
        else:
            ht.load_optimizer_state(m, optimizer, state)
    for step in range(2, 4):
        one_step(serial, None, theirs, step)
        for (m, where), optimizer in zip(sides, optimizers):
            one_step(m, where, optimizer, step)
    torch.testing.assert_close(dict(plain.state_dict()), dict(serial.state_dict()), rtol=1e-9, atol=1e-11)
    for m, _ in sides[1:]:
        weights_agree(m, serial, m.hpctrain_grid, rtol=1e-9, atol=1e-11)


def adamw_of_groups(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[::2]}, {"params": trained[1::2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


def one_step(model, grid, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, grid, step).backward()
    optimizer.step()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("zero", LEVELS)
def test_what_is_refused(world, zero):
    grid = ht.Grid(**GRIDS[world.size][0])
    serial, model = parallel(grid, zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def refused(text, call, *arguments):
        with pytest.raises(ValueError, match=text):
            call(*arguments)

    with model.no_sync():
        loss_of(model, grid, 0).backward()
    refused(r"sums the gradients of replicas, and ht.parallelize\(zero=...\) averages them", ht.sync_gradients, model)
    refused("for a loop of one's own: leave zero out", lambda: ht.Trainer(model, grid, optimizer, loss=loss_of))
    if zero == 0:
        return
    refused("a whole of the gradient of", torch.randn_like, model.gate.bias.grad)
    optimizer.step()
    refused(r"state of the optimizer is spread .*: save ht\.gather_optimizer_state", optimizer.state_dict)
    refused("must treat every element of a weight by itself", torch.optim.LBFGS(model.parameters()).step, lambda: 0)
    refused("'gate.bias' is spread over the replicas by", setattr, model.gate.bias, "grad", torch.zeros(6).double())
    if zero == 3:
        refused(r"save ht.gather_state_dict\(model\)", model.state_dict)
        refused("call load_state_dict before ht.parallelize", model.load_state_dict, serial.state_dict())
        with torch.no_grad():
            model.gate.bias.mul_(2)  # by every replica, of one memory
        refused("changed by other code than an optimizer's step", ht.gather_state_dict, model)
    else:
        model.apply(lambda module: None)  # whole weights for a moment
        optimizer.step()
        with torch.no_grad():
            model.gate.bias.mul_(2)  # by every replica
        optimizer.step()
        copies = grid.data.comm.allgather(model.gate.bias.detach().as_subclass(torch.Tensor))
        assert all(torch.equal(copies[0], other) for other in copies)
    model.frozen.requires_grad_(True)
    loss_of(model, grid, 0).backward()
    for each in (optimizer, torch.optim.SGD(model.frozen.parameters(), 0.1)):  # and one of nothing that was trained
        refused("a weight that was frozen in ht.parallelize.* requires its gradient now", each.step)
    model.frozen.requires_grad_(False)
    model.float()
    refused("was replaced or, with zero=3, changed by other code", optimizer.step)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [0, 1])
def test_a_layer_added_afterwards(world, zero):
    grid = ht.Grid(data=2)
    model = ht.parallelize(nn.Sequential(nn.Linear(4, 4)), grid, zero=zero)
    model.append(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"'1\.weight' is of a layer that was added after .*add it before"):
        optimizer.step()


@pytest.mark.parametrize("zero", [None, *LEVELS])
def test_a_weight_beside_the_model(world, zero):
    """Nobody averages its gradient; on a tensor axis it is the whole one on every rank, as is that of a frozen one."""
    beside = nn.Linear(4, 1)
    for sizes in ({"tensor": world.size}, *GRIDS[world.size]):
        model = ht.parallelize(nn.Sequential(nn.Linear(4, 4)), ht.Grid(**sizes), zero=zero)
        for frozen in (True, False):
            beside.requires_grad_(not frozen)
            optimizer = torch.optim.SGD([*model.parameters(), *beside.parameters()], 0.1)
            beside(model(torch.ones(1, 4))).sum().backward()
            if zero is None:
                ht.sync_gradients(model)
            if frozen or "data" not in sizes:
                optimizer.step()
                optimizer.zero_grad()
            else:
                with pytest.raises(ValueError, match=r"of shape \(1, 4\) that is of no .* before ht\.parallelize"):
                    optimizer.step()


@pytest.mark.ranks(1, 2)
def test_other_values(world):
    for zero in (4, -1, True, "2"):
        with pytest.raises(ValueError, match="zero must be None, 0, 1, 2 or 3, got"):
            ht.parallelize(nn.Linear(2, 2), ht.Grid(data=world.size), zero=zero)


def test_what_is_read_of_a_gradient_is_the_mean(world):
    torch.manual_seed(1)
    serial, samples = nn.Linear(3, 2).double(), torch.randn(world.size, 3, dtype=torch.float64)
    model = ht.parallelize(copy.deepcopy(serial), ht.Grid(data=world.size), zero=0)
    serial(samples).square().sum(1).mean().backward()
    model(samples[world.rank]).square().sum().backward()
    torch.testing.assert_close(torch.Tensor(model.weight.grad * 1.0), serial.weight.grad)
