"""Weights of one node: each gradient is that of the version of its forward, and its age is known."""

import pytest
import torch
from torch import nn

from hpctrain.pipeline import AMPNet
from hpctrain.pipeline.ampnet import Weights


def weights_of(options, lr=0.5, value=4.0):
    parameter = nn.Parameter(torch.tensor(value, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr)
    return Weights({"w": parameter}, optimizer, options), parameter, optimizer


def forward(weights, instance):
    version, values = weights.take(instance)
    return version, values["w"], values["w"] ** 2


def backward(weights, instance, taken):
    version, w, y = taken
    weights.give((instance,), version, list(torch.autograd.grad(y, [w])))


def test_a_gradient_is_that_of_its_forward():
    """Loss w²; three forwards, then their gradients with an update between: all of weights 4, applied one by one."""
    weights, parameter, _ = weights_of(AMPNet(4))
    taken = [forward(weights, i) for i in range(3)]
    backward(weights, 0, taken[0])
    late = forward(weights, 3)  # updates: 4 - 0.5·8 = 0
    assert parameter.item() == 0.0
    backward(weights, 1, taken[1])
    backward(weights, 3, late)  # of the version that is the newest, 0
    assert forward(weights, 4)[0] == 3  # updates, as often as with one at a time: 0 - 0.5·8 = -4, and -4 - 0.5·0
    assert parameter.item() == -4.0
    assert weights.staleness == {0: 1, 1: 2}
    backward(weights, 2, taken[2])
    weights.finish()
    assert parameter.item() == -8.0
    assert weights.staleness == {0: 1, 1: 2, 3: 1}
    assert parameter.grad is None  # other nodes' updates pass over it
    weights.leave_gradient()
    assert parameter.grad.item() == 8.0  # the last one
    parameter.grad = None
    weights.finish()
    weights.leave_gradient()
    assert parameter.grad is None  # there was no update


def test_weights_under_way_are_left_alone():
    weights, parameter, _ = weights_of(AMPNet(4), lr=0.25)
    memory = parameter.data_ptr()
    backward(weights, 0, forward(weights, 0))
    under_way = forward(weights, 1)  # updates: 4 - 0.25·8 = 2
    assert parameter.data_ptr() == memory  # nobody needed the old ones
    backward(weights, 2, forward(weights, 2))
    newest = forward(weights, 3)  # updates: 2 - 0.25·4 = 1
    assert parameter.data_ptr() != memory
    assert under_way[1].item() == 2.0
    backward(weights, 1, under_way)  # an old one; the newest is still needed
    forward(weights, 4)  # updates: 1 - 0.25·4 = 0
    assert (newest[1].item(), parameter.item()) == (1.0, 0.0)


def test_an_update_is_by_instances_that_are_done():
    """Instance 0 has two messages; the gradient of one waits for the other, and that of instance 1 does not."""
    weights, parameter, _ = weights_of(AMPNet(4), lr=0.25)
    first, second = forward(weights, 0), forward(weights, 0)
    backward(weights, 0, first)
    other = forward(weights, 1)
    assert weights.updates == 0
    backward(weights, 1, other)
    forward(weights, 2)  # updates: 4 - 0.25·8 = 2
    assert (weights.updates, parameter.item()) == (1, 2.0)
    backward(weights, 0, second)
    forward(weights, 3)  # updates: 2 - 0.25·16
    assert (weights.updates, parameter.item()) == (2, -2.0)
    assert weights.staleness == {0: 1, 1: 2}


@pytest.mark.parametrize("correct", [False, True])
def test_the_rate_is_divided_by_the_age(correct):
    """Two gradients of age 0 (rate 0.25) and then one of age 2, at half the rate."""
    weights, parameter, optimizer = weights_of(AMPNet(4, 1, correct), lr=0.25)
    old = forward(weights, 0)
    for instance in (1, 2, 3):
        taken = forward(weights, instance)
        if instance < 3:
            backward(weights, instance, taken)
    before = parameter.item()
    backward(weights, 0, old)
    forward(weights, 4)
    assert weights.staleness == {0: 2, 2: 1}
    assert parameter.item() == before - 0.25 * 8.0 / (2 if correct else 1)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_weight_without_gradient_is_taken_as_zero():
    weights, parameter, _ = weights_of(AMPNet(1))
    version, *_ = forward(weights, 0)
    weights.give((0,), version, [None])
    weights.finish()
    weights.leave_gradient()
    assert parameter.item() == 4.0
    assert parameter.grad.item() == 0.0


def test_nodes_without_trained_weights_take_no_step():
    """The optimizer's is one for all nodes of a rank: its hooks and counters would see a step of nobody."""
    _, parameter, optimizer = weights_of(AMPNet(4))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    steps = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(parameter.grad))
    for weights in (Weights({}, optimizer, AMPNet(4)), Weights({"w": frozen}, optimizer, AMPNet(4))):
        for instance in range(3):
            version, _ = weights.take(instance)
            weights.give((instance,), version, [])
        weights.finish()
        assert weights.updates == 3
        assert weights.staleness == {0: 3}
    assert steps == []
