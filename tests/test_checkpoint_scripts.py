"""ht.checkpoint.save, load and verify, of a model of one's own."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

import hpctrain as ht
from hpctrain.data_parallel import LocalSGD, Zero1
from hpctrain.layers import BatchNorm2d

pytestmark = pytest.mark.mpi


def training(grid, seed, layers=lambda: [nn.Linear(3, 8), nn.Tanh()], make=torch.optim.AdamW, strategy=None):
    torch.manual_seed(seed)
    model = ht.parallelize(nn.Sequential(*layers(), nn.Linear(8, 1)).double(), grid)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(trained, 0.1)
    spread = strategy and strategy(trained, grid, optimizer)
    return ht.Trainer(model, grid, optimizer, loss=lambda model, x: model(x).square().sum(), strategy=spread)


def same_weights(one, other, grid, rtol=0.0):
    first, second = (ht.gather_state_dict(trainer.model) for trainer in (one, other))
    if grid.rank == 0:
        torch.testing.assert_close(first, second, rtol=rtol, atol=rtol)


class Scaled(nn.Module):
    """As CLIP's logit_scale, a weight without dims."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 8), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.linear(x) * self.scale


class Counting(torch.optim.SGD):
    """Keeps its steps as an int."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = 1


def test_saved_and_loaded_on_another_grid(world, tmp_path):
    """Saved by replicas, loaded by shards of a model of another seed: the same weights, and the same next step."""
    root = world.bcast(tmp_path) / "checkpoints"
    batch = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    one = training(ht.Grid(data=world.size), seed=1)
    mine = batch / world.size**0.5  # so that the replicas' losses add up to one of the whole batch
    one.step([mine])
    assert ht.checkpoint.load(root, one.model, one.strategy) is None
    assert ht.checkpoint.save(root, 1, one.model, one.strategy, {"epoch": 3}) == root / "step-1"
    other = training(ht.Grid(tensor=world.size), seed=2)
    manifest = ht.checkpoint.load(root, other.model, other.strategy)
    assert (manifest.step, manifest.member("epoch")) == (1, 3)
    saved, loaded = (ht.gather_state_dict(trainer.model) for trainer in (one, other))
    if world.rank == 0:
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
        assert ht.checkpoint.verify(root / "step-1").manifest.step == 1
    with pytest.raises(ValueError, match="no checkpoint of step 1: .*exists"):
        ht.checkpoint.save(root, 1, one.model, one.strategy)
    with pytest.raises(ValueError, match="no checkpoint of step 0: .*step-1 is of a later step: remove it, or save in"):
        ht.checkpoint.save(root, 0, one.model, one.strategy, keep=1)
    with pytest.raises(ValueError, match="about must be what JSON holds: .*Tensor"):
        ht.checkpoint.save(root, 2, one.model, one.strategy, {"best": torch.tensor(1.0)})
    with pytest.raises(ValueError, match="about must be a dict of what JSON holds, got 3"):
        ht.checkpoint.save(root, 2, one.model, one.strategy, 3)
    for given, message in (
        ((one.model, one.optimizer), r"strategy must be of type DataParallelStrategy, got AdamW"),
        ((one.model, one), r"strategy must be of type DataParallelStrategy, got Trainer"),
        ((one, one.strategy), r"model must be of type Module, got Trainer"),
    ):
        for use in (
            lambda *given: ht.checkpoint.save(root, 2, *given),
            lambda *given: ht.checkpoint.load(root, *given),
        ):
            with pytest.raises(ValueError, match=message):
                use(*given)
    with pytest.raises(ValueError, match="step-1 is one checkpoint; give the folder of checkpoints that it is in"):
        ht.checkpoint.load(root / "step-1", one.model, one.strategy)
    for step, keep, message in [
        (2, 0, "keep must be an integer of at least 1, got 0"),
        (2, 1.5, "keep must be an integer of at least 1, got 1.5"),
        (-1, 1, "step must be an integer of at least 0, got -1"),
        (2.0, 1, "step must be an integer of at least 0, got 2.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            ht.checkpoint.save(root, step, one.model, one.strategy, keep=keep)
    assert [path.name for path in root.glob("step-*")] == ["step-1"]
    assert ht.checkpoint.save(root, np.int64(2), one.model, one.strategy, keep=np.int64(1)) == root / "step-2"
    if world.rank == 0:
        assert ht.checkpoint.verify(root / "latest").manifest.step == 2
        assert [path.name for path in root.glob("step-*")] == ["step-2"]
        (root / "step-2").rename(root / "moved")
        (root / "step-2").symlink_to("moved")
        assert ht.checkpoint.verify(root / "step-2").manifest.step == 2


class WithNothing(nn.Linear):
    """As an embedding of no rows, or a buffer that is yet to be filled."""

    def __init__(self):
        super().__init__(3, 8)
        self.weightless = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("seen", torch.empty(2, 0))

    def forward(self, x):
        return super().forward(x) + self.weightless.sum() + self.seen.sum()


def buffered(grid, seed, buffer):
    """With a buffer of a name that is none of Python, as graph networks name their edges."""
    trainer = training(grid, seed)
    trainer.model[0].register_buffer("<user___rates___film>", buffer)  # not before, as double() converts it
    return trainer


TYPES = [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64]


@pytest.mark.parametrize("dtype", TYPES)
def test_buffers_of_other_types(world, tmp_path, dtype):
    root, grid = world.bcast(tmp_path) / "checkpoints", ht.Grid(data=world.size)
    bits = torch.arange(96, dtype=torch.uint8).view(3, 32)
    one, other = (buffered(grid, seed, (bits * factor).view(dtype)) for seed, factor in ((1, 1), (2, 0)))
    ht.checkpoint.save(root, 1, one.model, one.strategy)
    ht.checkpoint.load(root, other.model, other.strategy)
    loaded = other.model.state_dict()["0.<user___rates___film>"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), bits)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.tensor(1j), "model/0.<user___rates___film> is a complex64 without dims; keep it with one dim"),
        (torch.zeros(2, dtype=torch.complex32), "has the unknown type 'complex32'"),
    ],
)
def test_buffers_that_are_not_saved(world, tmp_path, buffer, message):
    """Are refused before anything is written."""
    root = world.bcast(tmp_path) / "checkpoints"
    one = buffered(ht.Grid(data=world.size), 1, buffer)
    with pytest.raises(ValueError, match=f"no checkpoint of step 1: .*{message}"):
        ht.checkpoint.save(root, 1, one.model, one.strategy)
    assert not root.exists()


STRATEGIES = [ht.data_parallel.DataParallel, ht.data_parallel.Zero1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("saved_by", STRATEGIES)
@pytest.mark.parametrize("loaded_by", STRATEGIES)
def test_what_has_no_elements(world, tmp_path, saved_by, loaded_by):
    root, grid = world.bcast(tmp_path) / "checkpoints", ht.Grid(data=world.size)
    one, other = (
        training(grid, seed, lambda: [WithNothing()], strategy=strategy)
        for seed, strategy in ((1, saved_by), (2, loaded_by))
    )
    one.step([torch.ones(4, 3, dtype=torch.float64)])
    ht.checkpoint.save(root, 1, one.model, one.strategy)
    assert ht.checkpoint.load(root, other.model, other.strategy).tensors["model/0.weightless"] == ("float64", (0, 4))
    same_weights(one, other, grid)
    if world.rank == 0:
        ht.checkpoint.verify(root / "step-1")


class Attending(nn.Module):
    """Matrices stacked along the first dim, and along the second."""

    def __init__(self):
        super().__init__()
        self.first = nn.MultiheadAttention(8, 2, batch_first=True)
        self.second = GPT2Attention(GPT2Config(n_embd=8, n_head=2, attn_pdrop=0.0, resid_pdrop=0.0), layer_idx=0)

    def forward(self, x):
        return self.second(self.first(x, x, x, need_weights=False)[0])[0]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("strategy", [None, Zero1, partial(LocalSGD, every=2)])
def test_stacked_matrices(world, tmp_path, strategy):
    """Checkpoints have the weights in their own shapes, and go on where a tensor axis divides them otherwise."""
    root = world.bcast(tmp_path)
    x = torch.linspace(-1, 1, 36, dtype=torch.float64).view(4, 3, 3)
    grids = [ht.Grid(data, tensor=world.size // data) for data in (1, 2, 4) if data <= world.size]
    if isinstance(strategy, partial):  # of which there are as many replicas as before
        grids = grids[1:2]
    made = partial(
        training, layers=lambda: [nn.Linear(3, 8), Attending()], make=partial(torch.optim.SGD, momentum=0.9),
        strategy=strategy,
    )  # fmt: skip
    for source in grids:
        trainer = made(source, 1)
        trainer.step([x[source.data.rank :: source.data.size]])
        folder = root / f"{source.data.size}"
        saved = ht.checkpoint.save(folder, 1, trainer.model, trainer.strategy)
        tensors = ht.checkpoint.verify(saved).manifest.tensors
        assert tensors["model/1.first.in_proj_weight"][1][-2:] == (24, 8)
        assert tensors["optimizer/momentum_buffer/1.second.c_attn.weight"][1][-2:] == (8, 24)
        expected = trainer.step([x[source.data.rank :: source.data.size]])[0]
        for grid in grids:
            other = made(grid, 2)
            ht.checkpoint.load(folder, other.model, other.strategy)
            assert other.step([x[grid.data.rank :: grid.data.size]])[0] == pytest.approx(expected, rel=1e-12)
            same_weights(trainer, other, grid, rtol=1e-11)


def test_running_statistics(world, tmp_path):
    """Buffers are saved with the weights, and their numbers of batches."""
    root = world.bcast(tmp_path) / "checkpoints"
    layers = lambda: [nn.Linear(3, 8), nn.BatchNorm1d(8, momentum=None)]  # noqa: E731
    one, other = training(ht.Grid(data=world.size), 1, layers), training(ht.Grid(tensor=world.size), 2, layers)
    for step in (1, 2):
        one.step([torch.linspace(-step, 2, 12 * world.size, dtype=torch.float64).view(world.size, 4, 3)[world.rank]])
    ht.checkpoint.save(root, 2, one.model, one.strategy)
    ht.checkpoint.load(root, other.model, other.strategy)
    same_weights(one, other, other.strategy.grid)
    assert other.model.state_dict()["1.num_batches_tracked"] == 2
    another = training(other.strategy.grid, 3, lambda: [*layers(), nn.BatchNorm1d(8, affine=False)])
    with pytest.raises(ValueError, match="of another model:(.|\n)*2.running_var: 8 float64 in the model, missing in"):
        ht.checkpoint.load(root, another.model, another.strategy)


def test_a_buffer_in_other_memory(world, tmp_path):
    """As of a module that assigns its statistics anew in each call: what is there when a job saves is saved."""
    root, trainer = world.bcast(tmp_path) / "checkpoints", training(ht.Grid(data=world.size), 1)
    module = trainer.model[0]
    module.register_buffer("mean", torch.zeros(3))
    state = ht.checkpoint.TrainingState(trainer.model, trainer.strategy)
    saver = ht.checkpoint.Checkpointer(root, world)
    for step in (1, 2):
        module.mean = module.mean + step
        assert saver.save(step, state, {}) is None
    saver.finish()
    module.mean = torch.zeros(3)
    assert saver.resume(state).step == 2
    assert module.mean.tolist() == [3.0] * 3


@pytest.mark.ranks(1, 2, 4)
def test_running_statistics_of_channels_that_ranks_divide(world, tmp_path):
    root = world.bcast(tmp_path) / "checkpoints"

    def norm(grid):
        layer = BatchNorm2d(grid, 5, key=ht.RngKey(0), dtype=torch.float64)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        return layer, ht.data_parallel.DataParallel(list(layer.parameters()), grid, optimizer)

    channels = torch.arange(5, dtype=torch.float64)
    saved, strategy = norm(ht.Grid(tensor=(world.size, 1, 1)))
    saved.running_mean.copy_(channels[saved.shard.slices[0]])
    saved.num_batches_tracked += 3
    ht.checkpoint.save(root, 1, saved, strategy)
    loaded, strategy = norm(ht.Grid(tensor=(1, world.size, 1)))
    ht.checkpoint.load(root, loaded, strategy)
    torch.testing.assert_close(loaded.running_mean, channels[loaded.shard.slices[0]], rtol=0, atol=0)
    assert loaded.num_batches_tracked == 3


@pytest.mark.parametrize("strategy", [ht.data_parallel.DataParallel, ht.data_parallel.Zero1])
def test_a_weight_without_dims(world, tmp_path, strategy):
    """Its moments are no numbers of the optimizer, such as that of steps."""
    root, grid = world.bcast(tmp_path) / "checkpoints", ht.Grid(data=world.size)
    batch = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    one, other = (training(grid, seed, lambda: [Scaled()], strategy=strategy) for seed in (1, 2))
    one.step([batch])
    ht.checkpoint.save(root, 1, one.model, one.strategy)
    ht.checkpoint.load(root, other.model, other.strategy)
    for trainer in (one, other):
        trainer.step([batch])
    same_weights(one, other, grid)


def test_loading_beside_a_job_that_saves(world, tmp_path):
    """Leaves alone what that has not finished; whoever saves next removes what a killed one left."""
    root, one = world.bcast(tmp_path) / "checkpoints", training(ht.Grid(data=world.size), 1)
    ht.checkpoint.save(root, 1, one.model, one.strategy)
    if world.rank == 0:
        (root / "step-2.tmp").mkdir()
    ht.checkpoint.load(root, one.model, one.strategy)
    assert (root / "step-2.tmp").exists()
    world.barrier()
    ht.checkpoint.save(root, 3, one.model, one.strategy)
    assert not (root / "step-2.tmp").exists()


def test_what_is_not_trained(world, tmp_path):
    """Gets no state in the optimizer by being saved."""

    def layers():
        frozen = nn.Linear(3, 8)
        frozen.weight.requires_grad_(False)
        return [frozen]

    one = training(ht.Grid(data=world.size), 1, layers)
    one.step([torch.ones(4, 3, dtype=torch.float64)])
    ht.checkpoint.save(world.bcast(tmp_path) / "checkpoints", 1, one.model, one.strategy)
    assert len(one.strategy.optimizer.state_dict()["state"]) == 3


class CountingInGroups(torch.optim.SGD):
    """As schedule-free optimizers do, which average the weights by it."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_an_optimizer_that_counts_in_its_groups(world, tmp_path):
    """Its count would be lost; a rate that a schedule sets is the script's own."""
    root = world.bcast(tmp_path) / "checkpoints"
    one = training(ht.Grid(data=world.size), 1, make=CountingInGroups)
    one.step([torch.ones(4, 3, dtype=torch.float64)])
    with pytest.raises(ValueError, match="CountingInGroups changes k of its param_groups in a step; checkpoints hold"):
        ht.checkpoint.save(root, 1, one.model, one.strategy)
    other = training(ht.Grid(data=world.size), 1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(other.optimizer, 0.5)
    other.step([torch.ones(4, 3, dtype=torch.float64)])
    schedule.step()
    ht.checkpoint.save(root, 1, other.model, other.strategy)


def test_an_optimizer_that_keeps_other_things(world, tmp_path):
    one = training(ht.Grid(data=world.size), 1, make=Counting)
    one.step([torch.ones(4, 3, dtype=torch.float64)])
    with pytest.raises(ValueError, match="Counting keeps 'count' of a parameter as 1; checkpoints hold tensors alone"):
        ht.checkpoint.save(world.bcast(tmp_path) / "checkpoints", 1, one.model, one.strategy)
