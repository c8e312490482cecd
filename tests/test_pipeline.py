"""The executor, and the schedules it runs: GPipe, 1F1B and forwards alone."""

import itertools

import pytest
import torch

from hpctrain.pipeline import Executor, forward_only, gpipe, interleaved, one_f_one_b


def letters(schedule):
    """Each rank's work as text: f0 b1, with the microbatch."""
    return [
        " ".join(f"{a.kind[0]}{a.microbatch}" for a in order if a.kind in ("forward", "backward"))
        for order in schedule.order
    ]


def test_one_f_one_b_by_hand():
    assert letters(one_f_one_b(4, 4)) == [
        "f0 f1 f2 f3 b0 b1 b2 b3",
        "f0 f1 f2 b0 f3 b1 b2 b3",
        "f0 f1 b0 f2 b1 f3 b2 b3",
        "f0 b0 f1 b1 f2 b2 f3 b3",
    ]
    assert letters(one_f_one_b(3, 1)) == ["f0 b0"] * 3
    assert letters(one_f_one_b(1, 2)) == ["f0 b0 f1 b1"]
    assert letters(gpipe(2, 3)) == ["f0 f1 f2 b0 b1 b2"] * 2


@pytest.mark.parametrize(("stages", "microbatches"), list(itertools.product(range(1, 9), (1, 2, 3, 5, 8, 17))))
def test_every_size_is_complete_and_safe(stages, microbatches):
    """All work once, few microbatches held, every message paired, and no deadlock when all messages block."""
    schedule = one_f_one_b(stages, microbatches)
    for stage, rank in enumerate(schedule.order):
        work = [(a.kind, a.microbatch) for a in rank if a.kind in ("forward", "backward")]
        assert sorted(work) == sorted(itertools.product(("forward", "backward"), range(microbatches)))
        held = most = 0
        for kind, _ in work:
            held += 1 if kind == "forward" else -1
            most = max(most, held)
        assert most == min(stages - stage, microbatches)
        assert [m for kind, m in work if kind == "backward"] == list(range(microbatches))  # as serial accumulation
    for made, messages in ((schedule, 2), (forward_only(stages, microbatches), 1)):
        programs = made.lower().programs
        sent = [(r, a.peer, a[1:6], a.edge) for r, p in enumerate(programs) for a in p if a.kind == "send"]
        got = [(a.peer, r, a[1:6], a.edge) for r, p in enumerate(programs) for a in p if a.kind == "receive"]
        assert sorted(sent) == sorted(got)
        assert len(set(sent)) == len(sent) == messages * (stages - 1) * microbatches


class Doubling:
    """A stage that computes w x; serial, stages multiply by w_0 w_1 … and the loss is the sum."""

    def __init__(self, axis, inputs):
        self.axis, self.inputs = axis, inputs
        self.weight = torch.tensor(1.5 + axis.rank, dtype=torch.float64, requires_grad=True)

    def empty_input(self, m):
        return torch.empty_like(self.inputs[m])

    def forward(self, m, x):
        y = self.weight * (self.inputs[m] if x is None else x)
        return y.sum() if self.axis.rank == self.axis.size - 1 else y


@pytest.mark.mpi
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("make", [one_f_one_b, gpipe])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_executor_equals_serial(world, microbatches, make, synchronous):
    """Messages large enough that MPI cannot buffer them."""
    from hpctrain import Grid

    grid = Grid(pipeline=world.size)
    grid.wire.synchronous = synchronous
    inputs = [torch.arange(30_000, dtype=torch.float64) / 30_000 + m for m in range(microbatches)]
    stage = Doubling(grid.pipeline, inputs)
    asked = []
    executor = Executor(grid.pipeline, make(world.size, microbatches))
    losses = executor.run(stage, on_last_backward=lambda: asked.append(stage.weight.grad is not None))
    product = torch.tensor([1.5 + s for s in range(world.size)]).double().prod()
    expected = [float(product * x.sum()) for x in inputs]
    assert [float(loss) for loss in losses] == (
        pytest.approx(expected, rel=1e-12) if grid.pipeline.rank == world.size - 1 else []
    )
    assert float(stage.weight.grad) == pytest.approx(sum(expected) / (1.5 + grid.pipeline.rank), rel=1e-12)
    assert asked == [microbatches > 1]  # told once, before the last backward


@pytest.mark.mpi
def test_executor_refuses_what_it_cannot_run(world):
    from hpctrain import Grid

    axis = Grid(pipeline=world.size).pipeline
    for schedule in (interleaved(world.size, 2), one_f_one_b(world.size + 1, 2)):
        with pytest.raises(ValueError, match="use gpipe or 1f1b"):
            Executor(axis, schedule)
