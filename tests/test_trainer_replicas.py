"""Hugging Face's Trainer on replicas: as one process with the global batch, or as its own DistributedDataParallel."""

import accelerate
import pytest
import torch
import transformers
from integration_checks import (
    UNEVEN,
    ddp,
    generators_go_on,
    model_on,
    plain,
    replicas,
    same_names,
    same_weights,
    shared,
)
from parallelize_checks import CLOSE

import hpctrain as ht
from hpctrain.integrations.transformers import GridTrainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]


@pytest.fixture
def folder(world, tmp_path):
    yield from shared(world, tmp_path)


def trained(kind, model, folder, batch, resume=None, steps=4, **options):
    """Losses, of which the log has float32, and norms, what evaluation and prediction find, and the model."""
    use_cpu = options.pop("use_cpu", False)
    accelerate.state.AcceleratorState._reset_state(True)
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=batch, per_device_eval_batch_size=batch, gradient_accumulation_steps=2,
        max_steps=steps, logging_steps=1, save_steps=2, learning_rate=0.01, max_grad_norm=0.05, seed=1,
        disable_tqdm=True, report_to=[], use_cpu=use_cpu, include_num_input_tokens_seen="all",
    )  # fmt: skip
    trainer = kind(model, arguments, train_dataset=UNEVEN, eval_dataset=UNEVEN[:9], compute_metrics=metrics, **options)
    trainer.train(resume_from_checkpoint=resume)
    steps = [line for line in trainer.state.log_history if "grad_norm" in line]
    losses, norms = ([line[name] for line in steps] for name in ("loss", "grad_norm"))
    evaluated = {name: x for name, x in trainer.evaluate().items() if "per_second" not in name and "time" not in name}
    predicted = trainer.predict(UNEVEN[:9]).predictions
    counted = [trainer.state.total_flos, trainer.state.num_input_tokens_seen]
    return losses, norms, evaluated, predicted, counted, trainer.model


def metrics(predicted):
    assert len(predicted.predictions) == len(predicted.label_ids) == 9
    return {"sum": float(predicted.predictions.sum())}


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_trainer(world, folder, tmp_path_factory, zero):
    grid, own = replicas(world), tmp_path_factory.mktemp("own")
    losses, norms, evaluated, predicted, counted, alone = trained(transformers.Trainer, plain(), own, 4, steps=3)
    assert max(norms) > 0.05  # it is clipped
    for resume in (None, folder / "checkpoint-2", own / "checkpoint-2"):
        options = {"resume": resume, "steps": 3, "grid": grid}
        logged, got, found, scores, count, model = trained(GridTrainer, model_on(grid, zero), folder, 2, **options)
        assert logged == pytest.approx(losses, rel=1e-6)
        assert got == pytest.approx(norms, rel=1e-9)
        assert found["eval_sum"] == pytest.approx(evaluated["eval_sum"], rel=1e-9)
        torch.testing.assert_close(scores, predicted, **CLOSE)
        assert count == counted
        same_weights(dict(alone.state_dict()), model, grid)
    *_, model = trained(transformers.Trainer, plain(), own, 4, str(folder / "checkpoint-2"), steps=3)
    torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()), **CLOSE)


def test_trainer_as_ddp(world, folder, monkeypatch):
    """The last batches of training and of evaluation are short."""
    grid, batch = ht.Grid(data=world.size), 4 // world.size
    with ddp(world, folder, monkeypatch):
        *expected, alone = trained(transformers.Trainer, plain(), folder / "ddp", batch, use_cpu=True)
    *got, model = trained(GridTrainer, model_on(grid), folder / "ours", batch, grid=grid)
    for ours, theirs in zip(got[:3], expected[:3]):
        assert ours == pytest.approx(theirs, rel=1e-9)
    torch.testing.assert_close(got[3], expected[3], **CLOSE)
    assert got[4] == expected[4]
    same_weights(dict(alone.state_dict()), model, grid)
    world.Barrier()
    assert same_names(folder / "ours/checkpoint-2", folder / "ddp/checkpoint-2")


def test_what_a_trainer_has_of_each_replica(world, folder):
    """Objects of all, and generators that go on as they were saved."""
    grid = replicas(world)
    arguments = transformers.TrainingArguments(folder, eval_use_gather_object=True, report_to=[])
    trainer = GridTrainer(model_on(grid), arguments, train_dataset=UNEVEN, grid=grid)
    assert trainer.gather_function([grid.replica.rank]) == [0, 1]
    generators_go_on(grid, lambda: trainer._save_rng_state(folder), lambda: trainer._load_rng_state(folder))


def test_a_library_that_saves_on_one_rank(world, folder, monkeypatch):
    """As transformers before 5.23."""
    grid = replicas(world)
    arguments = transformers.TrainingArguments(folder, report_to=[])
    trainer = GridTrainer(model_on(grid), arguments, train_dataset=UNEVEN, grid=grid)
    here = lambda trainer, to, _: trainer._save(to) if trainer.args.should_save else None  # noqa: E731
    monkeypatch.setattr(transformers.Trainer, "save_model", here)
    trainer.save_model(folder)
    if grid.rank == 0:
        saved = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)
        torch.testing.assert_close(dict(saved.state_dict()), dict(plain().state_dict()), rtol=0, atol=0)
