"""The order of samples of several sources: exact proportions at any moment, each source's own order, any range."""

import numpy as np
import pytest

from hpctrain import RngKey
from hpctrain.data import MixedOrder, SampleOrder
from hpctrain.data.mixture import PERIOD, period_counts

SIZES = [50, 7, 1000]
FIRSTS = [0, 50, 57]
WEIGHTS = {"even": [1, 1, 1], "decimal": [0.7, 0.25, 0.05], "irrational": [3**0.5, 2**0.5, 0.1], "large": [7, 1, 1e3]}


def mixed(weights):
    orders = [SampleOrder(size, RngKey(3) / number) for number, size in enumerate(SIZES)]
    return MixedOrder(orders, weights, FIRSTS), orders


def sources_of(numbers):
    return np.searchsorted(FIRSTS, numbers, side="right") - 1


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_counts_after_a_thousand_steps_of_eight(weights):
    """And after any other number of samples: within two of the weights, where three sources are rounded."""
    order, _ = mixed(weights)
    found = sources_of(order[0:8000])
    counts = np.cumsum([found == source for source in range(3)], 1)
    wanted = np.outer(weights, np.arange(1, 8001)) / sum(weights)
    assert np.abs(counts - wanted).max() <= 2
    assert np.abs(counts - wanted)[:, -1].max() <= 1.5
    for count in (1, 8, 999, 8000):
        assert order.taken(count) == counts[:, count - 1].tolist()
    assert order.taken(0) == [0, 0, 0]


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_each_source_comes_in_its_own_order(weights):
    order, orders = mixed(weights)
    numbers = order[0:5000]
    for source, (first, own) in enumerate(zip(FIRSTS, orders)):
        mine = numbers[sources_of(numbers) == source] - first
        assert mine.tolist() == own[0 : len(mine)].tolist()


def test_any_range_is_a_part_of_the_whole():
    """As a job that is resumed reads it, also after many periods of the pattern."""
    order, _ = mixed([0.7, 0.25, 0.05])
    whole = order[0:1000].tolist()
    again, _ = mixed([0.7, 0.25, 0.05])
    assert [n for start in range(0, 1000, 30) for n in again[start : min(start + 30, 1000)].tolist()] == whole
    far = 123_456_789
    assert order[far : far + 50].tolist()[20:] == order[far + 20 : far + 50].tolist()
    assert order.taken(far + 50)[1] - order.taken(far)[1] == (sources_of(order[far : far + 50]) == 1).sum()


def test_one_source_is_as_alone():
    alone = SampleOrder(9, RngKey(1))
    assert MixedOrder([alone], [0.3], [0])[5:40].tolist() == alone[5:40].tolist()


def test_weights_as_whole_numbers():
    assert period_counts([0.7, 0.3]) == [7, 3]
    assert period_counts([2]) == [1]
    assert period_counts([1e-4, 1]) == [1, 10_000]
    assert sum(period_counts([3**0.5, 2**0.5])) == PERIOD
    # exactly 1195.40, 16905.56, 20704.998 and 26730.04: the two largest remainders are rounded up
    assert period_counts([0.1, 2**0.5, 3**0.5, 5**0.5]) == [1195, 16906, 20705, 26730]
    for weights in ([1e-9, 1], [1, 1e-5, 3**0.5]):
        with pytest.raises(ValueError, match="weights must be at least 1 / 65536 of their sum"):
            period_counts(weights)
