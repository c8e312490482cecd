"""The table of who holds what: numbers of a small one, by hand."""

import numpy as np
import pytest

from hpctrain.checkpoint import holders

A, B = ("float32", (10, 4)), ("float32", (6,))
FIRST = {"a": A, "b": B}, np.array([[0, 0, 12, 0, 0, 3, 4], [1, 0, 2, 0, 0, 2, 1]])
SECOND = {"b": B, "a": A}, np.array([[0, 0, 4, 2, 0, 6, 1], [1, 0, 28, 3, 0, 10, 4]])


def test_two_parts_in_one_table():
    tensors, table = holders.merged([FIRST, SECOND])
    assert list(tensors) == ["a", "b"]
    assert table.rows.tolist() == [
        [0, 0, 12, 0, 0, 3, 4], [0, 1, 28, 3, 0, 10, 4], [1, 0, 2, 0, 0, 2, 1], [1, 1, 4, 2, 0, 6, 1]
    ]  # fmt: skip
    assert table.elements() == [40, 6]
    assert table.hull().tolist() == [[0, 0, 40, 0, 0, 10, 4], [1, 0, 6, 0, 0, 6, 1]]
    assert holders.parse(table.bytes(), tensors, 2).rows.tolist() == table.rows.tolist()


@pytest.mark.parametrize(
    ("name", "bounds", "parts"),
    [
        ("a", [[0, 3], [0, 4]], [0]),
        ("a", [[3, 4], [3, 4]], [1]),
        ("a", [[2, 4], [0, 1]], [0, 1]),
        ("b", [[0, 2]], [0]),
        ("b", [[5, 6]], [1]),
        ("c", [[0, 1]], []),
    ],
)
def test_who_has_some_of_a_rectangle(name, bounds, parts):
    table = holders.merged([FIRST, SECOND])[1]
    assert table.find(name, np.array([bounds])).tolist() == parts


def test_parts_that_do_not_agree():
    with pytest.raises(ValueError, match=r"b is \('float32', \(6,\)\) on one rank, \('float64', \(6,\)\) on another"):
        holders.merged([FIRST, ({"b": ("float64", (6,))}, SECOND[1][:0])])
