"""Schedules, their lowering, the certificate against deadlock, and the executor."""

import itertools

import pytest
import torch

from hpctrain.pipeline import Action, Executor, blocking_replay, forward_only, lower, one_f_one_b


def letters(programs):
    """A program as text: f0 b1 for work, s for a send and r for a receive, with their microbatch."""
    return [" ".join(f"{a.kind[0]}{a.microbatch}" for a in program) for program in programs]


def test_one_f_one_b_by_hand():
    assert letters(one_f_one_b(4, 4)) == [
        "f0 f1 f2 f3 b0 b1 b2 b3",
        "f0 f1 f2 b0 f3 b1 b2 b3",
        "f0 f1 b0 f2 b1 f3 b2 b3",
        "f0 b0 f1 b1 f2 b2 f3 b3",
    ]
    assert letters(one_f_one_b(3, 1)) == ["f0 b0"] * 3
    assert letters(one_f_one_b(1, 2)) == ["f0 b0 f1 b1"]


@pytest.mark.parametrize(("stages", "microbatches"), list(itertools.product(range(1, 9), range(1, 18))))
def test_every_size_is_complete_and_safe(stages, microbatches):
    """All work once, few microbatches held, every message paired, and no deadlock when all messages block."""
    order = one_f_one_b(stages, microbatches)
    for stage, rank in enumerate(order):
        work = [(a.kind, a.microbatch) for a in rank]
        assert sorted(work) == sorted(itertools.product(("forward", "backward"), range(microbatches)))
        held = most = 0
        for kind, _ in work:
            held += 1 if kind == "forward" else -1
            most = max(most, held)
        assert most == min(stages - stage, microbatches)
        assert [m for kind, m in work if kind == "backward"] == list(range(microbatches))  # as serial accumulation
    for schedule, messages in ((order, 2), (forward_only(stages, microbatches), 1)):
        programs = lower(schedule)
        blocking_replay(programs)
        sent = [(r, a.peer, a.edge, a.microbatch) for r, p in enumerate(programs) for a in p if a.kind == "send"]
        got = [(a.peer, r, a.edge, a.microbatch) for r, p in enumerate(programs) for a in p if a.kind == "receive"]
        assert sorted(sent) == sorted(got)
        assert len(set(sent)) == len(sent) == messages * (stages - 1) * microbatches


def naive(order):
    """Receive just before use, send just after: what one writes first."""
    stages = len(order)
    programs = []
    for stage, rank in enumerate(order):
        program = []
        for action in rank:
            m = action.microbatch
            if action.kind == "forward":
                before, after, edges = stage - 1, stage + 1, (2 * (stage - 1), 2 * stage)
            else:
                before, after, edges = stage + 1, stage - 1, (2 * stage + 1, 2 * (stage - 1) + 1)
            if 0 <= before < stages:
                program.append(Action("receive", before, m, before, edges[0]))
            program.append(action)
            if 0 <= after < stages:
                program.append(Action("send", stage, m, after, edges[1]))
        programs.append(program)
    return programs


def test_the_certificate_can_fail():
    """The naive placement deadlocks when messages block: the replay must find it."""
    with pytest.raises(ValueError, match="the programs deadlock when messages block"):
        blocking_replay(naive(one_f_one_b(3, 4)))
    blocking_replay(naive(forward_only(3, 4)))


def test_an_impossible_order_is_refused():
    order = one_f_one_b(2, 2)
    order[0] = [order[0][2], *order[0][:2], order[0][3]]  # a backward before its forward
    with pytest.raises(ValueError, match="cannot be carried out"):
        lower(order)


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
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_executor_equals_serial(world, microbatches, synchronous):
    """Messages large enough that MPI cannot buffer them."""
    from hpctrain import Grid

    grid = Grid(pipeline=world.size)
    grid.wire.synchronous = synchronous
    inputs = [torch.arange(30_000, dtype=torch.float64) / 30_000 + m for m in range(microbatches)]
    stage = Doubling(grid.pipeline, inputs)
    asked = []
    executor = Executor(grid.pipeline, one_f_one_b(world.size, microbatches))
    losses = executor.run(stage, on_last_backward=lambda: asked.append(stage.weight.grad is not None))
    product = torch.tensor([1.5 + s for s in range(world.size)]).double().prod()
    expected = [float(product * x.sum()) for x in inputs]
    assert [float(loss) for loss in losses] == (
        pytest.approx(expected, rel=1e-12) if grid.pipeline.rank == world.size - 1 else []
    )
    assert float(stage.weight.grad) == pytest.approx(sum(expected) / (1.5 + grid.pipeline.rank), rel=1e-12)
    assert asked == [microbatches > 1]  # told once, before the last backward
