"""The rules give the slices that the layers were written for, one by one, by hand; and what moves between them."""

import itertools

import pytest

from hpctrain.grid_shape import TENSOR, grid_shape, place_of
from hpctrain.layers.rules import BOX, IMAGES, PLANE
from hpctrain.layout import Cut, Layout, Rules, elements_received
from hpctrain.matmul import Agarwal, Cannon, Summa, TwoHalfD
from hpctrain.shard import Shard, expert_shard, split, subsplit

BOXES = [(1, 1, 1), (4, 1, 1), (2, 2, 1), (2, 3, 2), (1, 2, 3)]
LENGTH, SEQUENCES, WIDTH, HEAD, HEADS = 5, 3, 7, 4, 6
ROWS, HIDDEN = SEQUENCES * LENGTH, HEADS * HEAD


def places():
    for box in BOXES:
        sizes = grid_shape(1, 1, box) | {"expert": 1, "copies": 1}
        for place in itertools.product(*map(range, box)):
            yield sizes, dict(zip(TENSOR, place)), *box, *place


def whole(length):
    return slice(0, length)


def by_hand(family, x, y, z, i, j, k):
    """{dims: slices, axes along which others have the same}"""
    head, width = (HIDDEN, HEAD), WIDTH
    over_x = subsplit(split(ROWS, z, k, LENGTH), x, i, 1 if family is BOX else LENGTH)
    table = {
        (("rows", (ROWS, LENGTH)), ("features", width)): ((over_x, split(width, y, j)), ()),
        (("features", width),): ((split(width, y, j),), ("x", "z")),
        (("inner out", head), ("residual in", width)): (
            (subsplit(split(HIDDEN, x, i, HEAD), z, k), split(width, y, j)), (),
        ),
    }  # fmt: skip
    if family is BOX:
        table |= {
            (("inner rows", (ROWS, LENGTH)), ("inner features", head)): (
                (split(ROWS, z, k, LENGTH), subsplit(split(HIDDEN, x, i, HEAD), y, j, HEAD)), (),
            ),
            (("inner features", head),): ((subsplit(split(HIDDEN, x, i, HEAD), y, j, HEAD),), ("z",)),
            (("residual out", (10, 2)), ("inner in", head)): (
                (subsplit(split(10, y, j, 2), z, k), split(HIDDEN, x, i, HEAD)), (),
            ),
        }  # fmt: skip
    else:
        table |= {
            (("inner rows", (ROWS, LENGTH)), ("inner features", head)): ((over_x, split(HIDDEN, y, j, HEAD)), ()),
            (("inner features", head),): ((split(HIDDEN, y, j, HEAD),), ("x", "z")),
            (("residual out", (10, 2)), ("inner in", head)): (
                (subsplit(split(10, x, i, 2), z, k), split(HIDDEN, y, j, HEAD)), (),
            ),
        }  # fmt: skip
    return table


@pytest.mark.parametrize("family", [BOX, PLANE], ids=["box", "plane"])
def test_transformers(family):
    for sizes, place, *numbers in places():
        for dims, (slices, replicated) in by_hand(family, *numbers).items():
            layout = family.layout(dict(dims))
            assert layout.shard(sizes, place) == Shard(layout.shape, slices, replicated), (dims, place)


def test_images():
    for sizes, place, x, y, z, i, j, k in places():
        block = IMAGES.layout({"images": 5, "channels": 7, "height": 3, "width": 2}).slices(sizes, place)
        assert block == (split(5, z, k), split(7, x, i), split(3, y, j), whole(2))
        plane = split(7, x, i), y * z, j * z + k
        for over, rows, columns in [
            (("own out", "every in"), subsplit(*plane), whole(6)),
            (("every out", "own in"), split(7, *plane[1:]), split(6, x, i)),
        ]:
            dims = dict(zip((*over, "kernel height", "kernel width"), (7, 6, 3, 2)))
            shard = IMAGES.layout(dims).shard(sizes, place)
            assert shard == Shard((7, 6, 3, 2), (rows, columns, whole(3), whole(2)), shard.replicated)
        shard = IMAGES.layout({"channels": 7}).shard(sizes, place)
        assert shard == Shard((7,), (split(7, x, i),), ("y", "z"))


def test_experts_and_heads_over_ulysses():
    """The rules of the issue: {"heads": ("x", "ulysses"), "experts": "expert"}."""
    shape = grid_shape((1, 1, 2), 1, 2)
    rules = Rules({"heads": ("x", "ulysses"), "experts": "expert"})
    for expert in (1, 2, 4):
        sizes = shape | {"expert": expert, "copies": 4 // expert}
        for rank in range(4):
            place = place_of(rank, shape, expert)
            shard = rules.layout({"experts": 5, "out": 3, "in": 2}).shard(sizes, place)
            assert shard == expert_shard((5, 3, 2), expert, place["expert"])
            (heads,) = rules.layout({"heads": (HIDDEN, HEAD)}).slices(sizes, place)
            assert heads == subsplit(split(HIDDEN, 2, place["x"], HEAD), 2, place["ulysses"], HEAD)


@pytest.mark.parametrize("product", [Agarwal, Cannon, Summa, TwoHalfD])
def test_matrix_products(product):
    """`Matmul.layouts` are rules of rows and columns."""
    for over_rows, over_columns in product.layouts:
        layout = Layout.of((9, 8), {0: over_rows, 1: over_columns})
        for sizes, place, *numbers in places():
            expected = []
            for length, axes in ((9, over_rows), (8, over_columns)):
                part = whole(length)
                for axis in axes:
                    part = subsplit(part, numbers["xyz".index(axis)], numbers[3 + "xyz".index(axis)])
                expected.append(part)
            assert layout.slices(sizes, place) == tuple(expected)


def test_what_moves_between_the_layouts_of_a_linear_layer():
    """Of 24 rows and 24 features on 2 × 3 × 2 ranks: 3 of 12 rows × 8 features lie in the input's own block of 6 × 8; a
    sum of 12 × 12 over y is 2 other summands of 12 rows × 4 features."""
    sizes, place = grid_shape(1, 1, (2, 3, 2)) | {"expert": 1, "copies": 1}, {"x": 1, "y": 2, "z": 0}
    residual = BOX.layout({"rows": (24, 12), "features": 24})
    gathered = Layout.of((24, 24), {0: Cut("z", 12), 1: "y"})
    assert elements_received(residual, gathered, sizes, place) == 12 * 8 - 6 * 8
    summands = Layout.of((24, 24), {0: Cut("z", 12), 1: "x"}, partial="y")
    inner = BOX.layout({"inner rows": (24, 12), "inner features": 24})
    assert elements_received(summands, inner, sizes, place) == 2 * 12 * 4
    assert elements_received(summands, Layout.of((24, 24), {0: Cut("z", 12), 1: "x"}), sizes, place) == 4 * 12 * 4
