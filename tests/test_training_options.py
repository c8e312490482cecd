"""Schedules, betas, eps, label smoothing, z-loss and the average of the weights, on grids against plain torch."""

import shutil

import pytest
import reference
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from trained_here import losses, trainer_in

from hpctrain import Grid, RngKey, models
from hpctrain.cli import main
from hpctrain.config import load_config
from hpctrain.data import ShardedTokens
from hpctrain.models.export import to_hugging_face
from hpctrain.pipeline import one_f_one_b
from hpctrain.train.batches import Samples
from hpctrain.train.learning_rate import learning_rate

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]

STEPS, LR, MIN_LR, WARMUP, BATCH, CONTEXT = 6, 1e-2, 2e-3, 2, 6, 8
BETAS, EPS, SMOOTHING, Z_LOSS, DECAY = (0.8, 0.9), 1e-6, 0.1, 0.05, 0.7
OPTIONS = [
    "model.layers=2", "model.heads=2", "model.width=12", f"model.context={CONTEXT}", "model.vocabulary=259",
    f"train.batch={BATCH}", f"train.lr={LR}", f"train.warmup={WARMUP}", "train.clip=0.5", "precision.compute=fp64",
    "train.microbatches=2", "run.eval_batches=1", "run.eval_every=2", "run.checkpoint_minutes=0",
    "run.checkpoint_every=3", "checkpoint.background=false", "comm.watchdog=60", f"run.steps={STEPS}",
    "train.schedule=wsd", "train.decay_steps=3", f"train.min_lr={MIN_LR}", f"train.betas={list(BETAS)}",
    f"train.eps={EPS}", f"train.label_smoothing={SMOOTHING}", f"train.z_loss={Z_LOSS}", f"train.ema_decay={DECAY}",
    'train.ema_use=["validation", "export"]',
]  # fmt: skip

# (data, pipeline, tensor) and method; a job takes half of the steps on the first, and is resumed on the second
JOBS = {
    1: [((1, 1, "1"), "ddp"), ((1, 1, "1"), "zero1")],
    2: [((2, 1, "1"), "zero3"), ((1, 2, "1"), "ddp"), ((2, 1, "1"), "parameter_server")],
    4: [((2, 2, "1"), "zero1"), ((2, 1, "[1, 2, 1]"), "zero2"), ((4, 1, "1"), "zero3")],
}


@pytest.fixture
def train(world, tmp_path):
    return trainer_in(world, tmp_path, OPTIONS)


def given(grid, method):
    names = ("grid.data", "grid.pipeline", "grid.tensor")
    return [*(f"{name}={size}" for name, size in zip(names, grid)), f"data_parallel.method={method}"]


def serial(folder):
    """Losses, validation losses of the average, the average and the weights at the end, by plain torch."""
    from mpi4py import MPI

    path = min((folder / "data").glob("*.h5"), key=lambda path: len(path.name))  # the index, beside its shards
    alone, spec = Grid(comm=MPI.COMM_SELF), models.get("gpt2")
    samples = Samples(ShardedTokens(str(path), comm=MPI.COMM_SELF), CONTEXT, 0.05, RngKey(0) / "order")
    shape = spec.shape(vars(load_config(overrides=OPTIONS).model))
    model = spec.build(alone, shape, key=RngKey(0), dtype=torch.float64)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    average = {name: p.detach().clone() for name, p in weights.items()}
    matrices, vectors = ([w for w in weights.values() if (w.dim() > 1) == large] for large in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS)

    def logits(w, batch):
        return reference.gpt2_logits(w, batch.ids.view(-1, CONTEXT), shape.layers, shape.heads).flatten(0, 1)

    training, validation = {}, {}
    ((held_out,),) = samples.validation_batches(alone, BATCH, 1, one_f_one_b(1, 1), "cpu")
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, STEPS, LR, WARMUP, "wsd", MIN_LR, 3)
        (batch,) = samples.training_step(alone, step, BATCH, one_f_one_b(1, 1), "cpu", step)
        found = logits(weights, batch)
        value = F.cross_entropy(found, batch.targets, label_smoothing=SMOOTHING)
        value = value + Z_LOSS * found.logsumexp(1).square().mean()
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
        optimizer.step()
        training[step + 1] = value.item()
        with torch.no_grad():
            for name, p in weights.items():
                average[name] = DECAY * average[name] + (1 - DECAY) * p
            if step % 2:
                validation[step + 1] = F.cross_entropy(logits(average, held_out), held_out.targets).item()
    return training, validation, average, spec, shape


def test_equals_plain_torch(world, train):
    jobs = [given(*job) for job in JOBS[world.size]]
    for number, options in enumerate(jobs):
        assert train(*options, "run.max_seconds=0.001", f"run.name=cut-{number}", "run.checkpoint_every=0") == 85
        assert train(*jobs[(number + 1) % len(jobs)], "--resume", f"run.name=cut-{number}") == 0
    if world.rank:
        return
    training, validation, average, spec, shape = serial(train.folder)
    for number, options in enumerate(jobs):
        folder = train.folder / f"cut-{number}"
        assert losses(folder) == pytest.approx(training, rel=1e-12), options
        assert losses(folder, "val_loss") == pytest.approx(validation, rel=1e-12), options
        stored = load_file(folder / "model/model.safetensors")
        for ours, weight in average.items():
            for theirs, tensor in to_hugging_face(ours, weight, spec.huggingface, shape).items():
                torch.testing.assert_close(stored[theirs], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("steps", [4, 5])
def test_averages_of_replicas_that_train_by_themselves(world, train, steps):
    """At the end of the run, be that a step in which the weights were averaged, and from the checkpoint."""
    grid = ((world.size, 1, "1"), "local_sgd")
    assert train(*given(*grid), "data_parallel.average_every=2", f"run.steps={steps}", "run.checkpoint_every=1") == 0
    if world.rank == 0:
        run = next(iter(path.parent for path in train.folder.glob("*/config.toml")))
        out = train.folder / "out"
        assert main(["checkpoint", "export", str(run), "-o", str(out), "--weights", "ema"]) == 0
        theirs, ours = (load_file(path / "model.safetensors") for path in (out, run / "model"))
        torch.testing.assert_close(ours, theirs, rtol=1e-15, atol=1e-15)
    world.barrier()


def test_a_checkpoint_is_exported_with_its_average_or_without(world, train, capsys):
    """As at the end of the run, tokenizer and all, with what train.ema_use says, unless the command says otherwise. A
    run that uses no average has the weights of one without, and does not go on without it."""
    place = given(*JOBS[world.size][0])
    options = [*place, "run.steps=3"]
    for use, name in (('["export"]', "average"), ("[]", "last")):
        assert train(*options, f"train.ema_use={use}", f"run.name={name}") == 0
    no_average = ["train.ema_use=[]", "train.ema_decay=0"]
    assert train(*options, *no_average, "run.name=none") == 0
    assert train(*place, *no_average, "run.name=last", "--resume") == 2
    if world.rank == 0:
        for of in ("loss", "val_loss"):
            assert losses(train.folder / "last", of) == losses(train.folder / "none", of)
        one, other = (load_file(train.folder / name / "model/model.safetensors") for name in ("last", "none"))
        assert all(torch.equal(one[name], other[name]) for name in one)
        exported = {name: read_model(train.folder / name / "model") for name in ("average", "last")}
        assert exported["average"] != exported["last"]
        for name in exported:
            shutil.rmtree(train.folder / name / "model")
            for weights, expected in (([], name), (["--weights", "ema"], "average"), (["--weights", "last"], "last")):
                out = train.folder / f"{name}-{len(weights)}-{expected}"
                command = ["checkpoint", "export", str(train.folder / name), "-o", str(out), *weights]
                assert main(command) == 0
                assert read_model(out) == exported[expected]
        capsys.readouterr()
        command = ["checkpoint", "export", str(train.folder / "none"), "-o", str(train.folder / "out")]
        assert main([*command, "--weights", "ema"]) == 2
        assert "step 3 has no moving average of the weights, as train.ema_decay" in capsys.readouterr().err
        shutil.rmtree(train.folder / "none/model")
        (train.folder.parent / "text.txt").unlink()
        assert main(command) == 0
        assert "WARNING: no tokenizer beside the weights" in capsys.readouterr().err
        assert read_model(train.folder / "out").keys() == {"config.json", "model.safetensors"}
    world.barrier()


def read_model(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}
