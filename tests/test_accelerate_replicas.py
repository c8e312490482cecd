"""accelerate on replicas: as one process with the global batch, or as its own DistributedDataParallel."""

import accelerate
import pytest
import torch
from integration_checks import (
    FILLED,
    ROWS,
    UNEVEN,
    Stream,
    ddp,
    generators_go_on,
    gpt2,
    model_on,
    plain,
    replicas,
    same_names,
    same_weights,
    shared,
    steps,
)
from parallelize_checks import CLOSE

import hpctrain as ht
from hpctrain.integrations.accelerate import GridAccelerator

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]


@pytest.fixture
def folder(world, tmp_path):
    yield from shared(world, tmp_path)


def accelerated(make, model, folder, data=UNEVEN, batch=2, split=False, first=0, last=4, save=False, shuffle=None):
    """Losses of the global batches and norms, and the model, after steps of two batches each.

    Args:
        make: an accelerator.
        batch: of a process, or with `split` of all.
        shuffle: seed of the sampler.
    """
    accelerate.state.AcceleratorState._reset_state(True)
    loading = accelerate.DataLoaderConfiguration(split_batches=split)
    accelerator = make(gradient_accumulation_steps=2, dataloader_config=loading)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    generator = None if shuffle is None else torch.Generator().manual_seed(shuffle)
    loader = torch.utils.data.DataLoader(data, batch, shuffle=shuffle is not None, generator=generator)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if first:
        accelerator.load_state(folder)
    results = []
    for number, found in steps(accelerator, model, optimizer, loader, scheduler, first):
        results += found
        if number == 3 and save:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()
    assert number == 7
    return results, accelerator.unwrap_model(model)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_accelerate(world, folder, tmp_path_factory, zero):
    grid, wide, own = replicas(world), ht.Grid(tensor=world.size), tmp_path_factory.mktemp("own")  # of each rank
    serial = {"make": accelerate.Accelerator, "data": FILLED, "batch": 4}
    ours = {"make": lambda **options: GridAccelerator(grid, **options), "batch": 4, "split": True}
    tensor = ours | {"make": lambda **options: GridAccelerator(wide, **options), "data": FILLED, "split": False}
    expected, alone = accelerated(model=plain(), folder=own, save=True, **serial)
    assert max(expected[2::3]) > 0.05  # it is clipped
    got, model = accelerated(model=model_on(grid, zero), folder=folder, save=True, **ours)
    assert got == pytest.approx(expected, rel=1e-12)
    same_weights(dict(alone.state_dict()), model, grid)
    for name in ("optimizer.bin", "scheduler.bin"):
        torch.testing.assert_close(*(torch.load(each / name) for each in (folder, own)), **CLOSE)
    for source in (folder, own):
        resumed, model = accelerated(model=model_on(grid, zero), folder=source, first=2, **ours)
        assert resumed == pytest.approx(expected[6:], rel=1e-12)
        same_weights(dict(alone.state_dict()), model, grid)
    resumed, _ = accelerated(model=model_on(wide), folder=folder, first=2, **tensor)
    assert resumed == pytest.approx(expected[6:], rel=1e-12)
    resumed, _ = accelerated(model=plain(), folder=folder, first=2, **serial)
    assert resumed == pytest.approx(expected[6:], rel=1e-12)


def test_accelerate_as_ddp(world, folder, monkeypatch):
    """With samplers of different seeds, of which the first process's is taken, and a last batch that is filled up; what
    is saved, too."""
    grid, options = ht.Grid(data=world.size), {"batch": 4 // world.size, "shuffle": world.rank, "save": True}
    with ddp(world, folder, monkeypatch):
        theirs = lambda **options: accelerate.Accelerator(cpu=True, **options)  # noqa: E731
        expected, alone = accelerated(theirs, plain(), folder / "ddp", **options)
    ours = lambda **options: GridAccelerator(grid, **options)  # noqa: E731
    got, model = accelerated(ours, model_on(grid), folder / "ours", **options)
    assert got == pytest.approx(expected, rel=1e-12)
    same_weights(dict(alone.state_dict()), model, grid)
    world.Barrier()
    assert same_names(folder / "ours", folder / "ddp")
    states = [torch.load(folder / each / "scheduler.bin") for each in ("ours", "ddp")]
    assert states[0] == states[1]  # as many steps as processes


def test_random_numbers_of_replicas(world, folder):
    """Each goes on with its own, which are those of its first rank."""
    grid = replicas(world)
    accelerator = GridAccelerator(grid)
    generators_go_on(grid, lambda: accelerator.save_state(folder), lambda: accelerator.load_state(folder))
    assert sorted(path.name for path in folder.glob("random*")) == ["random_states_0.pkl", "random_states_1.pkl"]


def test_metrics_of_replicas(world, folder):
    """Each sample once, in the order of the data, whatever is gathered."""
    grid = replicas(world)
    accelerator = GridAccelerator(grid)
    assert (accelerator.process_index, accelerator.num_processes) == (grid.replica.rank, 2)
    assert accelerator.is_main_process == (grid.rank == 0)
    for data in (ROWS, Stream(ROWS)):
        loader = accelerator.prepare(torch.utils.data.DataLoader(data, 4))
        tensors, objects, rows = [], [], []
        for batch in loader:
            assert len(batch) == 4
            gathered = accelerator.gather_for_metrics({"rows": batch, "first": [batch[:, 0] > 6]})
            tensors.append(gathered["rows"])
            rows.append(gathered["first"][0])
            objects += accelerator.gather_for_metrics([str(row) for row in batch.tolist()])
        seen = torch.cat(tensors)[: len(ROWS)]  # accelerate does not know how many a stream has
        assert torch.equal(seen, ROWS)
        assert torch.equal(torch.cat(rows)[: len(ROWS)], ROWS[:, 0] > 6)
        assert objects[: len(ROWS)] == [str(row) for row in ROWS.tolist()]
        assert len(objects) == (len(ROWS) if data is ROWS else 32)
    mine = torch.arange(1.0 + accelerator.process_index)
    for first, expected in ((False, [0.0, -1.0, 0.0, 1.0]), (True, [-1.0, 0.0, 0.0, 1.0])):
        padded = accelerator.pad_across_processes([mine], pad_index=-1, pad_first=first)[0]
        assert accelerator.gather(padded).tolist() == expected
    assert accelerator.gather(mine.sum()).tolist() == [0.0, 1.0]
    reduced = [accelerator.reduce(mine.sum() + 2, how).item() for how in ("sum", "mean", "max")]
    assert reduced == [5.0, 2.5, 3.0]
    with pytest.raises(ValueError, match=r"tensors of one shape, got \(1,\), \(2,\); call pad_across_processes before"):
        accelerator.gather(mine)
    with accelerator.split_between_processes(list("abc"), apply_padding=True) as part:
        assert part == [["a", "b"], ["c", "c"]][grid.replica.rank]
        assert accelerator.is_main_process == (grid.rank == 0)


def test_what_accelerate_refuses_of_replicas(world, folder):
    grid = replicas(world)
    with pytest.raises(ValueError, match="generators of samplers alone, got rng_types=.'torch'.; leave it out"):
        GridAccelerator(grid, rng_types=["torch"])
    with pytest.raises(ValueError, match="each with as many batches: leave out even_batches=False"):
        GridAccelerator(grid, dataloader_config=accelerate.DataLoaderConfiguration(even_batches=False))
    accelerator = GridAccelerator(grid)
    for model in (gpt2(), ht.parallelize(gpt2(), grid)):
        with pytest.raises(ValueError, match="nobody averages over the 2 replicas; make it of the parameters of ht"):
            accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    model = model_on(grid, zero=3)
    with pytest.raises(ValueError, match="zero=3 cannot load weights once they are spread over the replicas; use zero"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    two = [*model_on(grid, zero=1).parameters(), *model_on(grid, zero=1).parameters()]
    with pytest.raises(ValueError, match="weights of 2 models whose replicas share its state by zero=1 or 2; use zero"):
        accelerator.prepare(torch.optim.SGD(two))
    with pytest.raises(ValueError, match="each with as many batches: leave out join_uneven_inputs"):
        accelerator.join_uneven_inputs([model])
    with pytest.raises(ValueError, match="apply_padding=True pads lists, not tensors; give lists, or call pad"):
        accelerator.split_between_processes(ROWS, apply_padding=True).__enter__()
