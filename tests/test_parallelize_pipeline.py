"""A model's trunk cut into pipeline stages by the one line: equal to one rank that adds up the microbatches."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from parallelize_checks import numbers, on_first
from torch import nn
from torch.overrides import TorchFunctionMode

import hpctrain as ht
from hpctrain.convert import pipeline as stages
from hpctrain.pipeline import gpipe

pytestmark = pytest.mark.mpi

MICROBATCHES = 3
SIZES = {
    2: [{"pipeline": 2}],
    4: [{"pipeline": 2, "tensor": 2}, {"pipeline": 4}, {"pipeline": 2, "data": 2}],
}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=29, n_positions=8, n_embd=12, n_layer=5, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=29, hidden_size=12, intermediate_size=20, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Images(nn.Module):
    """As torchvision's: features, pooled, classified; running statistics in both stages."""

    def __init__(self):
        super().__init__()
        widths = [1, 3, 4, 5]
        layers = [
            layer
            for a, b in zip(widths, widths[1:])
            for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2, 1))
        ]
        self.features, self.pool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 29))

    def forward(self, x):
        return self.classifier(self.pool(self.features(x)).flatten(1))


class Residual(nn.Module):
    """The forward has work of its own between the blocks, and a weight of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.enter = nn.Linear(16, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 29)

    def forward(self, x):
        x = self.enter(x.flatten(1))
        for block in self.blocks:
            x = x + self.scale * block(x)
        return self.head(self.norm(x))


def text(seed):
    ids = torch.randint(29, (3, 7), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def image(seed):
    return numbers(3, 1, 4, 4, seed=seed), torch.arange(3) * seed % 29


class Doubles(TorchFunctionMode):
    """Within it float32, in which Hugging Face computes norms and losses, is float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if x is torch.float32 else x for x in args]  # a type is an argument of its own
        kwargs = {key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def loss_of_text(model, batch):
    with Doubles():
        return model(**batch).loss / MICROBATCHES


def loss_of_image(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]) / MICROBATCHES


def recomputing():
    model = gpt2()
    model.gradient_checkpointing_enable()
    return model


MODELS = {
    "recomputing": (recomputing, None, text, loss_of_text),
    "gpt2": (gpt2, None, text, loss_of_text),
    "llama": (llama, "model.layers", text, loss_of_text),
    "images": (Images, "features", image, loss_of_image),
    "residual": (Residual, None, image, loss_of_image),
    "sequence": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 7), nn.Linear(7, 29)),
        "",
        image,
        loss_of_image,
    ),
}


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize(("kind", "schedule"), [*((kind, "1f1b") for kind in MODELS), ("llama", "gpipe")])
def test_equals_one_rank(world, kind, schedule):
    for sizes in SIZES[world.size] if kind == "gpt2" else SIZES[world.size][:1]:
        equals_one_rank(ht.Grid(**sizes), kind, schedule)


def equals_one_rank(grid, kind, schedule="1f1b", **how):
    make, path, batch, loss = MODELS[kind]
    torch.manual_seed(1)
    serial = make().double()
    halves = [5, 7] if kind == "images" and grid.pipeline.size == 2 else None  # running statistics in both
    model = ht.parallelize(copy.deepcopy(serial), grid, pipeline=path, layers_per_stage=halves, **how)
    # A rank may have no weights.
    ours, theirs = (torch.optim.AdamW([{"params": list(m.parameters())}], lr=0.01) for m in (model, serial))
    order = MICROBATCHES if schedule == "1f1b" else gpipe(grid.pipeline.size, MICROBATCHES)
    replicas = grid.data.size
    share = functools.partial(lambda replicas, m, b: loss(m, b) / replicas, replicas)
    trainer = ht.Trainer(model, grid, ours, order, loss=share, max_norm=0.5)
    for step in range(2):
        parts = [batch(10 * step + n) for n in range(MICROBATCHES * replicas)]
        expected = on_first(grid, functools.partial(serial_step, serial, theirs, loss, parts, replicas))
        mine = parts[MICROBATCHES * grid.data.rank :][:MICROBATCHES]
        got, norm = trainer.step(mine)
        assert got == pytest.approx(expected[0], rel=1e-11)
        assert norm == pytest.approx(expected[1], rel=1e-10)
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        assert list(gathered) == list(serial.state_dict())
        for name, tensor in serial.state_dict().items():
            torch.testing.assert_close(gathered[name], tensor, rtol=1e-9, atol=1e-10, msg=name)
    serial.eval()
    with torch.no_grad():
        expected = on_first(grid, lambda: float(sum(loss(serial, part) for part in parts) / replicas))
    assert trainer.evaluate([mine]) == pytest.approx(expected, rel=1e-10)


def serial_step(model, optimizer, loss, parts, replicas):
    """The loss and the norm of gradients."""
    optimizer.zero_grad()
    losses = [loss(model, part) / replicas for part in parts]
    for each in losses:
        each.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return sum(map(float, losses)), float(norm)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("kind", "tensor"), [("gpt2", (1, 1, 2)), ("recomputing", 2), ("residual", 2)])
def test_sharded_activations(world, kind, tensor):
    """Stages send each other a rank's tokens."""
    grid = ht.Grid(pipeline=2, tensor=tensor)
    equals_one_rank(grid, kind, shard_activations=True)
    if kind == "residual":  # others have tied weights, which stages send each other too
        messages = 3 * MICROBATCHES if grid.pipeline.rank == 0 else 2 * MICROBATCHES  # of two steps and an evaluation
        rows = [2, 1][grid.tensor.rank]  # of 3 images of 6 features
        scale = 2 * 8  # its gradient, which both stages have
        assert grid.transport.traffic.table()["pipeline", "send"]["sent"] == messages * rows * 6 * 8 + scale


class Odd(Residual):
    """What a pipeline cannot do: see its heirs."""

    def __init__(self):
        super().__init__()
        self.late = nn.Linear(6, 6)


class LateBefore(Odd):
    def forward(self, x):
        x = self.late(self.enter(x.flatten(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ReadsElsewhere(Odd):
    def forward(self, x):
        return super().forward(x) + self.enter.bias.sum()


class Two(Odd):
    def forward(self, x):
        first = x = self.enter(x.flatten(1))
        for block in self.blocks:
            x = first + block(x)
        return self.head(x)


class Skips(Odd):
    def forward(self, x):
        first = x = self.enter(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x) + first.sum()


class Adds(nn.Linear):
    def forward(self, x, y):
        return super().forward(x) + y


class GivesTwo(Odd):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Adds(6, 6) for _ in range(4))

    def forward(self, x):
        first = x = self.enter(x.flatten(1))
        for block in self.blocks:
            x = block(x, first)
        return self.head(x)


class Backwards(Odd):
    def forward(self, x):
        x = self.enter(x.flatten(1))
        for block in self.blocks[::-1]:
            x = block(x)
        return self.head(x)


class Branches(Odd):
    def forward(self, x):
        x = self.enter(x.flatten(1))
        for block in self.blocks:
            x = block(x)
            if x.sum() > 1e9:
                break
        return self.head(x)


class Writes(Odd):
    def forward(self, x):
        x, seen = self.enter(x.flatten(1)), torch.zeros(4, dtype=torch.float64)
        for number, block in enumerate(self.blocks):
            x = block(x)
            seen[number] = x.sum()
        return self.head(x) + seen.sum()


class Dropping(Odd):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)


REFUSED = {
    LateBefore: "the module 'late' is on another stage of the pipeline than the forward that calls it",
    ReadsElsewhere: "the module 'enter' is on another stage of the pipeline than the forward that reads its bias",
    Two: "is given what another stage of the pipeline computes",
    Skips: "the loss depends on what earlier stages of the pipeline compute",
    GivesTwo: r"the block 'blocks\.\d' is given 2 tensors that earlier stages of the pipeline compute",
    Backwards: "the forward calls block 3 of the trunk where block 0 is to follow",
    Branches: "the forward asks for numbers",
    Writes: "the forward writes activations of another stage of the pipeline into a tensor",
    Dropping: "the model has a Dropout of torch, whose masks depend on the grid",
}


@pytest.mark.ranks(2)
def test_microbatches_with_numbers_of_their_own(world, monkeypatch):
    """What is known of them, beside their shapes, does not grow from step to step."""
    monkeypatch.setattr(stages, "KNOWN", 3)
    torch.manual_seed(0)
    grid = ht.Grid(pipeline=2)
    model = ht.parallelize(Residual().double(), grid)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = ht.Trainer(model, grid, optimizer, MICROBATCHES, loss=loss_of_image)
    for step in range(4):
        trainer.step([(*image(0), f"image {step}.{number}") for number in range(MICROBATCHES)])
    known = model.hpctrain_pipeline
    assert len(known._entry) <= 3 + MICROBATCHES
    assert len(known._progress.outputs) <= 3 + MICROBATCHES


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_refused_on_all_ranks(world, kind):
    """Before the first step, in the words of the rank that finds it."""
    torch.manual_seed(0)
    grid = ht.Grid(pipeline=2)
    with pytest.raises(ValueError, match=REFUSED[kind]) as refused:
        model = ht.parallelize(kind().double(), grid, pipeline="blocks")
        trainer = ht.Trainer(model, grid, torch.optim.SGD(model.parameters(), 0.1), 1, loss=loss_of_image)
        trainer.step([image(0)])
    assert len(set(world.allgather(str(refused.value)))) == 1


@pytest.mark.ranks(2)
def test_other_refusals(world):
    torch.manual_seed(0)
    grid = ht.Grid(pipeline=2)
    for options, text in (
        ({}, "and the model has 'features', 'classifier'; name it by pipeline='path'"),
        ({"pipeline": "pool"}, "pipeline must be the path of a ModuleList or Sequential of blocks, got 'pool'"),
        ({"zero": 1, "pipeline": "features"}, "give the ht.Trainer a strategy, as ht.data_parallel.Zero1"),
        ({"pipeline": "features", "layers_per_stage": [1, 2]}, "12"),
    ):
        with pytest.raises(ValueError, match=text):
            ht.parallelize(Images(), grid, **options)
    model = ht.parallelize(Images().double(), grid, pipeline="features", layers_per_stage=[5, 7])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="the model is cut into pipeline stages, which no rank can call as a whole"):
        model(image(0)[0])
    with pytest.raises(ValueError, match="give the Trainer loss=, a function"):
        ht.Trainer(model, grid, optimizer)
    trainer = ht.Trainer(model, grid, optimizer, loss=loss_of_image)
    with pytest.raises(ValueError, match="rank 1 of the pipeline axis has other microbatches than rank 0"):
        trainer.step([image(world.rank)])
