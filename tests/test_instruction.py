"""Prompts that count in no loss, sources that are mixed, validation data of their own: on grids against plain torch."""

import json

import pytest
import reference
import torch
import torch.nn.functional as F
from trained_here import losses, losses_by_hand, trainer_in

from hpctrain import Grid, RngKey, models
from hpctrain.config import load_config
from hpctrain.data import MixedOrder, SampleOrder, ShardedTokens, pack
from hpctrain.data.documents import Fields
from hpctrain.grid_shape import all_grids
from hpctrain.pipeline import one_f_one_b, schedule
from hpctrain.train.batches import IGNORED, Samples, document_lengths
from hpctrain.train.training_data import samples_of

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]

CONTEXT, BATCH, STEPS, WEIGHTS = 8, 5, 4, (0.7, 0.3)


@pytest.fixture
def data(world, tmp_path_factory):
    """Paths of prompts with completions, of plain text, and of other prompts to validate on."""
    folder = world.bcast(tmp_path_factory.mktemp("data") if world.rank == 0 else None)
    if world.rank == 0:
        for name, first in (("tasks", 0), ("held", 900)):
            records = [{"q": f"{n} squared? ", "a": f"{n * n}."} for n in range(first, first + 40)]
            (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
            pack([str(folder / f"{name}.jsonl")], folder / f"{name}.h5", fields=Fields("a", "q"))
        (folder / "text.txt").write_text("".join(f"{n} and more\n" for n in range(60)))
        pack([str(folder / "text.txt")], folder / "text.h5")
    world.barrier()
    return [str(folder / f"{name}.h5") for name in ("tasks", "text", "held")]


def rows_of(path):
    """(samples, CONTEXT + 1) as they are stored."""
    tokens = ShardedTokens(path)
    stored = torch.from_numpy(tokens.read(0, tokens.tokens))
    return stored.unfold(0, CONTEXT + 1, CONTEXT)


def batches_by_hand(data, steps):
    """(ids, targets) of the whole batches, and of validation."""
    tasks, text, held = map(rows_of, data)
    key = RngKey(0) / "order"
    orders = [SampleOrder(len(tasks), key / "training"), SampleOrder(len(text), key / 1 / "training")]
    order = MixedOrder(orders, WEIGHTS, [0, len(tasks)])
    everything = torch.cat([tasks, text])
    parts = [everything[order[step * BATCH : (step + 1) * BATCH]] for step in range(steps)]
    parts.append(held[SampleOrder(len(held), key / "validation")[0 : 2 * BATCH]])
    return [(part[:, :-1] % 257, torch.where(part[:, 1:] < 257, part[:, 1:], IGNORED)) for part in parts]


def test_batches_on_every_grid(world, data):
    """The targets of all ranks, and one over how many of them count."""
    expected = batches_by_hand(data, 2)
    assert all(0 < (targets != IGNORED).sum() < targets.numel() for _, targets in expected)
    sources = [ShardedTokens(path, comm=world) for path in data]
    for replicas, pipeline, tensor in all_grids(world.size):
        grid = Grid(replicas, pipeline, tensor)
        for made in (one_f_one_b(pipeline, 2), *([schedule("chimera", 2, 2)] if pipeline == 2 else [])):
            samples = Samples(
                sources[:2], CONTEXT, 0.2, RngKey(0) / "order", weights=WEIGHTS, validation_tokens=sources[2]
            )
            for step in range(2):
                check(world, grid, expected[step], samples.training_step(grid, step, BATCH, made, "cpu", step))
            held = samples.validation_batches(grid, BATCH, 2, made, "cpu")
            check(world, grid, expected[2], [each for part in held for each in part])


def check(world, grid, expected, microbatches):
    ids, targets = expected
    count = int((targets != IGNORED).sum())
    found = [each for each in microbatches if each.targets is not None]
    assert all(each.scale == 1 / count for each in found)
    rows = [row.tolist() for each in found for row in each.targets.view(-1, CONTEXT)]
    everywhere = {tuple(row) for part in world.allgather(rows) for row in part}
    assert everywhere == {tuple(row) for row in targets.tolist()}
    given = [row.tolist() for each in microbatches if each.ids is not None for row in each.ids.view(-1, CONTEXT)]
    assert {tuple(row) for part in world.allgather(given) for row in part} == {tuple(row) for row in ids.tolist()}


# (data, pipeline, tensor); a job takes its first step on the first, and is resumed on the second
JOBS = {1: ["1", "1", "1"] * 2, 2: ["2", "1", "1", "1", "2", "1"], 4: ["2", "1", "[1, 1, 2]", "2", "2", "1"]}


def test_training_equals_plain_torch(world, tmp_path, data):
    options = [
        "model.layers=2", "model.heads=2", "model.width=12", f"model.context={CONTEXT}", "model.vocabulary=257",
        f"train.batch={BATCH}", "train.lr=1e-2", "train.warmup=1", "train.clip=0", "precision.compute=fp64",
        "train.microbatches=2", "run.eval_batches=2", "run.checkpoint_minutes=0", f"run.steps={STEPS}",
        "checkpoint.background=false", "comm.watchdog=60",
        f'data.mixture=[["{data[0]}", {WEIGHTS[0]}], ["{data[1]}", {WEIGHTS[1]}]]', f"data.validation_path={data[2]}",
    ]  # fmt: skip
    train = trainer_in(world, tmp_path, options)
    names = ["grid.data", "grid.pipeline", "grid.tensor"] * 2
    first, second = (
        [f"{name}={size}" for name, size in list(zip(names, JOBS[world.size]))[part]]
        for part in (slice(3), slice(3, 6))
    )
    assert train("data.text=[]", *first, "run.max_seconds=0.001") == 85
    assert train("data.text=[]", *second, "--resume") == 0
    assert train("data.text=[]", *second, "--resume", options[-2].replace("0.7", "0.6")) == 2  # another mixture
    if world.rank:
        return
    from mpi4py import MPI

    spec = models.get("gpt2")
    shape = spec.shape(vars(load_config(overrides=[*options, "data.text=[]"]).model))
    model = spec.build(Grid(comm=MPI.COMM_SELF), shape, key=RngKey(0), dtype=torch.float64)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def loss(batch):
        ids, targets = batch
        logits = reference.gpt2_logits(weights, ids, shape.layers, shape.heads)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    *training, held = batches_by_hand(data, STEPS)
    expected = losses_by_hand(weights, loss, training, 1e-2)
    folder = train.folder / "run"
    assert losses(folder) == pytest.approx(expected, rel=1e-12)
    assert losses(folder, "val_loss") == pytest.approx({STEPS: loss(held).item()}, rel=1e-12)
    samples = [len(rows_of(path)) for path in data[:2]]
    assert losses(folder, "epochs")[4] == {data[0]: 14 / samples[0], data[1]: 6 / samples[1]}


def test_lengths_of_documents():
    rows = torch.tensor([[1, 2, 9, 3, 4], [1, 2, 3, 4, 9], [9, 9, 1, 2, 3], [1, 2, 3, 4, 5]])
    assert document_lengths(rows, 9) == [[3, 2], [5], [1, 1, 3], [5]]


def test_asynchronous_servers_are_refused(world, data):
    """Whose workers do not know how many targets the others have."""
    options = ["data_parallel.method=parameter_server", "data_parallel.staleness=1", "grid.data=3"]
    config = load_config(overrides=[*options, f"model.context={CONTEXT}", "model.vocabulary=257"])
    tasks, text, held = (ShardedTokens(path) for path in data)
    assert samples_of(config, [text], RngKey(0)).held_out
    for sources, more in [([tasks], []), ([text, held], [f"data.validation_path={data[2]}"])]:
        config = load_config(overrides=[*options, f"model.context={CONTEXT}", "model.vocabulary=257", *more])
        with pytest.raises(
            ValueError, match="the data have prompts, .* which data_parallel.staleness = 1 does not; use"
        ):
            samples_of(config, sources, RngKey(0))


def test_sources_of_several_tokenizers_are_refused(world, tmp_path, data, capfd):
    from word_tokens import by_words

    folder = world.bcast(tmp_path)
    if world.rank == 0:
        (folder / "w.txt").write_text("a b " * 90)
        pack([str(folder / "w.txt")], folder / "w.h5", by_words({"a": 1, "b": 2, "<|endoftext|>": 0}))
    world.barrier()
    train = trainer_in(world, tmp_path, [f"model.context={CONTEXT}", f"grid.data={world.size}"])
    assert train(f'data.mixture=[["{data[1]}", 1], ["{folder}/w.h5", 1]]', "data.text=[]") == 2
    assert train(f'data.mixture=[["{data[1]}", 1], ["{folder}/none.h5", 1]]', "data.text=[]") == 2
    if world.rank == 0:
        said = capfd.readouterr().err
        assert "w.h5 was packed by another tokenizer than" in said
        assert "none.h5 does not exist" in said
