"""Weights that are spread as experts are, of which each rank of a stage has its own tokens: training is that of one
rank with every strategy, clipped by the norm in which each expert counts once."""

import pytest
import torch
from expert_shard_checks import CLIP, GRIDS, STEPS, WIDTH, Run, Whole, batches, check, grid_of, optimizer_of, serial

import hpctrain as ht
from hpctrain import Grid
from hpctrain.data_parallel.alike import differing
from hpctrain.shard import expert_shard, split_sizes

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(*GRIDS)]


@pytest.mark.parametrize(("experts", "grids"), [(5, 8), (3, 1), (1, 2)])
@pytest.mark.parametrize("method", ["ddp", "mixed", "zero1", "zero2", "zero3"])
def test_equals_one_rank(world, method, experts, grids):
    for number, shape in enumerate(GRIDS[world.size][:grids]):
        with grid_of(shape, messages=number % 2 == 1) as grid:
            run = Run(grid, experts, method)
            check(run, run.steps(), serial(experts))


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize("method", ["ddp", "zero1", "zero2", "zero3"])
def test_two_replicas_of_each_stage(world, method):
    """A pipeline rank holds all stages; the gradients of the two that hold an expert are summed as well."""
    run = Run(Grid(world.size // 2, 2, 1, expert=2), 5, method, pipeline="chimera")
    check(run, run.steps(), serial(5))


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_gradients(world, bucket_bytes):
    """Each is the sum over the tokens of all ranks, neither multiplied nor divided by the ranks that hold experts."""
    for shape in GRIDS[world.size]:
        with grid_of(shape) as grid:
            if grid.pipeline.size > 1:
                continue
            model = Whole(grid, 5)
            strategy = ht.data_parallel.DataParallel(model.parameters(), grid, bucket_bytes=bucket_bytes)
            strategy.zero_grad()
            *others, last = batches(grid, 0)
            for batch in others:
                model(batch).backward()
            strategy.enable_grad_sync()
            model(last).backward()
            strategy.finish_grad_sync()
            for name, p in model.named_parameters():
                whole = serial(5).gradients[0][name.rpartition(".")[2]]
                torch.testing.assert_close(p.grad, whole[p.shard.slices], rtol=1e-12, atol=1e-14)


def test_a_loop_of_one_s_own(world):
    """ht.sync_gradients and ht.clip_grad_norm_; ranks without tokens have no gradients."""
    for shape in GRIDS[world.size]:
        with grid_of(shape) as grid:
            if grid.pipeline.size > 1:
                continue
            model = Whole(grid, 5)
            optimizer = optimizer_of(model.parameters())
            expected, without = serial(5), grid.data.size // 2 if grid.copies.size > 1 else 0
            for step in range(STEPS):
                optimizer.zero_grad()
                for batch in batches(grid, step, without):
                    model(batch).backward()
                for p in model.parameters():
                    p.grad = p.grad if p.grad.any() else None
                ht.sync_gradients(model, grid)
                if world.size > 1:
                    with pytest.raises(ValueError, match="ht.sync_gradients was called twice"):
                        ht.sync_gradients(model, grid)
                norm = ht.clip_grad_norm_(model, CLIP, grid)
                assert norm.item() == pytest.approx(expected.norms[step], rel=1e-12)
                for p in model.parameters():
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                optimizer.step()
            for name, p in model.named_parameters():
                whole = expected.weights[name.rpartition(".")[2]].detach()
                torch.testing.assert_close(p.detach(), whole[p.shard.slices], rtol=1e-11, atol=1e-13)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(("method", "servers"), [("local_sgd", 0), ("parameter_server", 1)])
def test_where_every_replica_has_all_weights(world, method, servers):
    """Such strategies are right where all ranks have all experts, and refused on all of them where they have not."""
    for shape in {2: [(2, 1, 1, 1)], 3: [(3, 1, 1, 1)], 4: [(2, 1, (1, 2, 1), 1)]}[world.size]:
        run = Run(Grid(*shape), 5, method, clip=0.0, optimizer="sgd")
        got, expected = run.steps(servers=servers), serial(5, 0.0, "sgd")
        if method == "local_sgd":  # whose norms are those of its replicas
            got = [(loss, norm) for (loss, _), norm in zip(got, expected.norms)]
        check(run, got, expected)
    with pytest.raises(ValueError, match=f"data_parallel.method = {method} has all weights on every replica, got"):
        Run(Grid(world.size, expert=world.size), 5, method)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", ["ddp", "zero1", "zero2", "zero3"])
def test_bytes(world, method):
    """Experts' gradients travel to their copies alone, as many bytes as theory says: those of one sum a step."""
    for shape, copies in (((4, 1, 1, 2), 2), ((2, 1, 2, 4), 1)):
        grid = grid_of(shape, messages=True)
        run = Run(grid, 5, method)
        run.steps(0, 1)
        grid.transport.traffic.clear()
        run.steps(1, 2)
        experts = split_sizes(5, grid.expert.size)[grid.expert.rank]
        elements = experts * WIDTH * (WIDTH + 1)
        # gradients scattered as often as there are microbatches, and weights gathered for their forwards and backwards
        times = {"ddp": 2, "zero1": 2, "zero2": 3, "zero3": 6}[method]
        received = grid.transport.traffic.total("received", axes=("copies",))
        assert received == 8 * times * elements * (copies - 1) // copies


@pytest.mark.ranks(4)
def test_a_flipped_bit(world):
    """In one of two copies of an expert it is found; other experts are not the same weights."""
    for shape, rank, others in (((4, 1, 1, 2), 2, "rank 0 and rank 2"), ((2, 1, (1, 2, 1), 2), 3, "rank 1 and rank 3")):
        grid = Grid(*shape)
        names = {p: name for name, p in Whole(grid, 5).named_parameters()}
        assert differing(names, grid) == []
        if world.rank == rank:
            (weight,) = (p for p, name in names.items() if name == "stage.1.weight")
            weight.data.view(torch.int64)[0, 1, 2] ^= 1 << 40
        said = [f"stage.1.weight differs between {others}"]
        assert differing(names, grid) == (said if grid.expert.rank == rank % 2 else [])


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("experts", "ranks", "held"),
    [(5, 4, [(0, 2), (2, 3), (3, 4), (4, 5)]), (3, 4, [(0, 1), (1, 2), (2, 3), (3, 3)]), (5, 1, [(0, 5)])],
)
def test_which_experts_a_rank_holds(world, experts, ranks, held):
    for rank, (start, stop) in enumerate(held):
        shard = expert_shard((experts, 4, 2), ranks, rank)
        assert shard.slices == (slice(start, stop), slice(0, 4), slice(0, 2))
        assert (shard.alike, shard.replicated) == (("copies", ()) if ranks > 1 else ("data", ("x", "y", "z")))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("ranks", "tensor", "held"),
    [
        (4, 2, [(0, 3, 0, 2), (0, 3, 2, 4), (3, 5, 0, 2), (3, 5, 2, 4)]),
        (3, 3, [(0, 5, 0, 2), (0, 5, 2, 3), (0, 5, 3, 4)]),
    ],
)
def test_which_part_of_experts_a_rank_holds(world, ranks, tensor, held):
    for rank, (start, stop, first, last) in enumerate(held):
        shard = expert_shard((5, 4, 2), ranks, rank, tensor, -2)
        assert shard.slices == (slice(start, stop), slice(first, last), slice(0, 2))
        assert (shard.alike, shard.replicated) == ("copies", ())
