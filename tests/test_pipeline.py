"""1F1B, GPipe and forwards alone, by hand and at every size."""

import itertools

import pytest

from hpctrain.pipeline import forward_only, gpipe, one_f_one_b


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
