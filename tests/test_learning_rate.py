"""Schedules of the learning rate, by hand."""

import pytest

from hpctrain.choices import LR_SCHEDULES
from hpctrain.train.learning_rate import learning_rate

# Of 9 steps with a peak of 8 and a floor of 2; warm-up over 2 steps.
TABLE = {
    "cosine": [4, 8, 8, 7.5980762, 6.5, 5, 3.5, 2.4019238, 2],
    "linear": [4, 8, 8, 7, 6, 5, 4, 3, 2],
    "constant": [4, 8, 8, 8, 8, 8, 8, 8, 8],
    "wsd": [4, 8, 8, 8, 8, 8, 6, 4, 2],
    "inverse_sqrt": [4, 8, 6.5319726, 5.6568542, 5.0596443, 4.6188022, 4.2761799, 4, 3.7712362],
}


@pytest.mark.parametrize("schedule", LR_SCHEDULES)
def test_schedules(schedule):
    found = [learning_rate(step, 9, 8.0, 2, schedule, 2.0, 3) for step in range(9)]
    assert found == pytest.approx(TABLE[schedule], rel=1e-7)


def test_corners():
    """No warm-up; a run that is all warm-up; a decay longer than the run; one step; more steps than were planned."""
    for schedule in LR_SCHEDULES:
        assert learning_rate(0, 5, 8.0, 0, schedule, 2.0) == 8.0
        assert [learning_rate(step, 3, 6.0, 3, schedule) for step in range(3)] == [2.0, 4.0, 6.0]
        assert learning_rate(0, 1, 8.0, 0, schedule, 2.0) == 8.0
        assert 2.0 <= learning_rate(20, 9, 8.0, 2, schedule, 2.0) <= 8.0
    assert [learning_rate(step, 4, 8.0, 1, "wsd", 2.0, 100) for step in range(4)] == [8.0, 8.0, 5.0, 2.0]
    assert learning_rate(100, 10**6, 8.0, 2, "inverse_sqrt", 7.0) == 7.0
    # a tenth by default: of the peak, and of the steps
    assert learning_rate(19, 20, 8.0, 2, "linear") == pytest.approx(0.8)
    assert [learning_rate(step, 20, 8.0, 2, "wsd", 2.0) for step in (16, 17, 18, 19)] == [8.0, 8.0, 5.0, 2.0]
