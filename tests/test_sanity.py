"""What makes a step a bad one; which samples come after a rollback and a resume."""

import math

import pytest

from hpctrain import RngKey
from hpctrain.config import load_config
from hpctrain.data import SampleOrder
from hpctrain.train.sanity import WINDOW, Sanity


def test_not_finite():
    sanity = Sanity(0.0)
    for loss, norm in ((math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf), (-math.inf, 1.0)):
        assert sanity.judge(loss, norm) == 2
        assert sanity.bad(2, loss, norm).kind == "nonfinite"
    assert sanity.judge(1e30, 1e30) == 0


def test_a_spike_is_judged_by_the_median_of_a_full_window():
    sanity = Sanity(2.0)
    for step in range(WINDOW):
        assert sanity.judge(1000.0, 1.0) == 0  # too early to tell
        sanity.good(1.0 + step / WINDOW, 1.0)
    usual = 1.0 + (WINDOW - 1) / 2 / WINDOW
    assert sanity.judge(2 * usual, 1.0) == 0
    assert sanity.judge(2 * usual + 1e-9, 1.0) == 1
    assert str(sanity.bad(1, 7.0, 1.0)) == "loss 7 is over 2.0 times the median of the last 32 steps"
    for _ in range(WINDOW):
        sanity.good(10.0, 1.0)
    assert sanity.judge(2 * usual + 1e-9, 1.0) == 0  # old steps are forgotten
    assert len(sanity.losses) == WINDOW


def test_one_spike_does_not_hide_the_next():
    """As it would by the mean, which it raises."""
    sanity = Sanity(3.0)
    for loss in (*[1.0] * (WINDOW - 1), 1000.0):
        sanity.good(loss, 1.0)
    assert sanity.judge(3.1, 1.0) == 1


def test_a_spike_of_losses_below_zero():
    """As a likelihood of continuous values has: every loss would be above 3 times the median."""
    sanity = Sanity(3.0)
    for _ in range(WINDOW):
        sanity.good(-2.0, 1.0)
    assert [sanity.judge(loss, 1.0) for loss in (-3.0, -2.0, -1.0, 2.0, 2.1)] == [0, 0, 0, 0, 1]


def test_without_a_factor_nothing_is_a_spike():
    sanity = Sanity(0.0)
    for _ in range(WINDOW):
        sanity.good(1.0, 1.0)
    assert sanity.judge(1e9, 1.0) == 0


def test_divergence_says_what_led_to_it_and_what_would_do():
    sanity = Sanity(0.0)
    assert "of the steps before: none. Use" in str(sanity.diverged(sanity.bad(2, math.nan, 1.0), 1, 1.0, 1.0))
    for norm in (0.5, 1.0, 2.0, 40.0, 800.25, 16000.0):
        sanity.good(1.0, norm)
    bad = sanity.diverged(sanity.bad(2, math.nan, math.inf), 41, 0.003, 0.0)
    assert (bad.kind, bad.norm) == ("nonfinite", math.inf)
    assert str(bad) == (
        "step 41: loss nan and gradient norm inf are not both finite; learning rate 0.003, gradient norms of the steps "
        "before: 1, 2, 40, 800, 1.6e+04. Use a smaller train.lr, a longer train.warmup, a train.clip such as 1, or "
        "sanity.nonfinite=skip or =rollback"
    )
    alone = sanity.diverged(sanity.bad(2, math.nan, 1.0), 1, 1.0, 1.0, alone=True)
    assert str(alone).endswith("Use a smaller train.lr, a longer train.warmup, or a train.clip below 1")


@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_no_sample_is_repeated_or_left_out(stop):
    """Batches of 3 of 10 samples, stopped in the middle of an epoch: the order is a function of the batch's number."""
    whole = SampleOrder(10, RngKey(0, "order"))
    before = [n for batch in range(stop) for n in whole[batch * 3 : batch * 3 + 3].tolist()]
    again = SampleOrder(10, RngKey(0, "order"))
    after = [n for batch in range(stop, 10) for n in again[batch * 3 : batch * 3 + 3].tolist()]
    for epoch in range(3):
        assert sorted((before + after)[epoch * 10 : epoch * 10 + 10]) == list(range(10))


@pytest.mark.parametrize("option", ["sanity.spike_factor=2", "sanity.nonfinite=skip", "sanity.nonfinite=rollback"])
def test_no_step_is_left_out_whose_gradient_is_applied_at_once(option):
    server = ["data_parallel.method=parameter_server", "data_parallel.staleness=1", "grid.data=2"]
    assert load_config(overrides=[*server, "sanity.spike_factor=2", "sanity.spike=rollback"])
    with pytest.raises(
        ValueError, match="staleness = 1 updates weights by each worker's gradient at once: a step cannot"
    ):
        load_config(overrides=[*server, option])
