"""Resharding: every pair of layouts on boxes of ranks gives the slices of the whole tensor, is linear with the adjoint
that it says, and moves what a rank lacks and nothing else."""

import itertools
import math

import pytest
import torch

from hpctrain import Grid
from hpctrain.comm import Repartition, functional, out_of_place
from hpctrain.layout import Cut, Layout, elements_received

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4, 8)]

BOXES = {2: [(2, 1, 1), (1, 1, 2)], 4: [(2, 2, 1), (1, 4, 1), (2, 1, 2)], 8: [(2, 2, 2)]}
SHAPES = [(7, 6), (3, 1), (0, 4)]  # uneven, with fewer elements than ranks, with none
EACH = {2: 1, 4: 1, 8: 29}  # one in so many pairs


def layouts(axes):
    """{dim: axes in every order} that cut a matrix over some of the axes."""
    for count in range(len(axes) + 1):
        for chosen in itertools.permutations(axes, count):
            for first in range(count + 1):
                yield {0: chosen[:first], 1: chosen[first:]}


def pairs(box):
    """(source, axes of summands, target): all of them for few ranks."""
    axes = [axis for axis, size in zip("xyz", box) if size > 1]
    found = []
    for source, target in itertools.product(layouts(axes), repeat=2):
        free = [axis for axis in axes if axis not in (*source[0], *source[1])]
        found += [(source, (), target)] + [(source, tuple(free), target)] * bool(free)
    return found[:: EACH[math.prod(box)]]


def part(whole, axes, sizes, place):
    """The part of a matrix that a rank has, cut by torch, whose first parts are the longer ones as well."""
    for dim in axes:
        for axis in axes[dim]:
            whole = whole.tensor_split(sizes[axis], dim)[place[axis]]
    return whole


def mask(shape, axes, sizes, place):
    """Where a rank's part is."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    found = torch.zeros(math.prod(shape), dtype=torch.bool)
    found[part(numbers, axes, sizes, place).reshape(-1)] = True
    return found


def lacked(shape, source, partial, target, sizes, place):
    """Elements that a rank has to be sent at least: of a sum that several ranks are to have, each makes a part."""
    summands = math.prod(sizes[axis] for axis in partial)
    shared = [axis for axis in partial if axis not in (*target[0], *target[1]) and sizes[axis] > 1]
    if shared:
        local = [shape[dim] / math.prod(sizes[axis] for axis in target[dim]) for dim in (0, 1)]
        dim = local.index(max(local))
        between = target | {dim: (*target[dim], *shared)}
        return lacked(shape, source, partial, between, sizes, place) + lacked(shape, between, (), target, sizes, place)
    owned, wanted = mask(shape, source, sizes, place), mask(shape, target, sizes, place)
    return int(summands * wanted.sum() - (owned & wanted).sum())


def random(shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_every_pair_of_layouts(world, monkeypatch):
    """By messages and in shared memory in turn."""
    paths = itertools.cycle([out_of_place.SMALL, 0])
    for box in BOXES[world.size]:
        with Grid(tensor=box) as grid:
            for (source, partial, target), shape in itertools.product(pairs(box), SHAPES):
                monkeypatch.setattr(out_of_place, "SMALL", next(paths))
                check(grid, shape, source, partial, target)


def check(grid, shape, source, partial, target):
    sizes, place = grid.shape, grid.coords
    summand = 0
    for axis in partial:
        summand = summand * sizes[axis] + place[axis]
    summands = [random(shape, number) for number in range(math.prod(sizes[axis] for axis in partial))]
    x = part(summands[summand], source, sizes, place).clone().requires_grad_()
    before, after = Layout.of(shape, source, partial), Layout.of(shape, target)
    traffic = grid.transport.traffic
    traffic.clear()
    y = functional.reshard(x, before, after, grid)
    case = f"{shape} {source} {partial} {target} on {sizes}"
    torch.testing.assert_close(y, part(sum(summands), target, sizes, place), rtol=1e-13, atol=1e-13, msg=case)
    due = lacked(shape, source, partial, target, sizes, place)
    assert (traffic.total("received"), elements_received(before, after, sizes, place)) == (8 * due, due), case

    seen = random(y.shape, 100 + grid.rank)
    traffic.clear()
    y.backward(seen)
    assert traffic.total("sent") == 8 * due, case
    left, right = (grid.comm.allreduce(float((a * b).sum())) for a, b in ((y.detach(), seen), (x.detach(), x.grad)))
    assert left == pytest.approx(right, rel=1e-12, abs=1e-12), case


@pytest.mark.ranks(2)
def test_collectives_are_cases(line):
    """All-gather, all-to-all, reduce-scatter, all-reduce and a slice, by hand; rank r has rows of value r + 1."""
    rank = line.rank
    with Grid(tensor=2) as grid:

        def moved(x, source, target, partial=()):
            grid.transport.traffic.clear()
            y = functional.reshard(x, Layout.of((3, 2), source, partial), Layout.of((3, 2), target), grid)
            return y.tolist(), grid.transport.traffic.total("received")

        rows = torch.full((2 - rank, 2), rank + 1.0)
        assert moved(rows, {0: "x"}, {}) == ([[1, 1], [1, 1], [2, 2]], [8, 16][rank])
        assert moved(rows, {0: "x"}, {1: "x"}) == ([[1], [1], [2]], [4, 8][rank])
        summand = torch.full((3, 2), rank + 1.0)
        assert moved(summand, {}, {0: "x"}, "x") == ([[[3, 3], [3, 3]], [[3, 3]]][rank], [16, 8][rank])
        assert moved(summand, {}, {}, "x") == ([[3, 3]] * 3, 24)
        assert moved(torch.arange(6.0).view(3, 2), {}, {1: "x"}) == ([[[0], [2], [4]], [[1], [3], [5]]][rank], 0)


@pytest.mark.ranks(4)
def test_units_joined_axes_and_other_factorisations_of_the_ranks(world):
    """Heads of 3 features over data × tensor become rows over the experts' ranks, in 16 bits summed in 32."""
    with Grid(data=2, tensor=2, expert=4) as grid:
        whole = random((5, 9), 0).to(torch.bfloat16)
        heads = Layout.of((5, 9), {1: Cut("data", 3), 0: "x"})
        experts = Layout.of((5, 9), {0: "expert"})
        here = whole[:, :6] if grid.coords["replica"] == 0 else whole[:, 6:]
        here = here[:3] if grid.coords["x"] == 0 else here[3:]
        y = functional.reshard(here, heads, experts, grid)
        assert torch.equal(y, whole.tensor_split(4)[grid.rank])
        assert torch.equal(functional.reshard(y, experts, heads, grid), here)
        small = Layout.of((1, 1), {}, partial=("data", "x"))
        summand = torch.tensor([[256.0 if grid.rank == 0 else 0.5]], dtype=torch.bfloat16)
        total = functional.reshard(summand, small, Layout.of((1, 1), {0: "data"}), grid)
        assert total.flatten().tolist() == ([258.0] if grid.coords["replica"] == 0 else [])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("small", [1 << 14, 0])  # bytes that go by messages
def test_who_has_the_same_serves_in_turn(line, monkeypatch, small):
    """Ranks 0 and 1 have the first row, 2 and 3 the second: 0 sends to 2, 1 to 3, and back; with the adjoint, each has
    the gradients of itself and of the one that it sent to."""
    rows = [(slice(0, 1), slice(0, 3)), (slice(1, 2), slice(0, 3))]
    monkeypatch.setattr(out_of_place, "SMALL", small)
    plan = Repartition(line, [rows[0]] * 2 + [rows[1]] * 2, [(slice(0, 2), slice(0, 3))] * 4)
    traffic = line.transport.traffic
    traffic.clear()
    got = plan.exchange(torch.full((1, 3), float(line.rank)))
    turn = line.rank % 2
    assert got.tolist() == [[turn] * 3, [2 + turn] * 3]
    assert (traffic.total("sent"), traffic.total("received")) == (12, 12)
    grad = plan.adjoint(torch.full((2, 3), 10.0**line.rank))
    assert grad.tolist() == [[[101] * 3, [1010] * 3][turn]]


@pytest.mark.ranks(2)
def test_what_does_not_fit_is_refused(line):
    whole = torch.ones(4, 2)
    for shape, axes, partial, says in [
        ((4, 2), {2: "x"}, (), "has dims 0 to 1, got 2"),
        ((4, 2), {0: ("x", "y"), 1: "x+z"}, (), "names every axis once, got x, y, x, z"),
        ((4, 2), {0: "x"}, "x", "names every axis once, got x, x"),
        ((4, 2), {0: "w"}, (), "axes replica, .*, got 'w'"),
        ((4, 2), {0: "expert", 1: "x"}, (), "axes of experts or those that they divide again, got expert, x"),
        ((4, 2), {0: Cut("x", 3)}, (), "4 cannot be cut in units of 3 over x"),
    ]:
        with pytest.raises(ValueError, match=says):
            Layout.of(shape, axes, partial)
    with Grid(tensor=2) as grid:
        rows, other = Layout.of((4, 2), {0: "x"}), Layout.of((2, 4), {0: "x"})
        for target, says in [(other, r"got \(4, 2\) to \(2, 4\)"), (Layout.of((4, 2), {}, "x"), "partial over x")]:
            with pytest.raises(ValueError, match=says):
                functional.reshard(whole[:2], rows, target, grid)
        with pytest.raises(ValueError, match=r"block of \(4, 2\), but its layout says \(2, 2\)"):
            functional.reshard(whole, rows, Layout.of((4, 2), {}), grid)
