"""data.documents = masked: what ranks read of packed documents, and a job of them on grids against plain torch."""

import json

import pytest
import reference
import torch
import torch.nn.functional as F
from trained_here import losses, losses_by_hand, trainer_in
from training_checks import document_lengths

from hpctrain import Grid, RngKey, models
from hpctrain.config import load_config
from hpctrain.data import SampleOrder, ShardedTokens, pack
from hpctrain.data.documents import Fields
from hpctrain.grid_shape import all_grids
from hpctrain.pipeline import one_f_one_b, schedule
from hpctrain.train.batches import IGNORED, Samples

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]

CONTEXT, BATCH, STEPS, END = 10, 5, 3, 256


@pytest.fixture
def data(world, tmp_path_factory):
    """Packed documents of 1 to 22 tokens, some of them behind prompts that count in no loss."""
    folder = world.bcast(tmp_path_factory.mktemp("documents") if world.rank == 0 else None)
    if world.rank == 0:
        records = [{"q": "?" * (n % 3), "a": "".join(chr(97 + (n * k) % 26) for k in range(n * 7 % 20))}
                   for n in range(80)]  # fmt: skip
        (folder / "text.jsonl").write_text("\n".join(map(json.dumps, records)))
        (folder / "plain").mkdir()
        for n in range(20):  # whose first token only the end of the document before keeps from being a target
            (folder / f"plain/{n}.txt").write_text("abcdefghi"[: 3 + n % 7])
        pack([str(folder / "text.jsonl"), str(folder / "plain")], folder / "data.h5", fields=Fields("a", "q"))
    world.barrier()
    return str(folder / "data.h5")


def batches_by_hand(path, steps):
    """(ids, targets) of the whole batches, and of validation."""
    tokens = ShardedTokens(path)
    stored = torch.from_numpy(tokens.read(0, tokens.tokens)).unfold(0, CONTEXT + 1, CONTEXT)
    key, held = RngKey(0) / "order", round(len(stored) * 0.2)
    training = SampleOrder(len(stored) - held, key / "training")
    validation = SampleOrder(held, key / "validation")[0 : 2 * BATCH] + len(stored) - held
    parts = [stored[training[step * BATCH : (step + 1) * BATCH]] for step in range(steps)] + [stored[validation]]
    counts = [(part[:, 1:] < 257) & (part[:, :-1] % 257 != END) for part in parts]
    return [(part[:, :-1] % 257, part[:, 1:].where(count, IGNORED)) for part, count in zip(parts, counts)]


def test_what_ranks_read(world, data):
    """Ids, targets and documents at the places of the whole batch, and one over the targets that count there."""
    expected = batches_by_hand(data, 2)
    tokens = ShardedTokens(data, comm=world)
    cut = {2: [((1, 2, 1), 1, 1)], 4: [((2, 1, 2), 1, 1), ((1, 2, 1), 1, (1, 1, 2)), ((1, 2, 1), 2, 1)]}
    for replicas, pipeline, tensor in all_grids(world.size) + cut.get(world.size, []):
        grid = Grid(replicas, pipeline, tensor)
        samples = Samples(tokens, CONTEXT, 0.2, RngKey(0) / "order", balanced, documents="masked")
        for made in (one_f_one_b(pipeline, 2), *([schedule("chimera", 2, 2)] if pipeline == 2 else [])):
            for step in range(2):
                check(world, expected[step], [samples.training_step(grid, step, BATCH, made, "cpu", step)])
            check(world, expected[2], samples.validation_batches(grid, BATCH, 2, made, "cpu"))


def balanced(*given, **known):
    return models.get("gpt2").tokens(*given, **known, balance="work")


def check(world, expected, batches):
    ids, targets = expected
    count, found, places = int((targets != IGNORED).sum()), {}, set()
    for number, microbatches in enumerate(batches):
        for each in microbatches:
            tokens, here = each.tokens, each.tokens.positions().tolist()
            assert each.scale == 1 / count
            rows = range(BATCH * number + tokens.first, BATCH * number + tokens.first + tokens.sequences)
            inner = range(BATCH * number + tokens.inner.start, BATCH * number + tokens.inner.stop)
            assert tokens.documents == tuple(tuple(document_lengths(ids[row].tolist(), END)) for row in rows)
            for of, numbers, values in ((ids, rows, each.ids), (targets, inner, each.targets)):
                if values is not None:
                    assert values.tolist() == of[list(numbers)][:, here].flatten().tolist()
            if each.targets is not None:
                places |= {(row, at) for row in inner for at in here}
            found[number, tokens.first, tokens.sequences] = tokens.over_sequence
    assert set().union(*world.allgather(places)) == {(row, at) for row in range(len(ids)) for at in range(CONTEXT)}


GRIDS = {
    1: ["grid.data=1"] * 2,
    2: ["grid.data=[1,2,1] sequence.balance=work", "grid.pipeline=2"],
    4: ["grid.data=[2,2,1]", "grid.data=[1,1,2] grid.tensor=[1,1,2]"],
}


def test_training_equals_plain_torch(world, tmp_path, data):
    """Resumed on another grid; and not with documents that attend to each other."""
    options = [
        "model.layers=2", "model.heads=2", "model.width=12", f"model.context={CONTEXT}", "model.vocabulary=257",
        f"train.batch={BATCH}", "train.lr=1e-2", "train.warmup=1", "train.clip=0", "precision.compute=fp64",
        "train.microbatches=2", "run.eval_batches=2", "run.checkpoint_minutes=0", f"run.steps={STEPS}",
        "checkpoint.background=false", "comm.watchdog=60", "data.validation=0.2", f"data.path={data}",
        "data.documents=masked",
    ]  # fmt: skip
    train = trainer_in(world, tmp_path, options)
    first, second = (each.split() for each in GRIDS[world.size])
    assert train("data.text=[]", *first, "run.max_seconds=0.001") == 85
    assert train("data.text=[]", *second, "--resume", "data.documents=packed") == 2
    assert train("data.text=[]", *second, "--resume") == 0
    if world.rank:
        return
    from mpi4py import MPI

    spec = models.get("gpt2")
    shape = spec.shape(vars(load_config(overrides=[*options, "data.text=[]"]).model))
    model = spec.build(Grid(comm=MPI.COMM_SELF), shape, key=RngKey(0), dtype=torch.float64)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def loss(batch):
        ids, targets = batch
        logits = reference.gpt2_logits(weights, ids, shape.layers, shape.heads, end=END)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    *training, held = batches_by_hand(data, STEPS)
    expected = losses_by_hand(weights, loss, training, 1e-2)
    assert losses(train.folder / "run") == pytest.approx(expected, rel=1e-12)
    assert losses(train.folder / "run", "val_loss") == pytest.approx({STEPS: loss(held).item()}, rel=1e-12)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.kind=tiny_models:whole"], "which model.kind = tiny_models:whole does not; use data.documents=packed"),
        (["pipeline.schedule=terapipe", "grid.pipeline=2"], "which pipeline.schedule = terapipe does not"),
        (
            ["data_parallel.method=parameter_server", "data_parallel.staleness=1", "grid.data=3"],
            "which data_parallel.staleness = 1 does not",
        ),
    ],
)
def test_what_cannot_tell_documents_apart_is_refused(options, message):
    alone = "data.documents = masked has documents attend to themselves alone, and all ranks count the targets .*, "
    with pytest.raises(ValueError, match=alone + message):
        load_config(overrides=["data.documents=masked", *options])
