"""The process grid: MPI ranks arranged as data × pipeline × tensor, where data is replica × ring × ulysses, and tensor
x × y × z.

Knows nothing of tensors. Importing this file does not start MPI; building a `Grid` does.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hpctrain.traffic import Traffic

if TYPE_CHECKING:
    from mpi4py import MPI

# Row-major, z fastest: tensor neighbours share a node before those of Ulysses do, which talk more than those of a ring.
AXES = ("replica", "ring", "pipeline", "ulysses", "x", "y", "z")
TENSOR = ("x", "y", "z")
# Names of several axes joined; a rank along them is row-major, too.
JOINED = {"data": ("replica", "ring", "ulysses"), "sequence": ("ring", "ulysses"), "world": AXES}
ENDS = 16  # ranks of a large grid that `describe` shows first; half as many last, half as many around this one


class OperationWatch(Protocol):
    """What is called before and after every operation: `comm.Watchdog`."""

    def begin(self, axis: Axis, name: str, peer: int | None, patience: int = 1) -> None: ...

    def end(self) -> None: ...

    def during(self, axis: Axis, name: str, patience: int = 1) -> AbstractContextManager[None]: ...


class Resource(Protocol):
    """What a grid gives back at its end."""

    def free(self) -> None: ...


@dataclass
class Transport:
    """How the messages of one grid travel; all its axes share it, and `comm/` reads it at every call.

    Attributes:
        traffic: the ledger of bytes.
        cuda_aware: MPI may be given device memory; otherwise CUDA tensors are staged through pinned host memory.
            Set by `comm.decide_cuda_aware`.
        synchronous: every send is an MPI_Ssend, which waits for its receiver, so that no buffering hides a deadlock.
        watchdog: `comm.Watchdog`, called before and after every operation, or None.
        checker: `comm.CollectiveChecker` that is asked before every operation, or None.
        resources: what `comm/` made for the grid and `Grid.free` frees, in the order in which it was made: windows of
            shared memory and communicators.
        reducers: the `comm.algorithms.Reducer` of each axis for which `comm.choose_all_reduce` chose one.
        workspaces: scratch memory that `comm.workspace` made for an axis.
    """

    traffic: Traffic = field(default_factory=Traffic)
    cuda_aware: bool = False
    synchronous: bool = False
    watchdog: OperationWatch | None = None
    checker: Callable[[Axis, str, tuple, dict], None] | None = None
    resources: list[Resource] = field(default_factory=list)
    reducers: dict = field(default_factory=dict)
    workspaces: dict = field(default_factory=dict)


class Axis:
    """The ranks of a grid that differ only along some of its axes, and this rank's place among them.

    Attributes: `name` (of one axis its own, of several that of JOINED or, of tensor axes, theirs joined by "+"), `comm`
    (an mpi4py `Intracomm`), `rank` and `size` along it, `nodes` (which of them share memory: a number for each rank),
    `one_node` (whether all do), and `transport`, shared by the whole grid.
    """

    __slots__ = (
        "name",
        "comm",
        "rank",
        "size",
        "nodes",
        "one_node",
        "transport",
        "x",
        "y",
        "z",
    )
    x: Axis  # the parts of `grid.tensor`, which alone has them
    y: Axis
    z: Axis

    def __init__(self, name: str, comm: MPI.Intracomm, node: int, transport: Transport):
        self.name = name
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.nodes = tuple(comm.allgather(node))
        self.one_node = len(set(self.nodes)) == 1
        self.transport = transport

    def __deepcopy__(self, memo):
        return self  # a copy of a model is on the same ranks

    def __reduce_ex__(self, protocol):
        raise ValueError("a grid of ranks cannot be pickled; of a model, save ht.gather_state_dict(model)")

    def __repr__(self):
        return f"Axis({self.name!r}, rank={self.rank}, size={self.size})"


class Grid:
    """MPI ranks as a Cartesian grid of data × pipeline × tensor.

    Args:
        data: replicas of the model; each trains on its own part of the batch. (replica, ring, ulysses) where ring ×
            ulysses ranks share the sequences of a replica; N for (N, 1, 1).
        pipeline: stages that the layers are cut into.
        tensor: ranks that share each layer: `t` for (t, 1, 1), or (x, y, z).
        comm: the communicator to arrange, `MPI.COMM_WORLD` by default.

    `grid.data`, `grid.pipeline`, `grid.tensor` and `grid.tensor.x`, `.y`, `.z` are `Axis` objects, and so are the parts
    of data: `grid.replica`, `.ring`, `.ulysses`, and `.sequence`, which is ring × ulysses. All of data hold the same
    weights. `grid.plane("x", "z")` gives the ranks that differ along several tensor axes; `grid.shape` is the size of
    each of AXES, and `grid.coords` this rank's place.

    A grid holds 14 communicators at any size (itself, data and its 4 parts, pipeline and the 7 sets of tensor axes), 14
    more in checked mode, and the node of every rank along each axis. `comm/` adds a window of shared memory for each
    bucket of gradients and up to four for the workspaces of an axis that are in use. `free()` gives them back; so does
    the end of `with Grid(...) as grid:`.

    Raises:
        ValueError: on every rank, when a size is not a positive integer or the product is not the number of ranks.
    """

    def __init__(
        self,
        data: int | tuple[int, int, int] = 1,
        pipeline: int = 1,
        tensor: int | tuple[int, int, int] = (1, 1, 1),
        comm: MPI.Intracomm | None = None,
    ):
        self.shape = grid_shape(data, pipeline, tensor)
        from mpi4py import MPI  # starts MPI, so not at import

        comm = MPI.COMM_WORLD if comm is None else comm
        check_ranks(self.shape, comm.size)

        self.transport = Transport()
        self.comm = comm.Create_cart(tuple(self.shape.values()), periods=[True] * len(AXES), reorder=False)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.coords = dict(zip(AXES, self.comm.coords))
        shared = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        node = shared.bcast(self.rank)  # a node is named by its first rank
        shared.Free()
        # Sub is collective, so that every plane is made here, in one order, rather than when first asked for.
        axes = {"world": Axis("world", self.comm, node, self.transport)}
        for name in ("data", "replica", "sequence", "ring", "ulysses", "pipeline", *map("+".join, _subsets(TENSOR))):
            sub = self.comm.Sub([axis in parts_of(name) for axis in AXES])
            axes[name] = Axis(name, sub, node, self.transport)
        self._axes = axes
        self.world, self.data, self.pipeline, self.tensor = (
            axes[name] for name in ("world", "data", "pipeline", "x+y+z")
        )
        self.replica, self.sequence, self.ring, self.ulysses = (
            axes[name] for name in ("replica", "sequence", "ring", "ulysses")
        )
        for name in TENSOR:
            setattr(self.tensor, name, axes[name])

    def __deepcopy__(self, memo):
        return self  # a copy of a model is on the same ranks

    def __reduce_ex__(self, protocol):
        raise ValueError("a grid of ranks cannot be pickled; of a model, save ht.gather_state_dict(model)")

    def plane(self, *names: str) -> Axis:
        """The ranks that differ from this one only along these tensor axes, in row-major order."""
        return self._axes["+".join(name for name in TENSOR if name in names)]

    def axes(self) -> list[Axis]:
        """All there are, in one order on all ranks."""
        return list(self._axes.values())

    def members(self, axis: str) -> list[int]:
        """Ranks of the grid along an axis, by its name, in the order of their ranks in it; this one among them."""
        names = parts_of(axis)
        ranges = (range(size) if name in names else [self.coords[name]] for name, size in self.shape.items())
        strides = [math.prod(list(self.shape.values())[n + 1 :]) for n in range(len(AXES))]
        return [sum(map(operator.mul, place, strides)) for place in itertools.product(*ranges)]

    def check_whole_sequences(self, what: str) -> None:
        """Raise ValueError where ranks share sequences, naming `what` cannot have that."""
        if self.sequence.size > 1:
            sizes = tuple(self.shape[axis] for axis in JOINED["data"])
            raise ValueError(
                f"{what} has whole sequences on each rank, got grid.data = {sizes} of replica, ring and ulysses; use "
                f"grid.data = {self.data.size}"
            )

    def free(self) -> None:
        """Give back the communicators and the shared memory. Collective; nothing of the grid may be used after it, nor
        any tensor in its memory, such as the gradients in the buckets of `DataParallel`."""
        while self.transport.resources:
            self.transport.resources.pop().free()
        self.transport.watchdog = self.transport.checker = None
        self.transport.reducers.clear()
        self.transport.workspaces.clear()
        for axis in reversed(self._axes.values()):
            axis.comm.Free()

    def __enter__(self) -> Grid:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:  # on an error the other ranks may be elsewhere, and would be waited for
            self.free()

    def describe(self) -> str:
        """The rank table: one line a rank with its coordinates, this rank marked by an arrow; in larger grids the first
        and the last ranks, and those around this one."""
        names = AXES if size_of(self.shape, "sequence") > 1 else ("replica", "pipeline", *TENSOR)
        shown = [rank for rank in range(self.size) if self.size <= 2 * ENDS or self._is_shown(rank)]
        titles = {axis: "data" if axis == "replica" and len(names) < len(AXES) else axis for axis in names}
        lines = [
            f"grid of {self.size} ranks: {describe_shape(self.shape)}",
            "  rank  " + "  ".join(titles.values()),
        ]
        for rank, after in zip(shown, (*shown[1:], self.size)):
            place = dict(zip(AXES, self._place(rank)))
            arrow = "→" if rank == self.rank else " "
            columns = (f"{place[axis]:{len(title)}d}" for axis, title in titles.items())
            lines.append("  ".join((f"{arrow} {rank:4d}", *columns)))
            if after > rank + 1:
                lines.append(f"     … {after - rank - 1} more")
        return "\n".join(lines)

    def _is_shown(self, rank):
        return rank < ENDS or rank >= self.size - ENDS // 2 or abs(rank - self.rank) <= ENDS // 4

    def _place(self, rank):
        """Coordinates of a rank."""
        place = []
        for size in reversed(self.shape.values()):
            rank, coordinate = divmod(rank, size)
            place.append(coordinate)
        return place[::-1]


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


def describe_shape(shape: dict[str, int]) -> str:
    """
    >>> describe_shape(grid_shape(2, 1, 4))
    'data 2 × pipeline 1 × tensor (4, 1, 1)'
    >>> describe_shape(grid_shape((1, 2, 1), 1, 4))
    'data (1, 2, 1) × pipeline 1 × tensor (4, 1, 1)'
    """
    data, pipeline, tensor = grid_arguments(shape)
    return f"data {data} × pipeline {pipeline} × tensor {tensor}"


def grid_arguments(shape: dict[str, int]):
    """(data, pipeline, tensor) as `Grid` takes them."""
    data = tuple(shape[axis] for axis in JOINED["data"])
    return data[0] if data[1:] == (1, 1) else data, shape["pipeline"], tuple(shape[axis] for axis in TENSOR)


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


def _subsets(names):
    return itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(1, len(names) + 1))
