"""A model is added from outside: by a spec of its own, or as plain torch modules, in `hpctrain train`."""

import types

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from running import write_text
from safetensors.torch import load_file
from trained_here import losses, trainer_in

from hpctrain import Grid, RngKey, models
from hpctrain.cli import main
from hpctrain.comm import together
from hpctrain.config import load_config
from hpctrain.data import ShardedTokens
from hpctrain.grid_shape import grid_shape
from hpctrain.models.plain.model import PlainModel
from hpctrain.models.plain.shape import PlainShape
from hpctrain.pipeline import one_f_one_b, schedule
from hpctrain.plan import step_traffic
from hpctrain.randomness import seeded
from hpctrain.train.batches import Samples
from hpctrain.train.learning_rate import learning_rate
from hpctrain.train.loop import train as train_session
from hpctrain.train.session import build
from hpctrain.train.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]

STEPS, LR, WARMUP, BATCH = 4, 1e-2, 2, 6
OPTIONS = [
    "model.layers=4", "model.width=12", "model.context=8", "model.vocabulary=258", f"train.batch={BATCH}",
    "train.microbatches=2", f"train.lr={LR}", f"train.warmup={WARMUP}", "train.clip=0.5", "precision.compute=fp64",
    "run.eval_batches=1", "run.checkpoint_minutes=0", "run.checkpoint_every=2", "checkpoint.background=false",
    "checkpoint.keep=9", "comm.watchdog=60",
]  # fmt: skip


def serial(folder, weights, logits, mean=F.cross_entropy):
    """Losses of the steps by plain torch, from the first weights by name; trains `weights` in place."""
    from mpi4py import MPI

    path = min((folder / "data").glob("*.h5"), key=lambda path: len(path.name))  # the index, beside its shards
    alone = Grid(comm=MPI.COMM_SELF)
    samples = Samples(ShardedTokens(str(path), comm=MPI.COMM_SELF), 8, 0.05, RngKey(0) / "order")
    matrices, vectors = ([w for w in weights.values() if (w.dim() > 1) == large] for large in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    found = {}
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, STEPS, LR, WARMUP)
        (batch,) = samples.training_step(alone, step, BATCH, one_f_one_b(1, 1), "cpu", step)
        value = mean(logits(batch.ids.view(BATCH, 8)).flatten(0, 1), batch.targets)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
        optimizer.step()
        found[step + 1] = value.item()
    return found


@pytest.fixture
def train(world, tmp_path):
    return trainer_in(world, tmp_path, [*OPTIONS, f"run.steps={STEPS}"])


@pytest.fixture
def tiny():
    """The kind "tiny", for as long as the test takes."""
    models.register("tiny", tiny_models.TinySpec())
    yield
    del models.registry.SPECS["tiny"]


# tied embeddings or not; from the first grid to the second
TINY = {
    1: ("false", ("1", "1", "1"), ("1", "1", "1")),
    2: ("true", ("2", "1", "1"), ("1", "2", "1")),
    4: ("false", ("2", "2", "1"), ("1", "2", "[1, 2, 1]")),
    8: ("true", ("2", "2", "2"), ("1", "4", "[1, 1, 2]")),
}


@pytest.mark.ranks(*TINY)
def test_a_third_model(world, train, tiny):
    """By a spec alone: any grid, a checkpoint resumed on another grid, evaluation and sample."""
    tied, *grids = TINY[world.size]
    first, second = (
        [f"{name}={size}" for name, size in zip(("grid.data", "grid.pipeline", "grid.tensor"), grid)] for grid in grids
    )
    options = ["model.kind=tiny", f"model.tied={tied}", "model.ffn=20", "run.sample=3"]
    assert train(*options, *first, "run.name=whole") == 0
    assert train(*options, *first, "run.name=cut", "run.max_seconds=0.001", "run.checkpoint_every=0") == 85
    assert train(*options, *second, "run.name=cut", "--resume") == 0
    if world.rank == 0:
        expected = expected_of_tiny(train.folder, tied == "true")
        assert losses(train.folder / "whole") == pytest.approx(expected, rel=1e-12)
        assert losses(train.folder / "cut") == pytest.approx(expected, rel=1e-12)


def expected_of_tiny(folder, tied):
    from mpi4py import MPI

    spec = models.get("tiny")
    shape = tiny_models.TinyShape(4, 12, 20, 8, 258, tied)
    model = spec.build(Grid(comm=MPI.COMM_SELF), shape, key=RngKey(0), dtype=torch.float64)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    return serial(folder, weights, lambda ids: tiny_models.tiny_logits(weights, ids, 4))


@pytest.mark.ranks(1)
def test_costs_of_a_third_model_by_hand(world, tiny):
    """Width 12, ffn 20, vocabulary 258, tied: 2·12·20 weights, 20+12 biases and 12 of a norm in each of 4 blocks."""
    spec = models.get("tiny")
    options = {"layers": 4, "width": 12, "ffn": 20, "context": 8, "vocabulary": 258, "tied": True}
    costs = spec.costs(spec.shape(options))
    assert costs.flops_per_token == 6 * (4 * 480 + 258 * 12)
    sizes = grid_shape(2, 1, 1)
    parameters = 4 * (480 + 20 + 12 + 12) + 12 + 258 * 12
    assert step_traffic(costs, sizes, 2, 1)["data"] == 4 * parameters + 8


@pytest.mark.ranks(1)
def test_names_of_models(world, tiny):
    spec = tiny_models.TinySpec()
    for kind, given, message in (
        ("gpt2", spec, "there is a model kind 'gpt2' already"),
        ("a:b", spec, "a model kind must be a plain name, got 'a:b'"),
        ("other", 3, "model kind 'other' must be a ModelSpec, got int"),
    ):
        with pytest.raises(ValueError, match=message):
            models.register(kind, given)
    with pytest.raises(ValueError, match=r"^model.kind = tiny has no model.rope_base, got 1.0; leave it out"):
        load_config(overrides=["model.kind=tiny", "model.rope_base=1.0"])
    with pytest.raises(ValueError, match=r"^model.kind = gpt2 has no model.kv_heads, got 2; leave it out"):
        load_config(overrides=["model.kv_heads=2"])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["spec", "TinySpec"])
def test_a_spec_by_its_path(world, train, name):
    assert train(f"model.kind=tiny_models:{name}", f"grid.pipeline={world.size}", "run.steps=1") == 0


PLAIN = {
    1: [([], [])],
    2: [
        (["grid.data=2"], ["grid.tensor=2"]),
        (["grid.tensor=2"], ["grid.data=2", "data_parallel.method=zero1"]),
        (["grid.data=2", "data_parallel.method=zero2"], ["grid.data=2"]),
        (["grid.data=2", "data_parallel.method=zero3"], ["grid.tensor=[1, 2, 1]"]),
    ],
    4: [(["grid.data=2", "grid.tensor=2"], ["grid.data=4", "data_parallel.method=zero3"])],
}


@pytest.mark.ranks(*PLAIN)
def test_plain_modules(world, train):
    """Trained as plain torch trains them, saved, resumed on another grid, and exported under the module's own names."""
    for number, (first, second) in enumerate(PLAIN[world.size]):
        check_plain(world, train, "whole", str(number), first, second)


@pytest.mark.ranks(1, 2)
def test_a_loss_beside_the_module(world, train):
    check_plain(world, train, "with_loss", "run", [f"grid.data={world.size}"], [f"grid.tensor={world.size}"])


def check_plain(world, train, name, number, first, second):
    options = [f"model.kind=tiny_models:{name}", f"run.name={number}"]
    assert train(*options, *first, "run.max_seconds=0.001", "run.checkpoint_every=0") == 85
    assert train(*options, *second, "run.sample=2", "--resume") == 0
    if world.rank == 0:
        module = serial_module(name)
        weights = dict(module.named_parameters())
        more = 1.0 if name == "with_loss" else 0.0
        expected = serial(train.folder, weights, module, lambda *a: F.cross_entropy(*a) + more)
        assert losses(train.folder / number) == pytest.approx(expected, rel=1e-11)
        exported = load_file(train.folder / number / "model/model.safetensors")
        module.load_state_dict(exported)
        for key, weight in weights.items():
            torch.testing.assert_close(exported[key], weight, rtol=1e-8, atol=1e-10)


def serial_module(name):
    """As every rank makes it, in plain torch."""
    section = types.SimpleNamespace(**vars(load_config(overrides=OPTIONS).model))
    with seeded(RngKey(0)):
        made = getattr(tiny_models, name)(section)
    made = made[0] if isinstance(made, tuple) else made
    if isinstance(made, list):
        modules = []
        for number, part in enumerate(made):
            with seeded(RngKey(0) / number):
                modules.append(part())
        made = torch.nn.Sequential(*modules)
    return made.double()


PIPELINES = {
    1: [([], [])],
    2: [
        (["grid.pipeline=2"], ["grid.data=2"]),
        (["grid.tensor=2"], ["grid.pipeline=2", "pipeline.partition=[1, 3]", "pipeline.schedule=gpipe"]),
    ],
    4: [(["grid.data=2", "grid.pipeline=2"], ["grid.pipeline=4", "pipeline.partition=dp"])],
}


@pytest.mark.ranks(*PIPELINES)
def test_a_list_of_parts(world, train):
    """Cut into pipeline stages, with the same losses as on any other grid."""
    for number, (first, second) in enumerate(PIPELINES[world.size]):
        check_plain(world, train, "parts", str(number), first, second)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("method", ["ddp", "local_sgd"])
def test_a_checkpoint_has_the_weights_of_the_export(world, train, method):
    replicas = [f"grid.data={world.size}", f"data_parallel.method={method}", "data_parallel.average_every=0"]
    assert train("model.kind=tiny_models:scaled", "run.name=run", "train.ema_decay=0.5", *replicas) == 0
    if world.rank == 0:
        run, out = train.folder / "run", train.folder / "out"
        assert main(["checkpoint", "export", str(run), "-o", str(out)]) == 0
        weights, of_checkpoint = (load_file(folder / "model.safetensors") for folder in (run / "model", out))
        assert weights.keys() == of_checkpoint.keys() > {"scale", "kept"}
        assert all(torch.equal(weight, of_checkpoint[name]) for name, weight in weights.items())
        assert of_checkpoint["kept"].all()
    world.barrier()


@pytest.mark.ranks(4)
def test_a_stage_without_weights(world, train, capsys):
    """Which would not know of a precision that the others' weights are converted to."""
    check_plain(world, train, "weightless", "run", ["grid.pipeline=4"], ["grid.pipeline=2", "grid.data=2"])
    check_plain(world, train, "weightless", "other", ["grid.data=4"], ["grid.pipeline=4", "sanity.check_every=1"])
    stages = ["model.kind=tiny_models:weightless", "grid.pipeline=4"]
    assert train(*stages, "data_parallel.method=local_sgd", "data_parallel.average_every=0") == 0
    assert train(*stages, "precision.compute=bf16") == 2
    if world.rank == 0:
        assert "rank 1 has no weights to train, and does not know" in capsys.readouterr().err


@pytest.mark.ranks(2)
def test_a_module_as_the_loss(world):
    """What it has goes where the model is; a weight of it would be on every stage, and count on every tensor rank."""
    shape = PlainShape(layers=4, width=12, context=8, vocabulary=258, options={})

    def made(grid, loss):
        def make():
            return (tiny_models.whole if grid.pipeline.size == 1 else tiny_models.parts)(shape), loss

        return PlainModel(grid, shape, make, kind="a loss", key=RngKey(0), dtype=torch.float64)

    weighted = torch.nn.CrossEntropyLoss(weight=torch.ones(258))
    assert made(Grid(data=2), weighted).mean_loss.weight.dtype == torch.float64
    for grid in (Grid(tensor=2), Grid(pipeline=2)):
        with pytest.raises(ValueError, match=r"the loss of model.kind = a loss, Linear.*, has parameters"):
            made(grid, torch.nn.Linear(1, 1))
    assert made(Grid(tensor=2), torch.nn.Linear(1, 1).requires_grad_(False)).mean_loss.weight.shard


class Named(torch.nn.Module):
    """Gives its logits in a dict, as Hugging Face's models do."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, ids):
        return {"logits": self.module(ids), "ids": ids}


@pytest.mark.ranks(1)
def test_a_replica_without_a_sequence(world):
    """Of a module that gives more than a tensor, to a loss of its own."""
    shape = PlainShape(layers=4, width=12, context=8, vocabulary=258, options={})

    def make():
        return Named(tiny_models.whole(shape)), lambda output, targets: F.cross_entropy(output["logits"], targets)

    model = PlainModel(Grid(), shape, make, kind="named", key=RngKey(0))
    nothing = torch.zeros(0, dtype=torch.int64)
    loss = model.loss(model(nothing, model.tokens(0, 8)), nothing, 1.0)
    loss.backward()
    assert loss == 0
    assert not any(p.grad.any() for p in model.parameters())
    with pytest.raises(ValueError, match="by logits, .*, and model.kind = named gives a dict; use run.sample=0"):
        model.last_logits(model(nothing, model.tokens(0, 8)), model.tokens(0, 8))


@pytest.mark.ranks(2)
def test_sequences_of_plain_modules_come_whole(world):
    grid, shape = Grid(pipeline=2), PlainShape(layers=4, width=12, context=8, vocabulary=258, options={})
    model = PlainModel(grid, shape, lambda: tiny_models.parts(shape), kind="parts", key=RngKey(0))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"slices=\[4, 4\]: only a .* and none of plain torch modules"):
        Trainer(model, grid, optimizer, schedule("terapipe", 2, 2), slices=[4, 4])


ITSELF = ["grid.pipeline=2", "train.clip=0", "model.tied=false"]  # for stages that update by themselves


@pytest.mark.ranks(1)
def test_what_is_refused_once_is_refused_again(world):
    shape = PlainShape(layers=4, width=12, context=8, vocabulary=258, options={})
    model = PlainModel(Grid(), shape, lambda: tiny_models.counting(shape), kind="counting", key=RngKey(0))
    model(torch.zeros(8, dtype=torch.int64), model.tokens(1, 8))
    for _ in range(2):
        with pytest.raises(ValueError, match="the buffer module.calls of .* changes in training"):
            model.check_draws()


REFUSED = {
    1: [
        ("nobody_has:it", [], "cannot import nobody_has from .*: ModuleNotFoundError: No module named 'nobody_has'"),
        ("tiny_models:absent", [], "tiny_models.py has no function absent"),
        ("tiny_models:NUMBER", [], "tiny_models.py has no function NUMBER"),
        ("tiny_models:two", [], "must take one argument, the section .model., and make a torch module, or take none"),
        ("tiny models:a", [], 'model.kind must be a name or "package.module:function", got'),
        ("tiny_models:nothing", [], "must return a torch.nn.Module, a list of them, or .*, got NoneType"),
        ("tiny_models:too_few", [], "must return model.layers = 4 modules, got 1"),
        ("tiny_models:with_dropout", [], "has a Dropout of torch, whose masks depend on the grid"),
        ("tiny_models:drawing", [], "stage 0 draws random numbers from the generator of torch in training"),
        ("tiny_models:counting", [], "the buffer module.calls of .* changes in training"),
        ("tiny_models:shared", [], "parts 1 and 2 of .* share 0.weight"),
        ("tiny_models:pooled", [], "must give logits of .sequences, length, vocabulary., .* got"),
        ("tiny_models:few_logits", [], r"must give logits of .*, \(\d+, \d+, 258\), got \(\d+, \d+, 257\); return it"),
        ("tiny_models:whole", ["train.recompute=block"], "train.recompute = block is for the models of hpctrain"),
        ("tiny_models:whole", ["pipeline.schedule=terapipe"], "terapipe cuts sequences into token slices, which"),
        ("tiny_models:whole", ["model.init=there"], "has no config.json of Hugging Face's to start from"),
    ],
    2: [
        ("tiny_models:nothing", ["grid.data=2"], "must return a torch.nn.Module, a list of them, or .*, got NoneType"),
        ("tiny_models:whole", ["grid.pipeline=2"], "gives one module, which cannot be cut into 2 pipeline stages; use"),
        (
            "tiny_models:narrow",
            ["grid.pipeline=2"],
            r"part 1 of .* must give .* = .1, 8, 12. of torch.float64, got .1, 8, 3. of",
        ),
        *(
            (f"tiny_models:{kind}_parts", [*ITSELF, f"pipeline.schedule={schedule}"], message)
            for schedule in ("1f1b", "pipedream", "pipedream-2bw", "ampnet")  # all but the first update on the way
            for kind, message in (
                ("drawing", "stage 0 draws random numbers from the generator of torch in training"),
                ("counting", r"the buffer layers.1.calls of .* changes in training"),
            )
        ),
    ],
    4: [
        ("tiny_models:parts", ["grid.pipeline=2", "grid.tensor=2"], "divided over a tensor axis or over a pipeline"),
        ("tiny_models:drawing", ["grid.data=4"], "stage 0 draws random numbers from the generator of torch"),
    ],
}


@pytest.mark.ranks(*REFUSED)
def test_what_is_refused(world, tmp_path):
    """On every rank, by the same words."""
    folder = world.bcast(tmp_path)
    text = world.bcast(write_text(folder) if world.rank == 0 else None)
    for number, (kind, options, message) in enumerate(REFUSED[world.size]):
        given = [
            f"run.name={number}",
            *OPTIONS,
            f"run.out={folder}/runs",
            f"data.text={text}",
            "run.steps=1",
            f"model.kind={kind}",
            *options,
        ]
        with pytest.raises(ValueError, match=message):
            with together(world):
                config = load_config(overrides=given)
            train_session(build(config, world))
        world.Barrier()
