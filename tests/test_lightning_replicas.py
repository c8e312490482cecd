"""Lightning on replicas: as one process with the global batch, or as its own DistributedDataParallel."""

import pytest
import torch
import torchmetrics
from integration_checks import FILLED, UNEVEN, ddp, model_on, plain, replicas, same_weights, shared
from lightning import pytorch
from lightning.pytorch.strategies import DDPStrategy
from parallelize_checks import CLOSE

import hpctrain as ht
from hpctrain.integrations.lightning import GridStrategy

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]


@pytest.fixture
def folder(world, tmp_path):
    yield from shared(world, tmp_path)


def lightened(model, folder, batch, resume=None, data=FILLED, sampler=None, devices=1, **options):
    """Losses and norms, what was logged last, what this replica predicted, and the model."""

    class Module(pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.metric, self.results = model, torchmetrics.MeanMetric().double(), []

        def training_step(self, batch, number):
            loss = self.model(**batch).loss
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch, number):
            loss = self.model(**batch).loss
            self.log("evaluated", loss, sync_dist=True)
            self.metric.update(batch["input_ids"][:, 0].double())
            self.log("first", self.metric)

        def predict_step(self, batch, number):
            return self.model(batch["input_ids"]).logits

        def on_train_batch_end(self, *_):
            self.results.append(self.trainer.callback_metrics["loss"].item())

        def on_before_optimizer_step(self, optimizer):
            self.results.append(float(torch.nn.utils.get_total_norm(p.grad for p in self.parameters())))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), 0.01)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer), "interval": "step"}]

    loader = lambda data, sampler=None: torch.utils.data.DataLoader(data, batch, sampler=sampler)  # noqa: E731
    saved = pytorch.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    module = Module()
    trainer = pytorch.Trainer(
        accelerator="cpu", devices=devices, max_steps=4, gradient_clip_val=0.05, accumulate_grad_batches=2,
        logger=False, callbacks=[saved], enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, loader(data, sampler), loader(UNEVEN[:8]), ckpt_path=resume)
    logged = {name: x.item() for name, x in trainer.callback_metrics.items()}
    return module.results, logged, trainer.predict(module, loader(UNEVEN[:5])), model


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_lightning(world, folder, tmp_path_factory, zero):
    grid, own, checkpoint = replicas(world), tmp_path_factory.mktemp("own"), "step=2.ckpt"
    once = lightened(plain(), own, 4)
    again = lightened(plain(), own / "again", 4, resume=own / checkpoint)  # not as uninterrupted
    # else Lightning would shuffle, on several processes alone
    sampler = torch.utils.data.DistributedSampler(FILLED, 2, grid.replica.rank, shuffle=False)
    runs = (folder, None, once), (folder / "again", folder / checkpoint, again)
    for to, resume, (expected, logged, predicted, alone) in runs:
        options = {"resume": resume, "strategy": GridStrategy(grid), "sampler": sampler}
        got, ours, mine, model = lightened(model_on(grid, zero), to, 2, **options)
        assert got == pytest.approx(expected, rel=1e-12)
        assert ours == pytest.approx(logged, rel=1e-12)
        torch.testing.assert_close(torch.cat(mine), torch.cat(predicted)[grid.replica.rank :: 2], **CLOSE)
        same_weights(dict(alone.state_dict()), model, grid)
    *_, model = lightened(plain(), own / "other", 4, resume=folder / checkpoint)
    torch.testing.assert_close(dict(model.state_dict()), dict(again[-1].state_dict()), **CLOSE)


def test_lightning_as_ddp(world, folder, monkeypatch):
    """The last batch of training is short."""
    grid, options = ht.Grid(data=world.size), {"batch": 4 // world.size, "data": UNEVEN}
    with ddp(world, folder, monkeypatch):
        theirs = DDPStrategy(process_group_backend="gloo")
        *expected, alone = lightened(plain(), folder / "ddp", devices=world.size, strategy=theirs, **options)
    *got, model = lightened(model_on(grid), folder / "ours", strategy=GridStrategy(grid), **options)
    for ours, theirs in zip(got[:2], expected[:2]):
        assert ours == pytest.approx(theirs, rel=1e-12)
    torch.testing.assert_close(got[2], expected[2], **CLOSE)
    same_weights(dict(alone.state_dict()), model, grid)


def test_what_replicas_of_lightning_tell_each_other(world):
    grid = replicas(world)
    strategy, mine = GridStrategy(grid), torch.tensor([1.0 + grid.replica.rank], requires_grad=True)
    assert (strategy.global_rank, strategy.world_size) == (grid.replica.rank, 2)
    assert [strategy.reduce(mine, reduce_op=op).item() for op in ("mean", "avg", "sum", "max", "min")] == [
        1.5, 1.5, 3.0, 2.0, 1.0,
    ]  # fmt: skip
    assert strategy.reduce(mine, reduce_op=torch.distributed.ReduceOp.SUM).item() == 3.0
    assert strategy.reduce("other") == "other"
    assert strategy.all_gather(mine).tolist() == [[1.0], [2.0]]
    gathered = strategy.all_gather(mine, sync_grads=True)
    (gathered * torch.tensor([[3.0], [5.0]])).sum().backward()
    assert gathered.tolist() == [[1.0], [2.0]]
    assert mine.grad.tolist() == [[6.0], [10.0]][grid.replica.rank]  # of both losses, as with torch's


def test_a_loop_of_tests(world, monkeypatch):
    """With a metric that keeps all samples, of which the last replica has fewer; workers that load them are seeded
    alike on all ranks of a replica."""
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    grid = replicas(world)
    rank = grid.replica.rank

    class Module(pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.seen = torchmetrics.CatMetric()

        def test_step(self, batch, number):
            self.seen.update(batch[rank:])

        def on_test_epoch_end(self):
            self.found = self.seen.compute()

    module = Module()
    trainer = pytorch.Trainer(
        accelerator="cpu", devices=1, strategy=GridStrategy(grid), logger=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.test(module, torch.utils.data.DataLoader(torch.arange(4.0), 2))
    assert module.found.tolist() == [0.0, 2.0, 3.0]
    assert trainer.test_dataloaders.worker_init_fn.keywords == {"rank": rank}


def test_what_lightning_refuses_of_replicas(world, folder):
    grid = replicas(world)
    two = torch.nn.ModuleList([model_on(grid, zero=1), model_on(grid, zero=1)])
    for model, error in (
        (ht.parallelize(plain(), grid), "whose gradients nobody averages over the 2 replicas"),
        (model_on(grid, zero=3), "zero=3 cannot load weights once they are spread over the replicas; use zero=2"),
        (two, "weights of 2 models whose replicas share its state by zero=1 or 2"),
    ):
        with pytest.raises(ValueError, match=error):
            lightened(model, folder, 2, strategy=GridStrategy(grid))
