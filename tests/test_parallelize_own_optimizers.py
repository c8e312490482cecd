"""Optimizers of one's own where weights are shared out: of whole weights, or refused; and what files take of them."""

import copy
import io

import pytest
import torch
from parallelize_checks import CLOSE
from test_parallelize_zero import GRIDS, loss_of, parallel, weights_agree

import hpctrain as ht

pytestmark = pytest.mark.mpi


class TrustRatio(torch.optim.Optimizer):
    """As people write it: by layers (You et al., 2017), matrices alone decayed, all at once or one by one."""

    def __init__(self, parameters, together):
        super().__init__(parameters, {})
        self.together = together

    @torch.no_grad()
    def step(self):
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in weights:
            if not self.state[p]:
                self.state[p] = {"m": torch.zeros_like(p), "first": p.norm()}
        gradients = [p.grad for p in weights]
        if self.together:
            gradients = torch._foreach_mul(gradients, 0.5)
        for p, g in zip(weights, gradients):
            state = self.state[p]
            state["m"].mul_(0.9).add_(g, alpha=0.1)
            update = state["m"] + 0.01 * p if p.ndim > 1 else state["m"] / p.shape.numel()
            rms = update.norm() / p.numel() ** 0.5
            p.add_(update * (p.norm() + state["first"]) / (rms + g.abs().max()), alpha=-0.001)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("together", [False, True])
def test_trust_ratios(world, zero, together):
    """The state is gathered and given back in between."""
    for sizes in GRIDS[world.size]:
        grid = ht.Grid(**sizes)
        serial, model = parallel(grid, zero)
        states = []
        for m, where in ((serial, None), (model, grid)):
            optimizer = TrustRatio(m.parameters(), together)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(m, where, step).backward()
                optimizer.step()
                if step == 1:
                    state = ht.gather_optimizer_state(m, optimizer) if where else copy.deepcopy(optimizer.state_dict())
                    states.append(state)
                    if where:
                        optimizer = TrustRatio(m.parameters(), together)
                        ht.load_optimizer_state(m, optimizer, world.bcast(state))
        if grid.rank == 0:
            torch.testing.assert_close(states[1], states[0], **CLOSE)
        weights_agree(model, serial, grid, **CLOSE)


class Growing(torch.optim.Optimizer):
    """Steps whose length is among its groups' options; it may raise in one of them."""

    def __init__(self, parameters):
        super().__init__(parameters, {"length": 0.0})
        self.is_broken = False

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            group["length"] += 0.01
            for p in group["params"]:
                if p.grad is not None:
                    if self.is_broken:
                        raise ArithmeticError("broken")
                    p.sub_(p.grad, alpha=group["length"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_that_is_broken_off(world, zero):
    """The optimizer's groups have its weights, and the next steps are right."""
    grid = ht.Grid(data=2)
    serial, model = parallel(grid, zero)
    for m, where in ((serial, None), (model, grid)):
        optimizer = Growing(m.parameters())
        for step in range(4):

            def closure(m=m, where=where, step=step, optimizer=optimizer):
                optimizer.zero_grad()
                loss_of(m, where, step).backward()

            closure()
            optimizer.is_broken = step == 1
            if step == 1:
                with pytest.raises(ArithmeticError):
                    optimizer.step()
                optimizer.param_groups[0]["length"] = 0.02
            else:
                optimizer.step(closure if step == 3 else None)
            assert {*optimizer.param_groups[0]["params"]} == {*m.parameters()}
        assert optimizer.param_groups[0]["length"] == pytest.approx(0.04)
    weights_agree(model, serial, grid, **CLOSE)


def alone(code):
    """Of an optimizer that does this, and nothing else."""

    class Alone(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                code(p)

    return Alone


REFUSED = {
    "ndim of 'gate.weight'": lambda p: p.grad.ndim,
    "size of 'gate.weight'": lambda p: p.grad.size(0),
    "numel of 'gate.weight'": lambda p: p.grad.norm() / p.grad.numel(),
    "T of 'gate.weight'": lambda p: p + p.T,
    "matmul of the gradient of 'gate.weight'": lambda p: p.grad @ p.grad,
    "mul_ brings what this rank holds of 'gate.weight', .*side by side": lambda p: p.grad.mul_(torch.ones(p.shape)),
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("text", REFUSED)
def test_what_needs_the_shape(world, text):
    grid = ht.Grid(**GRIDS[world.size][0])
    _, model = parallel(grid, 1)
    loss_of(model, grid, 0).backward()
    with pytest.raises(ValueError, match=text):
        alone(REFUSED[text])([model.gate.weight], {}).step()


@pytest.mark.ranks(2)
def test_parts_of_divided_weights(world):
    """Without replicas: lists of them are known as parts, and say how many elements the whole has."""
    grid = ht.Grid(tensor=world.size)
    serial, model = parallel(grid, None)
    found = []
    for m, where in ((serial, None), (model, grid)):
        loss_of(m, where, 0).backward()
        weights = [m.blocks[0][0].weight, m.table.weight]
        doubled = [*torch._foreach_mul([p.grad for p in weights], 2.0)]
        with torch.no_grad():
            doubled += [*torch._foreach_mul(weights, 3.0), *torch._foreach_add(weights, [p.grad for p in weights])]
        found.append(torch.stack([x.norm() for x in doubled]))
    torch.testing.assert_close(found[1], found[0], **CLOSE)
    assert weights[1].grad.numel() == weights[1].numel() == 66


@pytest.mark.ranks(2)
def test_loaded_states_are_parts(world):
    """Of a plain optimizer that went on from there."""
    grid = ht.Grid(tensor=2)
    serial, model = parallel(grid, None)
    theirs, ours = (TrustRatio(m.parameters(), False) for m in (serial, model))
    loss_of(serial, None, 0).backward()
    theirs.step()
    model.load_state_dict(serial.state_dict())
    ht.load_optimizer_state(model, ours, copy.deepcopy(theirs.state_dict()))
    for m, where, optimizer in ((serial, None, theirs), (model, grid, ours)):
        optimizer.zero_grad()
        loss_of(m, where, 1).backward()
        optimizer.step()
    weights_agree(model, serial, grid, **CLOSE)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: TrustRatio(p, False)])
def test_files_refuse_parts_of_states(world, make):
    """They are saved in memory, and taken back, as ordinary tensors."""
    grid = ht.Grid(tensor=2)
    _, model = parallel(grid, None)
    optimizer = make(model.parameters())

    def step(number):
        optimizer.zero_grad()
        loss_of(model, grid, number).backward()
        optimizer.step()

    step(0)
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="a file cannot hold: save ht.gather_optimizer_state"):
        torch.save({"optimizer": optimizer.state_dict()}, io.BytesIO())
    after = []
    for _ in range(2):
        step(1)
        after.append(ht.gather_state_dict(model))
        model.load_state_dict(weights)
        optimizer = make(model.parameters())
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert not any(hasattr(value, "refused") for state in optimizer.state.values() for value in state.values())
    assert all(torch.equal(value, after[1][name]) for name, value in after[0].items())
    torch.save(ht.gather_optimizer_state(model, optimizer), io.BytesIO())
