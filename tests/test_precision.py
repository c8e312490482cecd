"""Mixed precision: what is kept and summed in float32 really is, and all ranks leave out the same steps."""

import contextlib
import dataclasses
import itertools
import math

import pytest
import torch
from training_checks import UNEVEN, batches, microbatches, serial

from hpctrain import Grid, RngKey
from hpctrain.checkpoint import Checkpointer, TrainingState
from hpctrain.config import DataParallelConfig, load_config
from hpctrain.data_parallel import MixedDataParallel, Precision, Zero1, Zero2, make, precision
from hpctrain.data_parallel.precision import GROWTH, SMALLEST, LossScale
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.models.gpt2 import GPT2
from hpctrain.shard import Shard
from hpctrain.train.dtypes import dtypes
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.trainer import Trainer

METHODS = ("ddp", "zero1", "zero2", "zero3")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def trainer_on(grid, method, precision, shape=UNEVEN, count=2, clip=1.0):
    model = GPT2(grid, shape, key=RngKey(3), dtype=FP32)
    optimizer = make_optimizer(model.parameters(), 0.1)
    replicas = make(DataParallelConfig(method), model, grid, optimizer, precision)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    return Trainer(model, grid, optimizer, count, max_norm=clip, strategy=replicas)


@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        ([], FP32, (FP32, FP32, FP32)),
        (["compute=bf16"], FP32, (BF16, FP32, FP32)),
        (["compute=fp16", "reduce=compute", "comm_dtype=fp32"], FP32, (FP16, FP16, FP16)),
        (["compute=bf16", "master=compute", "comm_dtype=bf16"], BF16, (BF16, FP32, BF16)),
        (["compute=fp64"], torch.float64, (torch.float64,) * 3),
    ],
)
def test_configured_dtypes(settings, given, expected):
    options = load_config(overrides=[f"precision.{setting}" for setting in settings]).precision
    made, precision = dtypes(options)
    assert (made, (precision.compute, precision.reduce, precision.comm_dtype)) == (given, expected)


def test_loss_scale_doubles_after_many_good_steps_and_has_an_end():
    """At the smallest one a gradient that is not finite is no matter of the scale, nor below it."""
    scaling = LossScale(4.0)
    assert [scaling.overflows(1.0, 1.0) for _ in range(GROWTH)] == [False] * GROWTH
    assert scaling.scale == 8.0
    assert scaling.overflows(1.0, math.inf)
    assert scaling.scale == 4.0
    assert not scaling.overflows(math.nan, math.nan)  # then it is not the scale
    assert [scaling.overflows(1.0, math.nan) for _ in range(14)] == [True] * 12 + [False] * 2
    assert scaling.scale == SMALLEST
    below = LossScale(SMALLEST / 4)
    assert not below.overflows(1.0, 1.0)
    assert not below.overflows(1.0, math.inf)
    assert below.scale == SMALLEST / 4


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["windows", "messages"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("reduce", "comm_dtype", "summed"),
    [
        # 256 + 1 is 256 in bfloat16, whose next number is 258
        (FP32, FP32, lambda p: 256 * p + 2 * p),  # nothing is lost
        (FP32, BF16, lambda p: 258 * p),  # 258 travels exactly
        (BF16, BF16, lambda p: torch.tensor(256.0 * p).to(BF16).item()),  # microbatches are added in bfloat16
    ],
)
def test_sums_are_taken_in_float32(world, method, reduce, comm_dtype, summed, way):
    """Three microbatches on each rank, of gradients 256, 1 and 1; the optimizer subtracts the sum."""
    grid = Grid(data=world.size)
    grid.data.one_node &= way == "windows"
    model = Times()
    p = model.p
    optimizer = torch.optim.SGD([p], lr=1.0)
    replicas = make(DataParallelConfig(method), model, grid, optimizer, Precision(BF16, reduce, comm_dtype))
    replicas.zero_grad()
    for last, value in enumerate((256.0, 1.0, 1.0)):
        if last == 2:
            replicas.enable_grad_sync()
        model(value).backward()
    replicas.finish_grad_sync()
    _, norm = replicas.loss_and_grad_norm(torch.zeros((), dtype=torch.float64))
    replicas.step(norm, 0.0)
    expected = summed(world.size)
    if method in ("zero2", "zero3"):  # which sums every microbatch over the ranks by itself
        expected = torch.tensor(258.0 * world.size)
        if reduce == BF16:
            first = torch.tensor(256.0 * world.size).to(BF16)
            expected = (first + world.size).to(BF16) + torch.tensor(float(world.size), dtype=BF16)
        expected = float(expected)
    held = [piece.local for bucket in replicas.buckets for piece in bucket.masters.pieces]
    assert all(weight.dtype == FP32 and torch.equal(weight, torch.full_like(weight, -expected)) for weight in held)
    assert norm == pytest.approx(expected * math.sqrt(5), rel=1e-6)
    assert p.dtype == BF16
    with p.gathered if method == "zero3" else contextlib.nullcontext():
        assert torch.equal(p, torch.full((5,), -expected).to(BF16))


class Times(torch.nn.Module):
    """Five weights, whose gradients are the number that it is given."""

    def __init__(self):
        super().__init__()
        self.p = torch.nn.Parameter(torch.zeros(5))
        self.p.shard = Shard((5,), (slice(0, 5),))

    def forward(self, number):
        return (self.p * number).sum()


GRIDS = {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 1, (1, 2, 1))], 4: [(2, 2, 1), (2, 1, (1, 1, 2))]}


@pytest.mark.mpi
@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_follows_float64(world, method):
    """Losses of the serial program, to the precision of the weights."""
    shape = dataclasses.replace(UNEVEN, layers=3)
    _, losses, norms = serial(shape, 1.0)
    for place in GRIDS[world.size]:
        grid = Grid(*place)
        trainer = trainer_on(grid, method, Precision(BF16, FP32, FP32), shape)
        got = [trainer.step(microbatches(grid, batch, step, 2)) for step, batch in enumerate(batches(shape))]
        assert [loss for loss, _ in got] == pytest.approx(losses, rel=3e-3)
        assert [norm for _, norm in got] == pytest.approx(norms, rel=3e-2)
        assert {p.dtype for p in trainer.model.parameters()} == {BF16}


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 4, 8)
@pytest.mark.parametrize("method", METHODS)
def test_an_overflow_is_left_out_on_all_ranks(world, method):
    """float16, with a scale under which the gradients of the first steps overflow."""
    grid = Grid(*{1: (1, 1, 1), 2: (2, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2)}[world.size])
    shape = dataclasses.replace(UNEVEN, layers=2)
    trainer = trainer_on(grid, method, Precision(FP16, FP32, FP32, loss_scale=2.0**22), shape)
    before = [weight for _, weight in whole_parameters(trainer.model, grid)]
    batch, changed = batches(shape)[0], []
    for step, scale in zip(range(16), itertools.count()):
        loss, norm = trainer.step(microbatches(grid, batch, step, 2))
        told = trainer.strategy.report()
        now = [weight for _, weight in whole_parameters(trainer.model, grid)]
        changed.append(world.bcast(any(not torch.equal(p, q) for p, q in zip(now, before))))
        assert changed[-1] == math.isfinite(norm) == ("skipped" not in told)
        assert loss == pytest.approx(math.log(23), rel=0.05)
        if changed[-1]:
            break
        assert told["loss_scale"] == 2.0 ** (21 - scale)
    assert changed[:1] == [False]
    assert changed[-1]


@pytest.mark.mpi
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_resumed_has_the_same_loss_scales(world, tmp_path, monkeypatch, method):
    """To the bit: of gradients so small that float16 rounds them by their scale. Every second good step doubles it, one
    of them after the first step since the resume, whose own first scale is another one."""
    monkeypatch.setattr(precision, "GROWTH", 2)
    root, grid = world.bcast(tmp_path), Grid(data=world.size)

    def made(scale):
        model = Times()
        optimizer = torch.optim.SGD([model.p], lr=1.0)
        return model, make(
            DataParallelConfig(method), model, grid, optimizer, Precision(FP16, FP32, FP32, loss_scale=scale)
        )

    def take(model, replicas, value):
        replicas.zero_grad()
        replicas.enable_grad_sync()
        (model(value) * replicas.loss_scale).backward()
        replicas.finish_grad_sync()
        loss, norm = replicas.loss_and_grad_norm(torch.zeros((), dtype=torch.float64))
        if not replicas.overflows(loss, norm):
            replicas.step(norm, 0.0)
        return replicas.loss_scale

    def weights(replicas):
        return [piece.local.detach().clone() for bucket in replicas.buckets for piece in bucket.masters.pieces]

    values, first = [(n + 11) * 2.0**-31 for n in range(8)], made(4.0)
    assert [take(*first, value) for value in values[:3]] == [4.0, 8.0, 8.0]
    assert Checkpointer(root, grid.comm, background=False).save(3, TrainingState(*first), {}) is None
    assert [take(*first, value) for value in values[3:]] == [16.0, 16.0, 32.0, 32.0, 64.0]

    # by the scale before each step, not by that after it
    used = [4.0, 4.0, 8.0, 8.0, 16.0, 16.0, 32.0, 32.0]
    rounded = [torch.tensor(value * scale).half().float() / scale for value, scale in zip(values, used)]
    expected = -world.size * sum(rounded)
    assert all(torch.equal(held, expected.expand(held.shape)) for held in weights(first[1]))

    again = made(1.0)
    assert Checkpointer(root, grid.comm).resume(TrainingState(*again)).step == 3
    assert again[1].loss_scale == 8.0
    assert [take(*again, value) for value in values[3:]] == [16.0, 16.0, 32.0, 32.0, 64.0]
    assert all(map(torch.equal, weights(again[1]), weights(first[1])))


class Counting(torch.optim.Optimizer):
    """Counts its steps in the group, as a number and as a tensor, and from the first on; subtracts the gradients times
    the counts."""

    def __init__(self, parameters):
        super().__init__(parameters, {"steps": 0, "tensor": torch.zeros(())})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["steps"] += 1
            group["tensor"] += 1
            group["made"] = group.get("made", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p -= p.grad * group["steps"] * group["tensor"] * group["made"]


@pytest.mark.mpi
@pytest.mark.parametrize("method", [MixedDataParallel, Zero1, Zero2])
def test_an_optimizer_counts_its_steps_in_its_group(world, method):
    """Three buckets, whose gradients are converted one after the other, are one step."""
    model = torch.nn.ModuleList([Times() for _ in range(3)])
    grid, weights = Grid(data=world.size), list(model.parameters())
    optimizer = Counting(weights)
    (group,) = optimizer.param_groups
    tensor = group["tensor"]
    replicas = method(weights, grid, optimizer, bucket_bytes=1, precision=Precision(BF16, BF16, BF16))
    assert len(replicas.buckets) == 3
    for count in (1, 2):
        replicas.zero_grad()
        replicas.enable_grad_sync()
        sum(times(1.0) for times in model).backward()
        replicas.finish_grad_sync()
        _, norm = replicas.loss_and_grad_norm(torch.zeros((), dtype=torch.float64))
        replicas.step(norm, 0.0)
        assert (group["steps"], group["tensor"].item(), group["made"]) == (count, count, count)
    assert group["tensor"] is tensor
    assert all(torch.equal(p, torch.full((5,), -(1.0 + 8.0) * world.size).to(BF16)) for p in weights)
