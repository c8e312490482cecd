"""Balanced ranges: a partition of the dim, cut at units, the first ones longer by one unit."""

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.shard import split, split_sizes, subsplit

LENGTHS = st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(1, 5))  # units, parts, elements of a unit


@given(LENGTHS)
def test_ranges_follow_each_other_and_differ_by_one_unit_at_most(case):
    units, parts, unit = case
    ranges = [split(units * unit, parts, index, unit) for index in range(parts)]
    assert [element for part in ranges for element in range(part.start, part.stop)] == list(range(units * unit))
    sizes = [part.stop - part.start for part in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size % unit == 0 for size in sizes)
    assert sizes[0] - sizes[-1] in (0, unit)
    assert tuple(sizes) == split_sizes(units * unit, parts, unit)


@given(LENGTHS, st.integers(1, 9), st.integers(0, 100))
def test_a_range_of_a_range(case, inner, start):
    units, parts, unit = case
    whole = slice(start, start + units * unit)
    ranges = [subsplit(whole, parts, index, unit) for index in range(parts)]
    assert [e for part in ranges for e in range(part.start, part.stop)] == list(range(whole.start, whole.stop))
    for part in ranges:
        cut = [subsplit(part, inner, index, unit) for index in range(inner)]
        assert [e for each in cut for e in range(each.start, each.stop)] == list(range(part.start, part.stop))


def test_ranges_by_hand():
    assert [split(7, 3, i) for i in range(3)] == [slice(0, 3), slice(3, 5), slice(5, 7)]
    inner = [subsplit(slice(6, 14), 3, i, unit=2) for i in range(3)]
    assert inner == [slice(6, 10), slice(10, 12), slice(12, 14)]
