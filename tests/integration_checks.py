"""A model and its data in the training loops of other libraries."""

import contextlib

import accelerate
import torch
import torch.distributed as dist
from parallelize_checks import CLOSE
from transformers import GPT2Config, GPT2LMHeadModel

import hpctrain as ht

TOKENS = torch.arange(96).view(16, 6).square() % 13
DATA = [{"input_ids": row, "labels": row} for row in TOKENS]
ROWS = torch.arange(180).view(30, 6).square() % 13  # for replicas: the last batch of four is short
UNEVEN = [{"input_ids": row, "labels": row} for row in ROWS]
FILLED = [*UNEVEN, *UNEVEN[:2]]  # as libraries fill it up


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=13, n_positions=8, n_embd=12, n_layer=1, n_head=3)
    return GPT2LMHeadModel(config).double()


def without_dropout(module):
    if isinstance(module, torch.nn.Dropout):
        module.p = 0.0


def same_weights(weights, model, grid):
    """Those of the whole model, on rank 0."""
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        torch.testing.assert_close(gathered, weights, **CLOSE)


def same_names(one, other):
    return sorted(path.name for path in one.iterdir()) == sorted(path.name for path in other.iterdir())


class Stream(torch.utils.data.IterableDataset):
    """The rows one by one, of a length that nobody knows."""

    def __init__(self, rows=DATA):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def shared(world, path):
    """A folder for all ranks, which go on together; accelerate has forgotten its state."""
    yield world.bcast(path)
    world.Barrier()
    accelerate.state.AcceleratorState._reset_state(True)


def replicas(world):
    return ht.Grid(data=2, tensor=world.size // 2)


def plain():
    """A model whose loss is of float64, as transformers' is not."""
    model = gpt2().apply(without_dropout)
    model.loss_function = loss_of
    return model


def loss_of(logits, labels, num_items_in_batch=None, **options):
    rows, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(rows, targets, reduction="sum") / (num_items_in_batch or len(targets))


def model_on(grid, zero=0):
    return ht.parallelize(plain(), grid, zero=zero)


def steps(accelerator, model, optimizer, loader, scheduler, first):
    """Two batches a step, from step `first` on: the number of each, its loss, and the norm of a step's gradient."""
    for number, batch in enumerate(accelerator.skip_first_batches(loader, 2 * first), 2 * first):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            found = [accelerator.reduce(loss, "mean").item()]
            if accelerator.sync_gradients:
                found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        yield number, found


def generators_go_on(grid, save, load):
    """Those of each replica, as they were saved."""
    torch.manual_seed(grid.replica.rank)
    save()
    grid.comm.Barrier()
    expected = torch.rand(3)
    torch.manual_seed(7 + grid.rank)
    load()
    assert torch.equal(torch.rand(3), expected)


@contextlib.contextmanager
def ddp(world, folder, monkeypatch):
    """torch.distributed, as accelerate starts it for processes under mpirun."""
    set_by_accelerate = {"MASTER_PORT": 1, "OMP_NUM_THREADS": 1}
    set_by_accelerate |= {"RANK": world.rank, "LOCAL_RANK": world.rank}
    set_by_accelerate |= {"WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
    for name, number in set_by_accelerate.items():
        monkeypatch.setenv(name, str(number))  # and undone afterwards
    accelerate.state.AcceleratorState._reset_state(True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        monkeypatch.undo()
        accelerate.state.AcceleratorState._reset_state(True)
