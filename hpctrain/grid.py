"""The process grid: MPI ranks arranged as data × pipeline × tensor, where data is replica × ring × ulysses, and tensor
x × y × z; those of a pipeline stage are copies × expert as well.

Knows nothing of tensors. Importing this file does not start MPI; building a `Grid` does.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from hpctrain.grid_shape import (
    AXES,
    JOINED,
    TENSOR,
    check_alike,
    check_boxes,
    check_expert,
    check_ranks,
    describe_shape,
    grid_shape,
    parts_of,
    place_of,
    size_of,
)
from hpctrain.reclaim import Freed, Holdings, free_comm, made_of, reclaim
from hpctrain.trace import Trace
from hpctrain.traffic import Traffic

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.shard import Shard

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
        trace: `Trace` that records every operation and pipeline action, or None.
        resources: what `comm/` made for the grid and `Grid.free` frees, in the order in which it was made: windows of
            shared memory and communicators.
        reducers: the `comm.algorithms.Reducer` of each axis for which `comm.choose_all_reduce` chose one.
        workspaces: scratch memory that `comm.workspace` made for an axis.
        repartitions: those that `comm.functional.reshard` made for pairs of layouts.
        unfinished: transfers that nobody waited for, and whose memory MPI may still read and write.
        holdings: the handles of MPI's that are the grid's, for when nobody uses it any more.
    """

    traffic: Traffic = field(default_factory=Traffic)
    cuda_aware: bool = False
    synchronous: bool = False
    watchdog: OperationWatch | None = None
    checker: Callable[[Axis, str, tuple, dict], None] | None = None
    trace: Trace | None = None
    resources: list[Resource] = field(default_factory=list)
    reducers: dict = field(default_factory=dict)
    workspaces: dict = field(default_factory=dict)
    repartitions: dict = field(default_factory=dict)
    unfinished: list = field(default_factory=list)
    holdings: Holdings = field(default_factory=Holdings)


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

    def __init__(self, name: str, comm: MPI.Intracomm, nodes: Iterable[int], transport: Transport):
        self.name = name
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.nodes = tuple(nodes)
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
        expert: ranks that the experts of a mixture are spread over: a divisor of data × tensor.
        expert_tensor: neighbours among these ranks that divide each of their experts between them: a divisor of
            `expert`; 1 for whole experts. Megatron's expert tensor parallelism.
        comm: the communicator to arrange, `MPI.COMM_WORLD` by default.

    `grid.data`, `grid.pipeline`, `grid.tensor` and `grid.tensor.x`, `.y`, `.z` are `Axis` objects, and so are the parts
    of data: `grid.replica`, `.ring`, `.ulysses`, and `.sequence`, which is ring × ulysses. All of data hold the same
    weights, but for experts. `grid.plane("x", "z")` gives the ranks that differ along several tensor axes; `grid.shape`
    is the size of each of AXES, and `grid.coords` this rank's place; `grid.expert_tensor` is as it was given.

    Experts divide the ranks of a pipeline stage once more: of its data × tensor ranks, in their order, each `expert`
    neighbours hold all experts between them, along `grid.expert`, and the ranks along `grid.copies` hold the same ones.

    A grid holds a communicator for each axis of several ranks, and one for all others: at most 16 (itself, data and its
    4 parts, pipeline, the 7 sets of tensor axes, expert and copies) and that one. Checked mode has each of the former
    once more. A grid also holds the node of every rank along each axis. `comm/` adds a window of shared memory for each
    bucket of gradients, up to four for the workspaces of an axis that are in use, and two for the sums of each ZeRO-2
    or 3 strategy. `free()` gives them back; so does the end of `with Grid(...) as grid:`. Of a grid that is dropped
    instead, with its axes and all tensors in its shared memory, on every rank, they are given back when the next grid
    is made of the same `comm`.

    Stages may arrange their ranks in different boxes: `boxes` has one (x, y, z) for each rank of the pipeline axis, of
    as many ranks as `tensor`. `grid.shape` and `grid.coords` are then those of this rank's stage, `grid.boxes` all.

    Raises:
        ValueError: on every rank, when a size is not a positive integer, the product of data, pipeline and tensor is
            not the number of ranks, `expert` does not divide data × tensor, nor `expert_tensor` that, or boxes are of
            other numbers of ranks.
    """

    def __init__(
        self,
        data: int | tuple[int, int, int] = 1,
        pipeline: int = 1,
        tensor: int | tuple[int, int, int] = (1, 1, 1),
        expert: int = 1,
        expert_tensor: int = 1,
        comm: MPI.Intracomm | None = None,
        boxes: Sequence[tuple[int, int, int]] | None = None,
    ):
        from mpi4py import MPI  # starts MPI, so not at import

        comm = MPI.COMM_WORLD if comm is None else comm
        if not (comm and hasattr(comm, "Create_cart")):
            raise ValueError(f"comm must be a communicator of mpi4py with this rank in it, got {comm!r}")
        check_alike(comm.allgather(json.dumps([data, pipeline, tensor, expert, expert_tensor, boxes], default=repr)))
        self.shape = grid_shape(data, pipeline, tensor)
        self.boxes = check_boxes(self.shape, boxes)
        check_expert(self.shape, expert, expert_tensor)
        check_ranks(self.shape, comm.size)
        reclaim(comm)

        self.transport = Transport()
        self._made = made_of(comm)
        self.comm = comm.Create_cart(tuple(self.shape.values()), periods=[True] * len(AXES), reorder=False)
        self.rank, self.size = self.comm.rank, self.comm.size
        self._expert, self.expert_tensor = expert, expert_tensor
        self.coords = self.place_of(self.rank)
        self.shape |= dict(zip(TENSOR, self.boxes[self.coords["pipeline"]]))
        shared = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        nodes = self.comm.allgather(shared.bcast(self.rank))  # a node is named by its first rank
        shared.Free()
        axes = {"world": Axis("world", self.comm, nodes, self.transport)}
        alone: MPI.Intracomm = MPI.COMM_SELF.Dup()  # for all axes of one rank, whose operations wait for nobody
        # Sub and Split are collective, so that all are made here, in one order, rather than when first asked for.
        planes = ("data", "replica", "sequence", "ring", "ulysses", "pipeline", *map("+".join, _subsets(TENSOR)))
        for name in (*planes, "expert", "copies"):
            members = self.members(name)
            if boxes is None and len(members) == 1:  # on all ranks
                sub = alone
            elif boxes is None and name in planes:
                sub = self.comm.Sub([axis in parts_of(name) for axis in AXES])
            else:
                sub = cast("MPI.Intracomm", self.comm.Split(members[0], members.index(self.rank)))
            axes[name] = Axis(name, sub, (nodes[rank] for rank in members), self.transport)
        self._axes = axes
        holdings = self.transport.holdings
        holdings.add(free_comm(alone))
        for axis in axes.values():
            holdings.add(free_comm(axis.comm))
        holdings.used_by(self.transport)
        self._made.append(holdings)
        self.expert, self.copies = axes["expert"], axes["copies"]
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

    def place_of(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank by axis, in the box of its stage."""
        stage = place_of(rank, self.shape, self._expert)["pipeline"]
        return place_of(rank, self.shape | dict(zip(TENSOR, self.boxes[stage])), self._expert)

    @property
    def sizes(self) -> dict[str, int]:
        """Those of `shape`, and of expert and copies."""
        return self.shape | {"expert": self.expert.size, "copies": self.copies.size}

    def plane(self, *names: str) -> Axis:
        """The ranks that differ from this one only along these tensor axes, in row-major order."""
        return self._axes["+".join(name for name in TENSOR if name in names)]

    def alike(self, shard: Shard) -> Axis:
        """The ranks that hold the same slice as this one, beside those of tensor axes."""
        return self._axes[shard.alike]

    def spanning(self, names: Collection[str]) -> Axis:
        """The fewest ranks that have a communicator and differ along all of these of AXES, "expert" and "copies"."""
        found = (axis for axis in self.axes() if {*names} <= {*parts_of(axis.name)})
        return min(found, key=lambda axis: axis.size, default=self.world)

    def axes(self) -> list[Axis]:
        """All there are, in one order on all ranks."""
        return list(self._axes.values())

    def members(self, axis: str) -> list[int]:
        """Ranks of the grid along an axis, by its name, in the order of their ranks in it; this one among them."""
        if axis in ("expert", "copies"):
            stage, size, expert = self.members("stage"), self._expert, self.coords["expert"]
            first = self.coords["copies"] * size
            return stage[first : first + size] if axis == "expert" else stage[expert::size]
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

    def check_whole_experts(self, what: str) -> None:
        """Raise ValueError where experts are spread over ranks, naming `what` cannot have that."""
        if self.expert.size > 1:
            raise ValueError(f"{what} has all weights on every replica, got grid.expert = {self.expert.size}; use 1")

    def free(self) -> None:
        """Give back the communicators and the shared memory. Collective; a second time does nothing.

        Nothing of the grid may be used after it: operations along its axes raise ValueError, and tensors in its memory,
        such as the gradients in the buckets of `DataParallel`, are gone.
        """
        if isinstance(self.comm, Freed):
            return
        while self.transport.resources:
            self.transport.resources.pop().free()
        self.transport.watchdog = self.transport.checker = None
        self.transport.reducers.clear()
        self.transport.workspaces.clear()
        self.transport.repartitions.clear()
        self.transport.holdings.free()
        self._made.remove(self.transport.holdings)
        self.comm = cast("MPI.Cartcomm", Freed())
        for axis in self._axes.values():
            axis.comm = self.comm

    def __enter__(self) -> Grid:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:  # on an error the other ranks may be elsewhere, and would be waited for
            self.free()

    def describe(self) -> str:
        """The rank table: one line a rank with its coordinates, this rank marked by an arrow; in larger grids the first
        and the last ranks, and those around this one."""
        names = AXES if size_of(self.shape, "sequence") > 1 else ("replica", "pipeline", *TENSOR)
        experts = ("copies", "expert") if self.expert.size > 1 else ()
        shown = [rank for rank in range(self.size) if self.size <= 2 * ENDS or self._is_shown(rank)]
        titles = {axis: "data" if axis == "replica" and len(names) < len(AXES) else axis for axis in names + experts}
        alike = len({*self.boxes}) == 1
        boxes = "" if alike else f"; boxes of the stages {', '.join(map(str, self.boxes))}"
        lines = [
            f"grid of {self.size} ranks: {describe_shape(self.shape, self.expert.size, self.expert_tensor)}" + boxes,
            "  rank  " + "  ".join(titles.values()),
        ]
        for rank, after in zip(shown, (*shown[1:], self.size)):
            place = self.place_of(rank)
            arrow = "→" if rank == self.rank else " "
            columns = (f"{place[axis]:{len(title)}d}" for axis, title in titles.items())
            lines.append("  ".join((f"{arrow} {rank:4d}", *columns)))
            if after > rank + 1:
                lines.append(f"     … {after - rank - 1} more")
        return "\n".join(lines)

    def _is_shown(self, rank):
        return rank < ENDS or rank >= self.size - ENDS // 2 or abs(rank - self.rank) <= ENDS // 4


def _subsets(names):
    return itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(1, len(names) + 1))
