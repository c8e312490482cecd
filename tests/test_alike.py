"""A single flipped bit in what several ranks hold is found, and named."""

import pytest
import torch
from training_checks import UNEVEN, fitting

from hpctrain import Grid, RngKey, Trainer, parallelize
from hpctrain.data_parallel import DataParallel, LocalSGD, ParameterServer, Zero1, Zero2, Zero3
from hpctrain.data_parallel.alike import differing
from hpctrain.digest import digest
from hpctrain.models.gpt2 import GPT2
from hpctrain.train.speeds import Speeds

DIFFERS = "differs from that of the other 2 ranks with the same slice"

# (data, pipeline, tensor), rank with a flipped bit, in which parameter, what is said
CASES = {
    1: [((1, 1, 1), None, "", [])],
    2: [((2, 1, 1), 1, "blocks.0.mlp.up.weight", ["blocks.0.mlp.up.weight differs between rank 0 and rank 1"])],
    3: [
        ((3, 1, 1), 2, "wte.weight", [f"wte.weight of rank 2 {DIFFERS}"]),
        ((3, 1, 1), 0, "ln_f.bias", [f"ln_f.bias of rank 0 {DIFFERS}"]),
        ((1, 1, (3, 1, 1)), 1, "blocks.1.ln_1.weight", [f"blocks.1.ln_1.weight of rank 1 {DIFFERS}"]),
        ((1, 1, (3, 1, 1)), 1, "blocks.1.mlp.up.weight", []),  # each has another slice
    ],
}  # fmt: skip


@pytest.mark.mpi
@pytest.mark.ranks(*CASES)
def test_a_flipped_bit(world):
    for shape, rank, name, said in CASES[world.size]:
        grid = Grid(*shape)
        model = GPT2(grid, fitting(UNEVEN, 1), key=RngKey(3), dtype=torch.float32)
        names = {p: name for name, p in model.named_parameters()}
        assert differing(names, grid) == []
        if world.rank == rank:
            words = dict(model.named_parameters())[name].data.view(-1).view(torch.int32)
            words[len(words) // 2] ^= 1 << 30
        assert differing(names, grid) == said
        found = world.allgather(differing(names, grid))
        assert all(told == said for told in found)


@pytest.mark.mpi
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", [DataParallel, Zero1, Zero2, Zero3, ParameterServer, LocalSGD])
@pytest.mark.parametrize("frozen", [False, True])
def test_replicas_that_begin_with_other_weights(world, kind, frozen):
    """Nothing would ever make them alike. All ranks refuse them; who begins alike goes on."""
    grid = Grid(data=2, tensor=world.size // 2)
    model = GPT2(grid, fitting(UNEVEN, 1), key=RngKey(3), dtype=torch.float64)
    model.ln_f.bias.requires_grad_(not frozen)
    optimizer = torch.optim.SGD(p for p in model.parameters() if p.requires_grad)
    given = model if kind is Zero3 else [*model.parameters()]
    with torch.no_grad():
        model.ln_f.bias += grid.data.rank
    with pytest.raises(ValueError, match="of shape .* differs between rank 0.* begin with the same weights"):
        kind(given, grid, optimizer)
    with torch.no_grad():
        model.ln_f.bias -= grid.data.rank
    kind(given, grid, optimizer).zero_grad()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_replicas_that_differ_in_an_earlier_strategy(world):
    """Their weights are averaged as the later one takes them."""
    grid = Grid(data=2)
    torch.manual_seed(0)
    model = parallelize(torch.nn.Linear(3, 2), grid)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    earlier = LocalSGD(model.parameters(), grid, optimizer, every=2)
    trainer = Trainer(model, grid, optimizer, loss=lambda model, x: model(x).sum(), strategy=earlier)
    trainer.step([torch.full((1, 3), 1.0 + world.rank)])
    names = {p: name for name, p in model.named_parameters()}
    assert differing(names, grid) == ["weight differs between rank 0 and rank 1"]
    DataParallel(model.parameters(), grid, optimizer)
    assert differing(names, grid) == []


@pytest.mark.mpi
def test_a_slow_rank_is_named(world):
    grid = Grid(data=world.size)
    speeds = Speeds(grid, 2.0)
    for _ in range(3):
        speeds.add(5.0 if world.rank == world.size - 1 else 1.0)
    told = speeds.slow()
    if world.size > 1 and world.rank == world.size - 1:
        assert told == ["its own work takes 5 s a step, that of the others of its stage 1 s"]
    else:
        assert told == []
    assert speeds.slow() == []


@pytest.mark.mpi
@pytest.mark.ranks(2, 4)
def test_ranks_without_a_part_of_the_batch_are_compared_with_each_other(world):
    """As servers of parameters, beside which a worker is slow."""
    grid = Grid(data=world.size // 2, tensor=2) if world.size > 2 else Grid(data=2)
    speeds, serves = Speeds(grid, 2.0, idle=1), grid.data.rank == grid.data.size - 1
    speeds.add(1.0 if serves else 5.0)
    assert speeds.slow() == []
    speeds.add((1.0 if grid.tensor.rank else 9.0) if serves else 5.0)
    assert bool(speeds.slow()) == (serves and grid.tensor.size == 2 and grid.tensor.rank == 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_every_bit_counts(dtype):
    tensor = torch.randint(0, 2, (37,), generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = digest(tensor)
    for bit in range(37 * tensor.itemsize * 8 if dtype != torch.bool else 0):
        changed = tensor.clone()
        changed.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        assert digest(changed) != whole
    assert digest(tensor.roll(1)) != whole
    assert digest(torch.empty(0, dtype=dtype)) == 0


def test_the_digest_by_hand():
    """The sum of element i times 2 i + 1, over the bounds of the chunks that it is taken in."""
    numbers = torch.randint(-(2**31), 2**31, (70_000,), generator=torch.Generator().manual_seed(0))
    expected = sum(int(number) * (2 * i + 1) for i, number in enumerate(numbers.tolist()))
    assert (int(digest(numbers)) - expected) % 2**64 == 0
    assert digest(torch.tensor([1 + 2j, 3j])) != digest(torch.tensor([3j, 1 + 2j]))
