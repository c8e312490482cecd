"""What torch and its users compute from gradients in a loop of their own: of the whole gradient, or refused."""

import copy
import io
import math

import pytest
import torch
from parallelize_checks import numbers
from torch import nn

import hpctrain as ht
from hpctrain.shard import split

pytestmark = pytest.mark.mpi

BATCH = 6
GRIDS = {
    1: [{}],
    2: [{"tensor": 2}, {"data": 2}],
    4: [{"tensor": (2, 1, 2)}, {"data": 2, "tensor": 2}],
}


class Network(nn.Module):
    """Weights divided by rows and by columns, some that are whole, and ranks that hold nothing."""

    def __init__(self):
        super().__init__()
        self.table, self.body, self.gate = nn.Embedding(11, 6), nn.Linear(6, 5), nn.Bilinear(5, 5, 4)
        self.norm, self.head, self.unused = nn.LayerNorm(4), nn.Linear(4, 1), nn.Linear(2, 2)
        self.overflow = False

    def forward(self, ids):
        x = self.table(ids)
        if self.overflow:  # in the gradient of one row of the table
            x.register_hook(lambda grad: grad.masked_fill((ids == 3).unsqueeze(-1), math.inf))
        x = self.body(x).tanh()
        return self.head(self.norm(self.gate(x, x)))


def network():
    torch.manual_seed(2)
    return Network().double()


def ids(step):
    return torch.arange(BATCH) * (step + 2) % 11


def both(sizes):
    grid = ht.Grid(**sizes)
    serial = network()
    return grid, serial, ht.parallelize(copy.deepcopy(serial), grid, replicate=["gate"])


def backward(model, grid, step, sync=True, scale=lambda loss: loss):
    """This replica's part of the batch where there is a grid."""
    rows = split(BATCH, grid.data.size, grid.data.rank) if grid else slice(None)
    scale(10 * model(ids(step)[rows]).square().sum() / BATCH).backward()
    if grid and sync:
        ht.sync_gradients(model)


def check_weights(grid, model, serial):
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        torch.testing.assert_close(gathered, dict(serial.state_dict()), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf, 0.5, 0.0])
@pytest.mark.parametrize("foreach", [None, True])
def test_clip_grad_norm(world, order, foreach):
    """torch.nn.utils.clip_grad_norm_, which Lightning and Hugging Face's Trainer call."""
    for sizes in GRIDS[world.size]:
        grid, serial, model = both(sizes)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, serial))
        for step in range(3):
            norms = []
            for m, optimizer, where in ((serial, theirs, None), (model, ours, grid)):
                optimizer.zero_grad(set_to_none=step == 1)
                backward(m, where, step)
                norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.3, order, foreach=foreach))
                optimizer.step()
            torch.testing.assert_close(norms[1], norms[0], rtol=1e-11, atol=0)
            assert type(norms[1]) is torch.Tensor
        check_weights(grid, model, serial)


WRITTEN_OUT = {
    "norm": lambda g: g.data.norm(2),
    "norm of a detached": lambda g: g.detach().float().norm(),
    "squares": lambda g: (g * g).sum() + (g**2).sum(),
    "largest": lambda g: g.detach().abs().max() - g.view(-1).min(),
    "not numbers": lambda g: torch.isnan(g).any() | g.isfinite().all(),
    "of whom": lambda g: torch.linalg.vector_norm(g, 3) + torch.linalg.norm(g) + torch.norm(g, p="fro"),
}


@pytest.mark.parametrize("case", WRITTEN_OUT)
def test_numbers_of_gradients(world, case):
    for sizes in GRIDS[world.size]:
        grid, serial, model = both(sizes)
        backward(serial, None, 0)
        backward(model, grid, 0)
        for (name, p), q in zip(serial.named_parameters(), model.parameters()):
            if p.grad is not None:
                expected, got = WRITTEN_OUT[case](p.grad), WRITTEN_OUT[case](q.grad)
                torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9, msg=f"{name}: {got} for {expected}")


@pytest.mark.parametrize("sync_first", [True, False])
def test_scaler(world, sync_first):
    """torch.amp.GradScaler: where one rank alone has a gradient that overflows, all leave the step out."""
    for sizes in GRIDS[world.size]:
        grid, serial, model = both(sizes)
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, serial))
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
        for step in range(3):
            for m, optimizer, scaler, where in ((serial, theirs, scalers[0], None), (model, ours, scalers[1], grid)):
                optimizer.zero_grad()
                m.overflow = step == 1
                backward(m, where, step, sync_first, scaler.scale)
                scaler.unscale_(optimizer)
                if where and not sync_first:
                    ht.sync_gradients(m)
                scaler.step(optimizer)
                scaler.update()
            assert [scaler.get_scale() for scaler in scalers] == [(8.0, 4.0, 4.0)[step]] * 2
        check_weights(grid, model, serial)


REFUSED = {
    "mean": lambda g: g.mean(),
    "sum along a dim": lambda g: g.sum(0),
    "norm along a dim": lambda g: torch.norm(g, dim=-1),
    "nuclear norm": lambda g: torch.linalg.norm(g, "nuc"),
    "matrix norm": lambda g: torch.linalg.norm(g, 1),
    "product": lambda g: g.detach() @ g.T,
    "inner product": lambda g: torch.dot(g.view(-1), g.flatten()),
    "row": lambda g: g[:1],
    "one of several": lambda g: torch.cat([g.flatten(), g.flatten()]).norm(),
    "array": lambda g: g.cpu().numpy(),
    "another library's": torch.from_dlpack,
    "of what was made of it": lambda g: (0.9 * g + torch.ones_like(g)).std(),
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("case", REFUSED)
def test_refused(world, case):
    """On all ranks alike."""
    torch.manual_seed(0)
    grid = ht.Grid(tensor=world.size)
    model = ht.parallelize(nn.Sequential(nn.Linear(8, 8)), grid)
    model(torch.ones(1, 8)).sum().backward()
    if world.size == 1:
        REFUSED[case](model[0].weight.grad)
        return
    with pytest.raises(ValueError) as refused:
        REFUSED[case](model[0].weight.grad)
    what = "several gradients put together" if case == "one of several" else "the gradient of '0.weight'"
    assert f" of {what} would be that of the part that this rank holds; ht.clip_grad_norm_ gives" in str(refused.value)
    assert len(set(world.allgather(str(refused.value)))) == 1
    part = model[0].weight.grad.as_subclass(torch.Tensor)
    assert float(part.mean()) == 1


ELEMENTWISE = [
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"
]  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if n in ("AdamW", "SGD") else pytest.param(n, marks=pytest.mark.ranks(1, 2)) for n in ELEMENTWISE]
)
def test_optimizers(world, name):
    """In torch's loops over weights and over lists; gradients are saved as those of any model."""
    kind = getattr(torch.optim, name)
    for foreach in (False, True):
        grid, serial, model = both(GRIDS[world.size][0])
        ours, theirs = (kind(m.parameters(), lr=0.01, foreach=foreach) for m in (model, serial))
        for step in range(3):
            for m, optimizer, where in ((serial, theirs, None), (model, ours, grid)):
                optimizer.zero_grad()
                backward(m, where, step)
                optimizer.step()
        check_weights(grid, model, serial)
        saved = io.BytesIO()
        torch.save([[p.grad for p in model.parameters()], copy.deepcopy(model.head.bias.grad)], saved)
        saved.seek(0)
        assert len(torch.load(saved, weights_only=True)) == 2


class LAMB(torch.optim.SGD):
    pass


class Own(LAMB):
    pass


MIXING = {
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": lambda parameters: torch.optim.LBFGS(list(parameters)),
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2]),
    "Own": Own,
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", MIXING)
def test_optimizers_that_mix_elements(world, name):
    for sizes in GRIDS[world.size]:
        grid, serial, model = both(sizes)
        ours, theirs = (MIXING[name](m.parameters()) for m in (model, serial))

        def closure(m=model, where=grid):
            m.zero_grad()
            backward(m, where, 0)
            return torch.zeros(())

        def plain(m=serial):
            return closure(m, None)

        if grid.tensor.size > 1:
            with pytest.raises(ValueError) as refused:
                ours.step(closure)
            assert f"by itself, got {name}, which needs " in str(refused.value)
            assert "replicate=[...]" in str(refused.value)
            assert len(set(world.allgather(str(refused.value)))) == 1
        else:
            for step, optimizer in ((plain, theirs), (closure, ours)):
                optimizer.step(step)
        check_weights(grid, model, serial)


def test_replicas_that_are_not_summed(world):
    """A loop without ht.sync_gradients would train each replica by itself."""
    for sizes in ({"data": world.size}, GRIDS[world.size][-1]):
        grid, _, model = both(sizes)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        calls = {
            "optimizer.step()": optimizer.step,
            "ht.clip_grad_norm_": lambda model=model: ht.clip_grad_norm_(model, 1.0),
            "linalg_vector_norm of the gradient of 'table.weight'": (
                lambda model=model: nn.utils.clip_grad_norm_(model.parameters(), 1)
            ),
        }
        for before, call in calls.items():
            optimizer.zero_grad()
            backward(model, grid, 0, sync=False)
            if grid.data.size > 1:
                with pytest.raises(ValueError) as refused:
                    call()
                assert str(refused.value) == (
                    "the gradients of the replicas are not summed yet; call ht.sync_gradients(model) after the last "
                    f"backward, before {before}, or average them with zero=0 of ht.parallelize"
                )
            ht.sync_gradients(model)
            call()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("zero", [None, 0])
def test_gradients_that_are_there_before_backward(world, zero):
    """Zeros that a script made know of their grid, and of the replicas'."""
    for sizes in GRIDS[world.size]:
        grid, serial, found = ht.Grid(**sizes), network(), []
        model = ht.parallelize(copy.deepcopy(serial), grid, replicate=["gate"], zero=zero)
        replicas = 1 if zero is None else grid.data.size
        for m, where in ((serial, None), (model, grid)):
            for p in m.parameters():
                p.grad = torch.zeros_like(p)
            optimizer, scaler = torch.optim.SGD(m.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1.0)
            scaler.scale(torch.zeros(()))
            scaler.unscale_(optimizer)
            backward(m, where, 0, zero is None, lambda loss, times=replicas if where else 1: loss * times)
            found.append(nn.utils.clip_grad_norm_(m.parameters(), 0.1))
        torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("sizes", "zero"), [({"tensor": 2}, None), ({"data": 2}, 1)])
def test_a_norm_that_is_no_number(world, sizes, zero):
    """All gradients are NaN then, as torch's function makes them."""
    torch.manual_seed(0)
    model = ht.parallelize(nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)]), ht.Grid(**sizes), zero=zero)
    x = torch.ones(2, 3)
    (model[0](x).sum() + math.nan * model[1](x).sum()).backward()
    assert ht.clip_grad_norm_(model, 1.0).isnan()
    for p in model.parameters():
        assert p.grad.as_subclass(torch.Tensor).isnan().all()


def test_weights_that_thaw(world):
    """A weight that was frozen at first is marked too."""
    torch.manual_seed(0)
    grid = ht.Grid(tensor=world.size)
    serial = nn.Linear(3, 8).double().requires_grad_(False)
    model = ht.parallelize(copy.deepcopy(serial), grid)
    assert not any(p.requires_grad for p in model.parameters())
    for m in (serial, model):
        m.requires_grad_(True)
        m(numbers(2, 3)).square().sum().backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (serial, model)]
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-12, atol=0)


def test_what_is_changed_in_place_stays_itself(world):
    """The state of an optimizer does not become a gradient because one is added to it."""
    torch.manual_seed(0)
    model = ht.parallelize(nn.Linear(3, 8).double(), ht.Grid(tensor=world.size))
    model(numbers(2, 3)).square().sum().backward()
    gradient = model.weight.grad
    state = torch.zeros(gradient.shape, dtype=torch.float64)
    for changed in (state.add_(gradient), torch.mul(gradient, 2, out=state), state.lerp_(gradient, 0.5)):
        assert changed is state
    assert gradient.mul_(2) is gradient
