"""accelerate, Hugging Face's Trainer and Lightning around a divided model: as the library itself on one process.

Each trains a model for four steps, clipped, and saves after the second; then it is resumed there, by
ranks and by one process. Losses, norms, weights and files must be the same as of the library alone.
"""

import contextlib
import logging
from pathlib import Path

import accelerate
import pytest
import torch
from integration_checks import DATA, TOKENS, Stream, gpt2, same_weights, shared, steps, without_dropout
from parallelize_checks import CLOSE
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel

import hpctrain as ht
from hpctrain import comm

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


@pytest.fixture
def folder(world, tmp_path):
    yield from shared(world, tmp_path)


def same_files(folder, own, *names):
    """What the library writes by itself."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in own.iterdir())
    for name in names:
        ours, theirs = (torch.load(each / name, weights_only=False) for each in (folder, own))
        torch.testing.assert_close(ours, theirs, **CLOSE)


# accelerate ------------------------------------------------------------


def accelerated(make, model, folder, first=0, last=4, save=None):
    """Losses and norms of the steps, and the model."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = make(gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    # with a generator of its own: its iterators draw a number, which those of an uninterrupted run do not
    loader = torch.utils.data.DataLoader(DATA, batch_size=2, generator=torch.Generator())
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    torch.manual_seed(1)
    if first:
        accelerator.load_state(folder)
    results = []
    for number, found in steps(accelerator, model, optimizer, loader, scheduler, first):
        results += found
        if number == 3 and save:
            accelerator.save_state(folder, safe_serialization=save == "safetensors")
            accelerator.save_model(model, folder / "model")
            accelerator.unwrap_model(model).save_pretrained(
                folder / "pretrained", is_main_process=accelerator.is_main_process, save_function=accelerator.save
            )
        if number == 2 * last - 1:
            break
    return results, accelerator.unwrap_model(model)


@pytest.mark.parametrize("how", ["safetensors", "pickle"])
def test_accelerate(world, folder, tmp_path_factory, how):
    from hpctrain.integrations.accelerate import GridAccelerator

    grid = ht.Grid(tensor=2)
    divided = lambda: ht.parallelize(gpt2(), grid)  # noqa: E731
    make = lambda **options: GridAccelerator(grid, **options)  # noqa: E731
    own = tmp_path_factory.mktemp("own")  # of each rank
    expected, serial = accelerated(accelerate.Accelerator, gpt2(), own, save=how)
    assert max(expected[2::3]) > 0.05  # it is clipped
    got, model = accelerated(make, divided(), folder, save=how)
    world.Barrier()
    same_files(folder, own, "optimizer.bin", "scheduler.bin")
    drawn = [torch.load(each / "random_states_0.pkl", weights_only=False) for each in (folder, own)]
    assert torch.equal(*(each["torch_manual_seed"] for each in drawn))
    assert got == pytest.approx(expected, rel=1e-12)
    same_weights(dict(serial.state_dict()), model, grid)
    resumed, model = accelerated(make, divided(), folder, first=2)
    assert resumed == pytest.approx(expected[6:], rel=1e-12)
    same_weights(dict(serial.state_dict()), model, grid)
    alone, model = accelerated(accelerate.Accelerator, gpt2(), folder, first=2)
    assert alone == pytest.approx(expected[6:], rel=1e-12)
    half = accelerated(accelerate.Accelerator, gpt2(), folder / "none", last=2)[1]
    for file in (folder / "model/model.safetensors", folder / "pretrained/model.safetensors"):
        for name, tensor in load_file(file).items():
            torch.testing.assert_close(tensor, half.state_dict()[name], **CLOSE)


def test_hooks_streams_and_two_models_of_accelerate(world, folder):
    """As scripts of diffusers have them: hooks that save and load one model their own way, gathering it, one optimizer
    of two models, and a dataset of which one can only take the next row."""
    from hpctrain.integrations.accelerate import GridAccelerator

    grid = ht.Grid(tensor=2)

    def trained_for_a_step(resume):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = GridAccelerator(grid)
        first, second = (ht.parallelize(gpt2(), grid) for _ in range(2))
        optimizer = torch.optim.AdamW([*second.parameters(), *first.parameters()], 0.01)
        loader = torch.utils.data.DataLoader(Stream(), batch_size=2)
        first, second, optimizer, loader = accelerator.prepare(first, second, optimizer, loader)

        def save(models, weights, to):
            models[0].save_pretrained(Path(to) / "first", is_main_process=accelerator.is_main_process)
            weights.pop(0)

        def load(models, source):
            assert accelerator.is_main_process == (grid.rank == 0)
            models.pop(0).load_state_dict(load_file(Path(source) / "first/model.safetensors"), strict=False)  # tied

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
        if resume:
            accelerator.load_state(folder / "saved")
        seen = [batch["input_ids"] for batch in loader]
        torch.testing.assert_close(torch.cat(seen), TOKENS)
        for model in (first, second):
            accelerator.backward(model.eval()(input_ids=seen[0], labels=seen[0]).loss)
        optimizer.step()
        optimizer.zero_grad()
        if not resume:
            assert accelerator.save_state(str(folder / "saved")) == folder / "saved"
            world.Barrier()
        return [ht.gather_state_dict(model) for model in (first, second)]

    once = trained_for_a_step(resume=False)
    assert [(folder / "saved" / name).exists() for name in ("model.safetensors", "model_1.safetensors")] == [
        True,
        False,
    ]
    twice = trained_for_a_step(resume=True)  # from moments that are not 0
    accelerate.state.AcceleratorState._reset_state(True)
    if grid.rank == 0:
        torch.testing.assert_close(twice[0], twice[1], rtol=0, atol=0)
        alone = gpt2().eval()
        optimizer = torch.optim.AdamW(alone.parameters(), 0.01)
        for each in (once, twice):
            alone(input_ids=TOKENS[:2], labels=TOKENS[:2]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(each[0], dict(alone.state_dict()), **CLOSE)


def test_a_save_that_fails(world, folder):
    """On rank 0, before it comes to the hooks: every rank raises, and the next save is whole."""
    from hpctrain.integrations.accelerate import GridAccelerator

    accelerator, called = GridAccelerator(ht.Grid(tensor=2)), []
    accelerator.prepare(ht.parallelize(gpt2(), accelerator.grid))
    accelerator.register_save_state_pre_hook(lambda models, weights, to: called.append(to))
    file = folder / "file"
    if accelerator.grid.rank == 0:
        file.touch()
    world.Barrier()
    with pytest.raises((OSError, ValueError), match="File exists: .*file"):
        accelerator.save_state(file)
    assert not called
    accelerator.save_state(folder / "saved")
    assert called == [folder / "saved"]


def test_who_does_what_with_accelerate(world, folder):
    from hpctrain.integrations.accelerate import GridAccelerator

    accelerator = GridAccelerator(ht.Grid(tensor=2), log_with="tensorboard", project_dir=folder)
    done = []
    accelerator.on_main_process(done.append)("main")
    accelerator.on_last_process(done.append)("last")
    accelerator.on_process(process_index=1)(done.append)("second")
    accelerator.on_local_main_process(done.append)("local")
    accelerator.on_local_process(done.append, local_process_index=1)("second here")
    assert done == [["main", "local"], ["last", "second", "second here"]][world.rank]
    with accelerator.main_process_first():
        assert (folder / "first").exists() == (world.rank > 0)
        (folder / "first").touch()
    assert len(accelerator.log_with) == (world.rank == 0)
    assert not accelerator.check_trigger()
    if world.rank == 1:
        accelerator.set_trigger()
    assert [accelerator.check_trigger() for _ in range(2)] == [True, False]


def test_grids_that_are_refused(world, folder):
    from hpctrain.integrations.accelerate import GridAccelerator

    with pytest.raises(
        ValueError, match=r"accelerate calls the whole model, got pipeline=2; use replicas and tensor ax"
    ):
        GridAccelerator(ht.Grid(pipeline=2))
    with pytest.raises(ValueError, match=r"accelerate has whole sequences on each rank, got grid.data = .1, 2, 1. of"):
        GridAccelerator(ht.Grid(data=(1, 2, 1)))
    accelerate.state.AcceleratorState._reset_state(True)
    state = accelerate.PartialState()
    state.distributed_type, state.num_processes = accelerate.DistributedType.MULTI_CPU, 2
    with pytest.raises(ValueError, match="started torch.distributed for 2 processes, .*; leave out cpu=True, use_cpu"):
        GridAccelerator(ht.Grid(tensor=2))
    accelerate.state.AcceleratorState._reset_state(True)
    with pytest.raises(ValueError, match="save_on_each_node=True: rank 0 alone has the whole weights"):
        each_node = accelerate.utils.ProjectConfiguration(save_on_each_node=True)
        GridAccelerator(ht.Grid(tensor=2), project_config=each_node)


# transformers ------------------------------------------------------------


def trained(kind, model, folder, resume=None, **options):
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, logging_steps=1,
        save_steps=2, learning_rate=0.01, max_grad_norm=0.05, seed=1, disable_tqdm=True, report_to=[],
    )  # fmt: skip
    trainer = kind(model, arguments, train_dataset=DATA, eval_dataset=DATA[:3], **options)
    trainer.train(resume_from_checkpoint=resume)
    history = [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]
    return [value for pair in history for value in pair], trainer.evaluate()["eval_loss"], trainer.model


def test_trainer(world, folder, tmp_path_factory, capsys):
    import transformers

    from hpctrain.integrations.transformers import GridTrainer

    own = tmp_path_factory.mktemp("own")  # of each rank
    grid = ht.Grid(tensor=2)
    expected, evaluated, serial = trained(transformers.Trainer, gpt2(), own)
    assert max(expected[1::2]) > 0.05
    weights = dict(serial.state_dict())
    for resume in (None, folder / "checkpoint-2"):
        got, loss, model = trained(GridTrainer, ht.parallelize(gpt2(), grid), folder, resume, grid=grid)
        assert got == pytest.approx(expected, rel=1e-9)  # of the log, which is rounded
        assert loss == pytest.approx(evaluated, rel=1e-9)
        same_weights(weights, model, grid)
    same_files(folder / "checkpoint-2", own / "checkpoint-2", "optimizer.pt", "scheduler.pt")
    for name, tensor in load_file(folder / "checkpoint-2/model.safetensors").items():
        torch.testing.assert_close(tensor, load_file(own / "checkpoint-2/model.safetensors")[name], **CLOSE)
    _, _, model = trained(transformers.Trainer, gpt2(), own, str(folder / "checkpoint-2"))
    torch.testing.assert_close(dict(model.state_dict()), weights, **CLOSE)


class Prompted(GPT2LMHeadModel):
    """As peft's models with learned prompts, which compute what they save."""

    def __init__(self, config):
        super().__init__(config)
        self.prompt_encoder = torch.nn.ModuleDict({"default": torch.nn.Embedding(2, 12)})

    def get_prompt_embedding_to_save(self, name):
        return self.prompt_encoder[name](torch.arange(2)).detach()

    def save_pretrained(self, folder, *arguments, **options):
        super().save_pretrained(folder, *arguments, **options)
        save_file({"prompts": self.get_prompt_embedding_to_save("default")}, Path(folder) / "adapter.safetensors")


def test_prompts_that_a_trainer_saves(world, folder):
    from transformers import TrainingArguments

    from hpctrain.integrations.transformers import GridTrainer

    grid = ht.Grid(tensor=2)
    model = Prompted(gpt2().config).double()
    prompts = model.prompt_encoder["default"].weight.detach().clone()
    arguments = TrainingArguments(folder, report_to=[])
    trainer = GridTrainer(ht.parallelize(model, grid), arguments, train_dataset=DATA, grid=grid)
    for _ in range(2):
        trainer.save_model(folder)
    world.Barrier()
    assert torch.equal(load_file(folder / "adapter.safetensors")["prompts"], prompts)
    assert torch.equal(model.get_prompt_embedding_to_save("default"), prompts)  # computed again


def test_workers_of_a_trainer(world, folder):
    """Those that load data draw the same numbers on every rank, by which they are seeded."""
    from transformers import TrainingArguments

    from hpctrain.integrations.transformers import GridTrainer

    grid = ht.Grid(tensor=2)
    arguments = TrainingArguments(folder, dataloader_num_workers=1, report_to=[])
    trainer = GridTrainer(ht.parallelize(gpt2(), grid), arguments, train_dataset=DATA, grid=grid)
    assert trainer.args.process_index == grid.rank
    assert trainer.get_train_dataloader().worker_init_fn.keywords == {"num_workers": 1, "rank": 0}


def test_what_a_trainer_refuses(world, folder):
    from transformers import TrainingArguments

    from hpctrain.integrations.transformers import GridTrainer

    grid = ht.Grid(tensor=2)
    make = lambda **options: TrainingArguments(folder, report_to=[], **options)  # noqa: E731
    with pytest.raises(ValueError, match="the weight 'transformer.wte.weight' is of a layer that was added after"):
        GridTrainer(gpt2(), make(), train_dataset=DATA, grid=grid)
    GridTrainer(gpt2(), make(save_strategy="no"), train_dataset=DATA, grid=grid)
    for option in sorted({"save_on_each_node", "enable_jit_checkpoint"} & vars(make()).keys()):  # alike on all ranks
        with pytest.raises(ValueError, match=f"{option}=True: "):
            GridTrainer(ht.parallelize(gpt2(), grid), make(**{option: True}), train_dataset=DATA, grid=grid)
    trainer = GridTrainer(ht.parallelize(gpt2(), grid), make(max_steps=1), train_dataset=Stream(), grid=grid)
    assert sum(len(batch["input_ids"]) for batch in trainer.get_train_dataloader()) == len(DATA)


# Lightning ------------------------------------------------------------


@contextlib.contextmanager
def quiet():
    level = logging.getLogger("lightning.pytorch").level
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    yield
    logging.getLogger("lightning.pytorch").setLevel(level)


def lightened(model, folder, steps=4, resume=None, **options):
    from lightning import pytorch

    class Module(pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = model, []

        def training_step(self, batch, number):
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def on_before_optimizer_step(self, optimizer):
            self.losses.append(float(torch.nn.utils.get_total_norm(p.grad for p in self.parameters())))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), 0.01)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer), "interval": "step"}]

    torch.manual_seed(1)
    saved = pytorch.callbacks.ModelCheckpoint(folder, "{step}", every_n_epochs=1, save_top_k=-1)
    module = Module()
    with quiet():
        trainer = pytorch.Trainer(
            accelerator="cpu", devices=1, max_steps=steps, gradient_clip_val=0.05,
            logger=False, callbacks=[saved], enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(DATA[:4], batch_size=2), ckpt_path=resume)
    return module.losses, model


def test_lightning(world, folder, tmp_path_factory):
    pytest.importorskip("lightning")
    from hpctrain.integrations.lightning import GridStrategy

    own = tmp_path_factory.mktemp("own")
    grid = ht.Grid(tensor=2)
    make = lambda: gpt2().apply(without_dropout)  # noqa: E731  # Lightning's checkpoints have no generators
    expected, serial = lightened(make(), own)
    checkpoint = "step=2.ckpt"
    alone, again = lightened(make(), own, resume=own / checkpoint)  # not as uninterrupted
    for resume, losses, model in ((None, expected, serial), (folder / checkpoint, alone, again)):
        weights = dict(model.state_dict())
        got, model = lightened(ht.parallelize(make(), grid), folder, resume=resume, strategy=GridStrategy(grid))
        assert got == pytest.approx(losses, rel=1e-12)
        same_weights(weights, model, grid)
    ours, theirs = (torch.load(each / checkpoint, weights_only=False) for each in (folder, own))
    assert ours.keys() == theirs.keys()
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        torch.testing.assert_close(ours[part], theirs[part], **CLOSE)
    assert ours["loops"] == theirs["loops"]
    _, model = lightened(make(), own, resume=folder / checkpoint)
    torch.testing.assert_close(dict(model.state_dict()), dict(again.state_dict()), **CLOSE)
    assert GridStrategy(grid).is_global_zero == (grid.rank == 0)  # who writes files
    with pytest.raises(ValueError, match="Lightning calls the whole model, got pipeline=2; use replicas and tensor ax"):
        GridStrategy(ht.Grid(pipeline=2))
    with pytest.raises(ValueError, match=r"the weight 'model\..* is of a layer that was added after parallelize"):
        lightened(make(), folder, steps=0, strategy=GridStrategy(grid))  # before the first step
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    with pytest.raises(ValueError, match="turn that off by plugins=.SLURMEnvironment.auto_requeue=False.. of the Tra"):
        environment = SLURMEnvironment()
        lightened(ht.parallelize(make(), grid), folder, strategy=GridStrategy(grid), plugins=[environment])


def test_what_lightning_waits_for_is_watched(world):
    pytest.importorskip("lightning")
    from hpctrain.integrations.lightning import GridStrategy

    grid = ht.Grid(tensor=2, comm=world)
    strategy, watchdog = GridStrategy(grid), comm.Watchdog(grid, 60.0)
    strategy.barrier()
    assert strategy.broadcast(("of rank", world.rank), src=1) == ("of rank", 1)
    decided = world.rank == 0
    assert not strategy.reduce_boolean_decision(decided)
    assert strategy.reduce_boolean_decision(decided, all=False)
    assert [along for _, along, *_ in watchdog._done] == ["world"] * 4


def test_a_checkpoint_that_lightning_cannot_write(world, folder):
    """Of a callback that keeps weights of its own, as averages; the first rank alone comes to write them."""
    pytest.importorskip("lightning")
    from hpctrain.integrations.lightning import GridStrategy

    grid = ht.Grid(tensor=2)
    weights = ht.parallelize(torch.nn.Linear(4, 4), grid).state_dict()
    with pytest.raises(ValueError, match="is divided over ranks of a grid, which a file cannot hold"):
        GridStrategy(grid).save_checkpoint({"callbacks": {"average": weights}}, folder / "average.ckpt")
