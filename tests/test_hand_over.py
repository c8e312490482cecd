"""A strategy made after another over the same weights: what it takes over, and in which precision."""

import pytest
import torch
from test_precision import BF16, FP32, Times
from test_replicas import KINDS, check_weights, network, serially, step, trainer_of

import hpctrain as ht
from hpctrain.data_parallel import DataParallel, MixedDataParallel, Precision, Zero1, Zero2, Zero3

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("first", "second"), [*(("zero3", kind) for kind in KINDS), ("zero1", "zero3"), ("local_sgd", "ddp")]
)
def test_a_method_goes_on_from_the_weights_of_another(world, first, second, shared):
    """Which a rank had in part, in memory of all ranks or until the next layer's turn, or which were the replica's own;
    one of them is frozen by then."""
    grid, expected, sgd = ht.Grid(data=2), network(), torch.optim.SGD
    grid.data.one_node &= shared
    model = ht.parallelize(network(), grid)
    hooks = hooks_of(model)
    never = {"every": 0} if first == "local_sgd" else {}  # of SGD's first steps the average is data parallelism
    step(trainer_of(model, grid, first, optimizer=sgd, **never), model, grid)
    serially(expected, optimizer=sgd)
    for each in (model, expected):
        each[0].weight.requires_grad_(False)
    expected.zero_grad()
    trainer = trainer_of(model, grid, second, optimizer=sgd)
    norms = [step(trainer, model, grid)[1] for _ in range(2)]
    if second == "local_sgd":  # which reports the norms of the replicas
        serially(expected, steps=2, optimizer=sgd)
    else:
        assert norms == pytest.approx(serially(expected, steps=2, optimizer=sgd), rel=1e-12)
    check_weights(model, expected)
    if second != "zero3":
        assert hooks_of(model) == hooks
        assert not any(hasattr(p, "gathered") for p in model.parameters())


def hooks_of(model):
    """How many of ZeRO-3's kinds there are: those of an earlier one would gather what nobody reads."""
    return sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules())


def take(model, replicas, value):
    replicas.zero_grad()
    replicas.enable_grad_sync()
    model(value).backward()
    replicas.finish_grad_sync()
    _, norm = replicas.loss_and_grad_norm(torch.zeros((), dtype=torch.float64))
    replicas.step(norm, 0.0)


@pytest.mark.parametrize("way", ["windows", "messages"])
@pytest.mark.parametrize("kind", [MixedDataParallel, Zero1, Zero2, Zero3])
def test_a_later_method_goes_on_from_the_masters(world, kind, way):
    """With masters again, with gradients of another dtype, and then without: not from what bfloat16 has rounded."""
    grid, model, small = ht.Grid(data=2), Times(), 2.0**-12
    grid.data.one_node &= way == "windows"

    def anew(precision):
        given = model if kind is Zero3 else [model.p]
        return kind(given, grid, torch.optim.SGD([model.p], lr=1.0), precision=precision)

    first = anew(Precision(BF16, FP32, FP32))
    for value in (1.0, small):
        take(model, first, value)
    take(model, anew(Precision(BF16, BF16, BF16)), small)
    assert model.p.dtype == BF16
    last = DataParallel([model.p], grid, torch.optim.SGD([model.p], lr=1.0))
    assert model.p.dtype == FP32
    assert model.p.tolist() == [-2 * (1 + 2 * small)] * 5
    take(model, last, small)
    assert model.p.tolist() == [-2 * (1 + 3 * small)] * 5


@pytest.mark.parametrize("kind", [MixedDataParallel, Zero1, Zero2])
def test_weights_changed_between_two_methods(world, kind):
    """Those that other code has written or replaced are taken as they are, and so are those that were frozen, beside
    others that nobody has touched since."""
    grid, small = ht.Grid(data=2), 2.0**-12
    models = [Times() for _ in range(4)]
    written, replaced, frozen, left = weights = [times.p for times in models]
    first = kind(weights, grid, torch.optim.SGD(weights, lr=1.0), precision=Precision(BF16, FP32, FP32))
    for value in (1.0, small):
        take(lambda value: sum(times(value) for times in models), first, value)
    with torch.no_grad():
        written[3] = 0.5
    replaced.data = torch.full((5,), 0.1)
    frozen.requires_grad_(False)
    DataParallel(weights, grid)
    exact = -2 * (1 + small)
    assert written.tolist() == [exact] * 3 + [0.5, exact]
    assert torch.equal(replaced, torch.full((5,), 0.1))
    assert (frozen.dtype, frozen.tolist()) == (BF16, [-2.0] * 5)
    assert left.tolist() == [exact] * 5
