"""The grid: who stands where, who talks to whom, and what is refused."""

import gc

import pytest
import torch

from hpctrain import Grid, comm, parallelize
from hpctrain.grid_shape import AXES, grid_shape

pytestmark = pytest.mark.mpi

# rank: (replica, ring, pipeline, ulysses, x, y, z), and who shares its data, pipeline, x, y, z axes and the tensor axis
GRID_2_2_2 = {
    0: ((0, 0, 0, 0, 0, 0, 0), [0, 4], [0, 2], [0, 1], [0], [0], [0, 1]),
    1: ((0, 0, 0, 0, 1, 0, 0), [1, 5], [1, 3], [0, 1], [1], [1], [0, 1]),
    2: ((0, 0, 1, 0, 0, 0, 0), [2, 6], [0, 2], [2, 3], [2], [2], [2, 3]),
    3: ((0, 0, 1, 0, 1, 0, 0), [3, 7], [1, 3], [2, 3], [3], [3], [2, 3]),
    4: ((1, 0, 0, 0, 0, 0, 0), [0, 4], [4, 6], [4, 5], [4], [4], [4, 5]),
    5: ((1, 0, 0, 0, 1, 0, 0), [1, 5], [5, 7], [4, 5], [5], [5], [4, 5]),
    6: ((1, 0, 1, 0, 0, 0, 0), [2, 6], [4, 6], [6, 7], [6], [6], [6, 7]),
    7: ((1, 0, 1, 0, 1, 0, 0), [3, 7], [5, 7], [6, 7], [7], [7], [6, 7]),
}
# Of data=(1, 2, 2), pipeline=2: those it shares the data, replica, sequence, ring, ulysses and pipeline axes with
SEQUENCE_2_2 = {
    0: ((0, 0, 0, 0, 0, 0, 0), [0, 1, 4, 5], [0], [0, 1, 4, 5], [0, 4], [0, 1], [0, 2]),
    1: ((0, 0, 0, 1, 0, 0, 0), [0, 1, 4, 5], [1], [0, 1, 4, 5], [1, 5], [0, 1], [1, 3]),
    2: ((0, 0, 1, 0, 0, 0, 0), [2, 3, 6, 7], [2], [2, 3, 6, 7], [2, 6], [2, 3], [0, 2]),
    3: ((0, 0, 1, 1, 0, 0, 0), [2, 3, 6, 7], [3], [2, 3, 6, 7], [3, 7], [2, 3], [1, 3]),
    4: ((0, 1, 0, 0, 0, 0, 0), [0, 1, 4, 5], [4], [0, 1, 4, 5], [0, 4], [4, 5], [4, 6]),
    5: ((0, 1, 0, 1, 0, 0, 0), [0, 1, 4, 5], [5], [0, 1, 4, 5], [1, 5], [4, 5], [5, 7]),
    6: ((0, 1, 1, 0, 0, 0, 0), [2, 3, 6, 7], [6], [2, 3, 6, 7], [2, 6], [6, 7], [4, 6]),
    7: ((0, 1, 1, 1, 0, 0, 0), [2, 3, 6, 7], [7], [2, 3, 6, 7], [3, 7], [6, 7], [5, 7]),
}
# Of data=(2, 1, 2), tensor=2: the same, and the x axis; and of data=(2, 2, 1), tensor=2
ULYSSES_AND_X = {
    0: ((0, 0, 0, 0, 0, 0, 0), [0, 2, 4, 6], [0, 4], [0, 2], [0], [0, 2], [0, 1]),
    1: ((0, 0, 0, 0, 1, 0, 0), [1, 3, 5, 7], [1, 5], [1, 3], [1], [1, 3], [0, 1]),
    2: ((0, 0, 0, 1, 0, 0, 0), [0, 2, 4, 6], [2, 6], [0, 2], [2], [0, 2], [2, 3]),
    3: ((0, 0, 0, 1, 1, 0, 0), [1, 3, 5, 7], [3, 7], [1, 3], [3], [1, 3], [2, 3]),
    4: ((1, 0, 0, 0, 0, 0, 0), [0, 2, 4, 6], [0, 4], [4, 6], [4], [4, 6], [4, 5]),
    5: ((1, 0, 0, 0, 1, 0, 0), [1, 3, 5, 7], [1, 5], [5, 7], [5], [5, 7], [4, 5]),
    6: ((1, 0, 0, 1, 0, 0, 0), [0, 2, 4, 6], [2, 6], [4, 6], [6], [4, 6], [6, 7]),
    7: ((1, 0, 0, 1, 1, 0, 0), [1, 3, 5, 7], [3, 7], [5, 7], [7], [5, 7], [6, 7]),
}
RING_AND_X = {
    0: ((0, 0, 0, 0, 0, 0, 0), [0, 2, 4, 6], [0, 4], [0, 2], [0, 2], [0], [0, 1]),
    1: ((0, 0, 0, 0, 1, 0, 0), [1, 3, 5, 7], [1, 5], [1, 3], [1, 3], [1], [0, 1]),
    2: ((0, 1, 0, 0, 0, 0, 0), [0, 2, 4, 6], [2, 6], [0, 2], [0, 2], [2], [2, 3]),
    3: ((0, 1, 0, 0, 1, 0, 0), [1, 3, 5, 7], [3, 7], [1, 3], [1, 3], [3], [2, 3]),
    4: ((1, 0, 0, 0, 0, 0, 0), [0, 2, 4, 6], [0, 4], [4, 6], [4, 6], [4], [4, 5]),
    5: ((1, 0, 0, 0, 1, 0, 0), [1, 3, 5, 7], [1, 5], [5, 7], [5, 7], [5], [4, 5]),
    6: ((1, 1, 0, 0, 0, 0, 0), [0, 2, 4, 6], [2, 6], [4, 6], [4, 6], [6], [6, 7]),
    7: ((1, 1, 0, 0, 1, 0, 0), [1, 3, 5, 7], [3, 7], [5, 7], [5, 7], [7], [6, 7]),
}
BOX_2_2_2 = {
    0: ((0, 0, 0, 0, 0, 0, 0), [0, 4], [0, 2], [0, 1], [0, 1, 4, 5]),
    1: ((0, 0, 0, 0, 0, 0, 1), [1, 5], [1, 3], [0, 1], [0, 1, 4, 5]),
    2: ((0, 0, 0, 0, 0, 1, 0), [2, 6], [0, 2], [2, 3], [2, 3, 6, 7]),
    3: ((0, 0, 0, 0, 0, 1, 1), [3, 7], [1, 3], [2, 3], [2, 3, 6, 7]),
    4: ((0, 0, 0, 0, 1, 0, 0), [0, 4], [4, 6], [4, 5], [0, 1, 4, 5]),
    5: ((0, 0, 0, 0, 1, 0, 1), [1, 5], [5, 7], [4, 5], [0, 1, 4, 5]),
    6: ((0, 0, 0, 0, 1, 1, 0), [2, 6], [4, 6], [6, 7], [2, 3, 6, 7]),
    7: ((0, 0, 0, 0, 1, 1, 1), [3, 7], [5, 7], [6, 7], [2, 3, 6, 7]),
}


def members(axis, grid):
    assert axis.size == axis.comm.size
    assert axis.rank == axis.comm.rank
    return axis.comm.allgather(grid.rank)


@pytest.mark.ranks(8)
def test_data_pipeline_tensor(world):
    grid = Grid(data=2, pipeline=2, tensor=2)
    coords, *lines = GRID_2_2_2[world.rank]
    assert tuple(grid.coords[axis] for axis in AXES) == coords
    t = grid.tensor
    assert [members(a, grid) for a in (grid.data, grid.pipeline, t.x, t.y, t.z, t)] == lines


@pytest.mark.ranks(8)
def test_box_and_planes(world):
    grid = Grid(tensor=(2, 2, 2))
    coords, x, y, z, xz = BOX_2_2_2[world.rank]
    assert tuple(grid.coords[axis] for axis in AXES) == coords
    assert [members(a, grid) for a in (grid.tensor.x, grid.tensor.y, grid.tensor.z)] == [x, y, z]
    assert members(grid.plane("z", "x"), grid) == xz  # row-major, however it is asked for
    assert members(grid.plane("x", "y", "z"), grid) == list(range(8))


@pytest.mark.ranks(8)
@pytest.mark.parametrize(
    ("shape", "table"),
    [
        ({"data": (1, 2, 2), "pipeline": 2}, SEQUENCE_2_2),
        ({"data": (2, 1, 2), "tensor": 2}, ULYSSES_AND_X),
        ({"data": (2, 2, 1), "tensor": 2}, RING_AND_X),
    ],
)
def test_sequence_axes(world, shape, table):
    grid = Grid(**shape)
    coords, *lines = table[world.rank]
    assert tuple(grid.coords[axis] for axis in AXES) == coords
    others = grid.tensor.x if "tensor" in shape else grid.pipeline
    axes = (grid.data, grid.replica, grid.sequence, grid.ring, grid.ulysses, others)
    assert [members(axis, grid) for axis in axes] == lines
    assert [axis.name for axis in axes[:5]] == ["data", "replica", "sequence", "ring", "ulysses"]
    replicas, rings, ulysses = shape["data"]
    assert grid.data.rank == (grid.replica.rank * rings + grid.ring.rank) * ulysses + grid.ulysses.rank
    assert grid.sequence.rank == grid.ring.rank * ulysses + grid.ulysses.rank


# Of a grid: (coordinates along expert and copies, ranks along expert, ranks along copies) of each rank
EXPERTS = {
    4: {
        # expert neighbours are ulysses neighbours
        ((2, 1, 2), 1, 1, 2): [
            (0, 0, [0, 1], [0, 2]), (1, 0, [0, 1], [1, 3]), (0, 1, [2, 3], [0, 2]), (1, 1, [2, 3], [1, 3]),
        ],
        # tensor and data ranks together
        (2, 1, (1, 2, 1), 4): [
            (0, 0, [0, 1, 2, 3], [0]), (1, 0, [0, 1, 2, 3], [1]), (2, 0, [0, 1, 2, 3], [2]), (3, 0, [0, 1, 2, 3], [3]),
        ],
        # within a stage: ranks 0 and 2 are those of the first
        (2, 2, 1, 2): [(0, 0, [0, 2], [0]), (0, 0, [1, 3], [1]), (1, 0, [0, 2], [2]), (1, 0, [1, 3], [3])],
        # without experts every rank of a stage is a copy
        (2, 2, 1, 1): [(0, 0, [0], [0, 2]), (0, 0, [1], [1, 3]), (0, 1, [2], [0, 2]), (0, 1, [3], [1, 3])],
    },
    6: {
        # neither of data nor of tensor ranks a multiple
        (2, 1, 3, 2): [
            (0, 0, [0, 1], [0, 2, 4]), (1, 0, [0, 1], [1, 3, 5]), (0, 1, [2, 3], [0, 2, 4]),
            (1, 1, [2, 3], [1, 3, 5]), (0, 2, [4, 5], [0, 2, 4]), (1, 2, [4, 5], [1, 3, 5]),
        ],
    },
    8: {
        # ring, pipeline and z: the stages are 0, 1, 4, 5 and 2, 3, 6, 7
        ((1, 2, 1), 2, (1, 1, 2), 2): [
            (0, 0, [0, 1], [0, 4]), (1, 0, [0, 1], [1, 5]), (0, 0, [2, 3], [2, 6]), (1, 0, [2, 3], [3, 7]),
            (0, 1, [4, 5], [0, 4]), (1, 1, [4, 5], [1, 5]), (0, 1, [6, 7], [2, 6]), (1, 1, [6, 7], [3, 7]),
        ],
    },
}  # fmt: skip


@pytest.mark.ranks(*EXPERTS)
def test_experts(world):
    for shape, table in EXPERTS[world.size].items():
        with Grid(*shape) as grid:
            *place, expert, copies = table[world.rank]
            assert [grid.coords["expert"], grid.coords["copies"]] == [grid.expert.rank, grid.copies.rank] == place
            assert members(grid.expert, grid) == grid.members("expert") == expert
            assert members(grid.copies, grid) == grid.members("copies") == copies


@pytest.mark.ranks(2, 4)
def test_experts_that_do_not_fit_are_refused(world):
    for expert, said in ((3, "got 3"), (2 * world.size, f"got {2 * world.size}")):
        with pytest.raises(ValueError, match="grid.expert must divide the . ranks of a pipeline stage") as refused:
            Grid(world.size, expert=expert)
        assert str(refused.value).endswith(said)
    with pytest.raises(ValueError, match="grid.expert must divide the 1 ranks of a pipeline stage, data × tensor: 1,"):
        Grid(1, world.size, 1, expert=world.size)


@pytest.mark.ranks(4)
def test_describe_experts(world):
    lines = Grid(2, 2, 1, expert=2).describe().splitlines()
    assert lines[0] == "grid of 4 ranks: data 2 × pipeline 2 × tensor (1, 1, 1), experts over 2 ranks in 1 copy"
    assert [line.replace("→", " ").split() for line in lines[1:]] == [
        ["rank", "data", "pipeline", "x", "y", "z", "copies", "expert"],
        ["0", "0", "0", "0", "0", "0", "0", "0"],
        ["1", "0", "1", "0", "0", "0", "0", "0"],
        ["2", "1", "0", "0", "0", "0", "0", "1"],
        ["3", "1", "1", "0", "0", "0", "0", "1"],
    ]


def test_wrong_product_is_refused_everywhere(world):
    with pytest.raises(ValueError) as refused:
        Grid(data=world.size + 1)
    text = str(refused.value)
    assert f"has {world.size + 1} places, but there are {world.size} ranks" in text
    assert f"data={world.size} pipeline=1 tensor=(1, 1, 1)" in text
    assert set(world.allgather(text)) == {text}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("sizes", "option"),
    [
        ({"data": 0}, "grid.data must be an integer of at least 1, got 0"),
        ({"pipeline": -1}, "grid.pipeline must be an integer of at least 1, got -1"),
        ({"tensor": (1, 0, 1)}, "grid.tensor (y) must be an integer of at least 1, got 0"),
        ({"tensor": (1, 1)}, "grid.tensor must be one integer or three (x, y, z), got (1, 1)"),
        ({"data": 1.0}, "grid.data must be an integer of at least 1, got 1.0"),
        ({"data": True}, "grid.data must be an integer of at least 1, got True"),
        ({"data": (1, 2)}, "grid.data must be one integer or three (replica, ring, ulysses), got (1, 2)"),
        ({"data": (1, 0, 2)}, "grid.data (ring) must be an integer of at least 1, got 0"),
        ({"expert": 0}, "grid.expert must be an integer of at least 1, got 0"),
    ],
)
def test_bad_sizes_are_refused(world, sizes, option):
    with pytest.raises(ValueError) as refused:
        Grid(**sizes)
    assert str(refused.value) == option


@pytest.mark.ranks(2, 3, 4)
def test_all_ranks_make_the_same_grid(world):
    """Else they would make other communicators, and wait for each other for ever."""
    for sizes in ({"data": world.size}, {"data": world.size, "expert": world.size}, {"data": 0}):
        mine = sizes if world.rank == 1 else {"tensor": [world.size, 1, 1]}
        with pytest.raises(ValueError, match="all ranks must make one grid; data, .* on rank 0 and .* on rank 1$"):
            Grid(**mine)
    alike = (world.size, 1, 1) if world.rank == 1 else [world.size, 1, 1]
    assert Grid(tensor=alike).tensor.size == world.size


@pytest.mark.ranks(1, 2)
def test_what_is_no_communicator_is_refused(world):
    from mpi4py import MPI

    for given in (MPI.COMM_NULL, Grid(data=world.size).data):
        with pytest.raises(ValueError, match="comm must be a communicator of mpi4py with this rank in it, got"):
            Grid(data=world.size, comm=given)


def test_describe(world):
    grid = Grid(data=world.size)
    lines = grid.describe().splitlines()
    assert lines[0] == f"grid of {world.size} ranks: data {world.size} × pipeline 1 × tensor (1, 1, 1)"
    assert len(lines) == 2 + world.size
    marked = [line for line in lines if line.startswith("→")]
    assert [int(line.split()[1]) for line in marked] == [world.rank]


def test_describe_sequence_axes(world):
    lines = Grid(data=(1, world.size, 1)).describe().splitlines()
    data = f"(1, {world.size}, 1)" if world.size > 1 else "1"
    assert lines[0] == f"grid of {world.size} ranks: data {data} × pipeline 1 × tensor (1, 1, 1)"
    if world.size == 4:
        assert lines[1] == "  rank  replica  ring  pipeline  ulysses  x  y  z"
        assert lines[4].replace("→", " ") == "     2        0     2         0        0  0  0  0"


@pytest.mark.ranks(2)
def test_nearest_grids_of_a_sequence(world):
    with pytest.raises(ValueError, match=r"nearest grids of 2: data=\(1, 2, 1\) pipeline=1 tensor=\(1, 1, 1\);"):
        Grid(data=(1, 4, 1))


@pytest.mark.parametrize(("rank", "lines"), [(0, 27), (17, 33), (5000, 37), (9999, 27)])
def test_describe_a_large_grid(world, rank, lines):
    """At most 40 lines, this rank's among them."""
    grid = Grid(data=world.size)
    grid.size, grid.rank = 10_000, rank
    grid.shape, grid.boxes = grid_shape(1250, 1, 8), ((8, 1, 1),)
    table = grid.describe().splitlines()
    assert len(table) == lines <= 40
    shown = [line.replace("→", " ").split() for line in table[2:] if "…" not in line]
    (mine,) = (line.split()[1:] for line in table if line.startswith("→"))
    assert [int(n) for n in mine] == [rank, rank // 8, 0, rank % 8, 0, 0]
    hidden = sum(int(line.split()[1]) for line in table if "…" in line)
    assert len(shown) + hidden == 10_000
    assert [int(row[0]) for row in shown[:16] + shown[-8:]] == [*range(16), *range(9992, 10_000)]


def test_axes_of_one_rank_share_a_communicator(world):
    with Grid(data=world.size) as grid:
        several = [axis.comm.handle for axis in grid.axes() if axis.size > 1 or axis.name == "world"]
        alone = {axis.comm.handle for axis in grid.axes()} - {*several}
        assert len({*several}) == len(several)
        assert len(alone) == 1


def test_what_a_grid_made_is_freed(world):
    """Its communicators and its shared memory, with all that `comm` made for it."""

    def mapped():
        with open("/proc/self/maps") as maps:
            return sum("/dev/shm" in line for line in maps)

    gc.collect()  # of earlier tests, which would else go in the middle of this one
    Grid(tensor=world.size).free()  # and frees what they dropped
    before = mapped()
    for _ in range(3):
        with Grid(tensor=world.size) as grid:
            line = grid.tensor.x
            comm.CollectiveChecker(grid)
            comm.choose_all_reduce(line, "hierarchical")
            comm.all_reduce(torch.ones(5), line)
            counts = (3,) * line.size
            for use in ("blocking", "started"):
                assert comm.workspace(line, torch.ones(3), use).gather(torch.ones(3), counts).sum() == 3 * line.size
            made = (
                comm.AllReduceBuffer(line, 1000, torch.ones(1), "shared"),
                comm.ReplicatedBuffer(line, 1000, torch.ones(1)),
            )
            if line.size > 1:
                assert mapped() > before
        del made
        assert mapped() == before
        assert grid.transport.resources == []
        for axis in (grid, grid.data, grid.pipeline, line, grid.plane("y", "z")):
            with pytest.raises(ValueError, match="the grid was given back by .*; make another one by ht.Grid"):
                axis.comm.barrier()
        grid.free()  # a second time is nothing
    with pytest.raises(ValueError, match="the grid was given back"):
        parallelize(torch.nn.Linear(2, 2), grid)


def test_an_error_does_not_wait_for_the_others(world):
    """Of all ranks only this one may have it: the grid is left as it is."""
    with pytest.raises(KeyError), Grid(tensor=world.size) as grid:
        raise KeyError
    assert grid.comm.size == world.size


def test_a_part_of_the_ranks(world):
    """A grid on a sub-communicator."""
    part = world.Split(world.rank % 2)
    grid = Grid(data=part.size, comm=part)
    assert (grid.size, grid.coords["replica"]) == (part.size, part.rank)
    assert list(grid.coords) == [*AXES, "expert", "copies"]
