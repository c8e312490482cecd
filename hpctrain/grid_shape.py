"""Sizes of the axes of a grid, and their products: pure arithmetic, without MPI."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Row-major, z fastest: tensor neighbours share a node before those of Ulysses do, which talk more than those of a ring.
AXES = ("replica", "ring", "pipeline", "ulysses", "x", "y", "z")
TENSOR = ("x", "y", "z")
# Names of several axes joined; a rank along them is row-major, too.
JOINED = {
    "data": ("replica", "ring", "ulysses"),
    "sequence": ("ring", "ulysses"),
    "stage": ("replica", "ring", "ulysses", *TENSOR),
    "world": AXES,
}


def parts_of(name: str) -> tuple[str, ...]:
    """The axes that an axis of this name joins.

    >>> parts_of("data"), parts_of("x+z")
    (('replica', 'ring', 'ulysses'), ('x', 'z'))
    """
    return JOINED.get(name) or tuple(name.split("+"))


def size_of(shape: dict[str, int], name: str) -> int:
    """Ranks along an axis of this name, of a grid of these sizes.

    >>> size_of(grid_shape((3, 1, 2), 1, 4), "data")
    6
    """
    return math.prod(shape[axis] for axis in parts_of(name))


def place_of(rank: int, shape: dict[str, int], expert: int) -> dict[str, int]:
    """Coordinates of a rank by axis, those along copies and expert too.

    >>> place_of(5, grid_shape(2, 2, 2), 4)
    {'replica': 1, 'ring': 0, 'pipeline': 0, 'ulysses': 0, 'x': 1, 'y': 0, 'z': 0, 'expert': 3, 'copies': 0}
    """
    place = dict.fromkeys(AXES, 0)
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, shape[axis])
    in_stage = 0
    for axis in JOINED["stage"]:
        in_stage = in_stage * shape[axis] + place[axis]
    copies, place["expert"] = divmod(in_stage, expert)
    return place | {"copies": copies}


def grid_shape(data: Any, pipeline: int, tensor: Any) -> dict[str, int]:
    """Sizes of AXES by name.

    >>> grid_shape(2, 1, 4)
    {'replica': 2, 'ring': 1, 'pipeline': 1, 'ulysses': 1, 'x': 4, 'y': 1, 'z': 1}
    >>> grid_shape(0, 1, (1, 1, 1))
    Traceback (most recent call last):
    ValueError: grid.data must be an integer of at least 1, got 0
    """
    replica, ring, ulysses = _three("grid.data", data, JOINED["data"])
    return dict(
        zip(AXES, (replica, ring, _size("grid.pipeline", pipeline), ulysses, *_three("grid.tensor", tensor, TENSOR)))
    )


def _three(option, sizes, axes):
    """Sizes of three axes, where one number is the size of the first."""
    if not isinstance(sizes, (tuple, list)):
        return _size(option, sizes), 1, 1
    if len(sizes) != 3:
        raise ValueError(f"{option} must be one integer or three ({', '.join(axes)}), got {sizes!r}")
    return tuple(_size(f"{option} ({axis})", size) for axis, size in zip(axes, sizes))


def _size(option, size):
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{option} must be an integer of at least 1, got {size!r}")
    return size


def describe_shape(shape: dict[str, int], expert: int = 1, expert_tensor: int = 1) -> str:
    """
    >>> describe_shape(grid_shape(2, 1, 4))
    'data 2 × pipeline 1 × tensor (4, 1, 1)'
    >>> describe_shape(grid_shape((1, 2, 1), 1, 4))
    'data (1, 2, 1) × pipeline 1 × tensor (4, 1, 1)'
    >>> describe_shape(grid_shape(4, 2, 2), expert=4)
    'data 4 × pipeline 2 × tensor (2, 1, 1), experts over 4 ranks in 2 copies'
    >>> describe_shape(grid_shape(4, 1, 1), expert=4, expert_tensor=2)
    'data 4 × pipeline 1 × tensor (1, 1, 1), experts over 4 ranks, each over 2, in 1 copy'
    """
    data, pipeline, tensor = grid_arguments(shape)
    copies = size_of(shape, "stage") // expert
    each = f", each over {expert_tensor}," if expert_tensor > 1 else ""
    experts = f", experts over {expert} ranks{each} in {copies} cop{'y' if copies == 1 else 'ies'}"
    return f"data {data} × pipeline {pipeline} × tensor {tensor}{experts if expert > 1 else ''}"


def grid_arguments(shape: dict[str, int]) -> tuple[int | tuple[int, int, int], int, tuple[int, int, int]]:
    """(data, pipeline, tensor) as `Grid` takes them."""
    replica, ring, ulysses = (shape[axis] for axis in JOINED["data"])
    x, y, z = (shape[axis] for axis in TENSOR)
    return replica if ring == ulysses == 1 else (replica, ring, ulysses), shape["pipeline"], (x, y, z)


def check_alike(given: Sequence[str]) -> None:
    """Raise ValueError unless all ranks were given the same: those of another grid would be waited for, for ever.

    >>> check_alike(["[2, 1, 1, 1, 1, null]", "[1, 1, 2, 1, 1, null]"])
    Traceback (most recent call last):
    ValueError: all ranks must make one grid; data, pipeline, tensor, expert, expert_tensor and boxes are
    [2, 1, 1, 1, 1, null] on rank 0 and [1, 1, 2, 1, 1, null] on rank 1
    """
    for rank, other in enumerate(given):
        if other != given[0]:
            raise ValueError(
                "all ranks must make one grid; data, pipeline, tensor, expert, expert_tensor and boxes are "
                f"{given[0]} on rank 0 and {other} on rank {rank}"
            )


def check_ranks(shape: dict[str, int], ranks: int) -> None:
    """Raise ValueError with the nearest valid grids unless `shape` has exactly `ranks` places."""
    product = math.prod(shape.values())
    if product == ranks:
        return

    def named(shape):
        return "data={} pipeline={} tensor={}".format(*grid_arguments(shape))

    raise ValueError(
        f"the grid {named(shape)} has {product} places, but there are {ranks} ranks. "
        f"Start {product} ranks, or use one of the nearest grids of {ranks}: "
        + "; ".join(map(named, nearest_grids(shape, ranks)))
    )


def check_boxes(shape: dict[str, int], boxes: Any, option: str = "boxes") -> tuple[tuple[int, int, int], ...]:
    """The tensor box of each rank of the pipeline axis, by default that of `shape`.

    >>> check_boxes(grid_shape(1, 2, 4), [(4, 1, 1), (2, 1, 1)])
    Traceback (most recent call last):
    ValueError: boxes must be 2, one for each stage's ranks, of 4 ranks as grid.tensor has, got [(4, 1, 1), (2, 1, 1)]
    """
    box = shape["x"], shape["y"], shape["z"]
    if boxes is None:
        return (box,) * shape["pipeline"]
    found = tuple((x, y, z) for x, y, z in (_three(option, tuple(each), TENSOR) for each in boxes))
    if len(found) != shape["pipeline"] or {*map(math.prod, found)} != {math.prod(box)}:
        raise ValueError(
            f"{option} must be {shape['pipeline']}, one for each stage's ranks, of {math.prod(box)} ranks as "
            f"grid.tensor has, got {boxes}"
        )
    return found


def stage_holders(placement: Mapping[tuple[int, int], int]) -> list[list[int]]:
    """Of each stage, the ranks of the pipeline axis that hold it, in order.

    Args:
        placement: {(replica, stage): rank}, as of a `pipeline.Schedule`.

    >>> stage_holders({(0, 0): 0, (0, 1): 1, (1, 0): 1, (1, 1): 0})
    [[0, 1], [0, 1]]
    """
    stages = 1 + max(stage for _, stage in placement)
    return [sorted({rank for (_, s), rank in placement.items() if s == stage}) for stage in range(stages)]


def check_same_boxes(boxes: Sequence[tuple[int, int, int]], holders: list[list[int]], tied: bool) -> None:
    """Raise ValueError unless pipeline ranks that hold the same weights, which they must cut alike, have one box.

    Args:
        boxes: as of `check_boxes`.
        holders: as of `stage_holders`.
        tied: whether the first and the last stage have the same table.
    """
    for ranks in [*holders, *[sorted({*holders[0], *holders[-1]})] * tied]:
        if len({boxes[rank] for rank in ranks}) > 1:
            raise ValueError(
                f"pipeline ranks {', '.join(map(str, ranks))} hold the same weights, by tied embeddings or a schedule "
                f"with replicas, and need one tensor box, got {', '.join(str(boxes[rank]) for rank in ranks)}; use "
                "model.tied = false and another schedule, or give these ranks the same box"
            )


def check_expert(shape: dict[str, int], expert: int, expert_tensor: int = 1) -> None:
    """Raise ValueError unless the ranks of a stage are a multiple of `expert`, and that of `expert_tensor`.

    >>> check_expert(grid_shape(3, 2, 2), 4)
    Traceback (most recent call last):
    ValueError: grid.expert must divide the 6 ranks of a pipeline stage, data × tensor: 1, 2, 3 or 6, got 4
    >>> check_expert(grid_shape(3, 2, 2), 3, 2)
    Traceback (most recent call last):
    ValueError: grid.expert_tensor must divide grid.expert = 3, whose ranks divide each expert: 1 or 3, got 2
    """
    ranks = size_of(shape, "stage")
    if ranks % _size("grid.expert", expert):
        raise ValueError(
            f"grid.expert must divide the {ranks} ranks of a pipeline stage, data × tensor: {_divisors(ranks)}, got "
            f"{expert}"
        )
    if expert % _size("grid.expert_tensor", expert_tensor):
        raise ValueError(
            f"grid.expert_tensor must divide grid.expert = {expert}, whose ranks divide each expert: "
            f"{_divisors(expert)}, got {expert_tensor}"
        )


def _divisors(number):
    *others, largest = (n for n in range(1, number + 1) if number % n == 0)
    return f"{', '.join(map(str, others))} or {largest}" if others else "1"


def nearest_grids(shape: dict[str, int], ranks: int, count: int = 3) -> list[dict[str, int]]:
    """The grids of exactly `ranks` places that change the sizes of `shape` by the smallest total ratio; those of a
    sequence axis only where it has ranks.

    >>> [tuple(near.values()) for near in nearest_grids(grid_shape(2, 2, 2), 4)]
    [(1, 1, 2, 1, 2, 1, 1), (2, 1, 1, 1, 2, 1, 1), (2, 1, 2, 1, 1, 1, 1)]
    """
    axes = [axis for axis in AXES if axis not in JOINED["sequence"] or shape[axis] > 1]
    near = [{**shape, **dict(zip(axes, sizes))} for sizes in _factorisations(ranks, len(axes))]

    def distance(sizes):
        return sum(abs(math.log(sizes[axis] / shape[axis])) for axis in axes)

    return sorted(near, key=lambda sizes: (round(distance(sizes), 9), tuple(sizes.values())))[:count]


def all_grids(ranks: int, sequence: bool = False) -> list[tuple]:
    """Every (data, pipeline, (x, y, z)) of exactly `ranks` places; with `sequence`, data is (replica, ring, ulysses).

    >>> [len(all_grids(ranks)) for ranks in (1, 2, 4, 8)]
    [1, 5, 15, 35]
    >>> [len(all_grids(ranks, sequence=True)) for ranks in (1, 2, 4, 8)]
    [1, 7, 28, 84]
    """
    if not sequence:
        return [(d, p, (x, y, z)) for d, p, x, y, z in _factorisations(ranks, 5)]
    return [((r, c, u), p, (x, y, z)) for r, c, u, p, x, y, z in _factorisations(ranks, len(AXES))]


def _factorisations(number: int, parts: int):
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorisations(number // first, parts - 1):
                yield (first, *rest)
