"""ht.parallelize(shard_activations=True): a residual stream of which every rank has some rows."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from parallelize_checks import CLOSE, boxes, check_gradients, compare, held_once, numbers
from test_parallelize_transformers import IDS, PADDING, gpt2, llama, transformers
from torch import nn

import hpctrain as ht
from hpctrain.convert.box import BoxDown
from hpctrain.convert.sharded_activation import ShardedActivation

pytestmark = pytest.mark.mpi
SHARDED = {"shard_activations": True}
BOXES = {2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 4: [(4, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)]}


class MLP(nn.Module):
    def __init__(self, width=8, hidden=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class RootMeanSquare(nn.Module):
    """A norm of nobody's."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, width))

    def forward(self, states):
        return self.scale * states * (states.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Mixing(RootMeanSquare):
    def forward(self, states):
        return self.scale * states / (1 + states.square().mean())


class Block(nn.Module):
    def __init__(self, norm=nn.LayerNorm, width=8):
        super().__init__()
        self.norm, self.mlp, self.drop = norm(width), MLP(width), nn.Dropout(0.25)
        self.gain = nn.Parameter(torch.linspace(0.5, 1, width))

    def forward(self, x):
        return x + self.gain * self.drop(self.mlp(self.norm(x)))


def bert():
    sizes = {"num_hidden_layers": 2, "hidden_size": 12, "intermediate_size": 18, "num_attention_heads": 3}
    return transformers.BertModel(transformers.BertConfig(vocab_size=19, **sizes), add_pooling_layer=False)


def mistral():
    sizes = {"num_hidden_layers": 2, "hidden_size": 12, "intermediate_size": 18, "num_attention_heads": 3}
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(vocab_size=19, num_key_value_heads=3, head_dim=4, **sizes)
    )


MODELS = {
    "gpt2": gpt2, "llama": llama, "bert": bert, "mistral": mistral,
    "llama of few heads": lambda: llama(num_attention_heads=1, num_key_value_heads=1, intermediate_size=3),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_hugging_face(world, case):
    def run(model, ids):
        out = model(ids, attention_mask=PADDING, output_hidden_states=True)
        assert not any(isinstance(x, ShardedActivation) for x in (*out.values(), *out.hidden_states))
        return out[0], *out.hidden_states

    for grid in boxes(world):
        model = compare(lambda: MODELS[case]().train(), grid, [IDS], run, **SHARDED)
        held_once(model, grid)
        assert case != "bert" or isinstance(model.encoder.layer[0].output.dense, BoxDown) == (grid.tensor.z.size > 1)


def test_learned_biases(world):
    """Ranks without heads take part in their gradients."""

    def t5():
        sizes = {"num_layers": 1, "num_heads": 1, "d_kv": 4, "d_model": 12, "d_ff": 18, "vocab_size": 19}
        return transformers.T5EncoderModel(transformers.T5Config(**sizes))

    for grid in boxes(world):
        compare(t5, grid, [IDS], lambda model, ids: model(ids)[0], **SHARDED)
        make = lambda: llama(num_attention_heads=1, num_key_value_heads=1)  # noqa: E731
        mask = numbers(2, 1, 11, 11, seed=8)
        compare(make, grid, [mask], lambda model, mask: model(IDS, attention_mask=mask)[0], **SHARDED)


@pytest.mark.parametrize("shape", [(2, 5, 8), (1, 8), (3, 1, 2, 8)])
@pytest.mark.parametrize("norm", [nn.LayerNorm, lambda width: nn.RMSNorm(width, eps=1e-6), RootMeanSquare, Mixing])
def test_blocks(world, norm, shape):
    """The stream stays divided; of fewer rows than ranks, and where nothing divides, too."""
    seen = []

    def run(model, x):
        hook = model[2].norm.register_forward_hook(lambda module, given, made: seen.append((given[0], made)))
        y = model(x)
        hook.remove()
        return y

    for grid in boxes(world):
        compare(lambda: nn.Sequential(*(Block(norm) for _ in range(3))), grid, [numbers(*shape)], run, **SHARDED)
        given, made = seen[-1]
        if grid.tensor.size > 1:
            assert isinstance(given, ShardedActivation)
            assert isinstance(made, ShardedActivation)
            assert (given._whole is None) == (norm is not Mixing)
        seen.clear()


@pytest.mark.ranks(2, 4)
def test_boxes(world):
    """Of GPT-2 and Llama, and of blocks with two matrices in one: odd sizes, fewer features than ranks, one token."""
    for box in BOXES[world.size]:
        grid = ht.Grid(tensor=box)
        heads = {"hidden_size": 20, "num_attention_heads": 10, "num_key_value_heads": 5}
        for make in (lambda: gpt2(n_head=6, n_inner=7), lambda heads=heads: llama(intermediate_size=13, **heads)):
            held_once(compare(make, grid, [IDS], lambda model, ids: model(ids).logits, **SHARDED), grid)
        for shape, hidden in {(2, 5, 8): 9, (1, 1, 8): 8, (3, 8): 11}.items():
            make = lambda hidden=hidden: nn.Sequential(Gated(hidden), nn.LayerNorm(8), Gated(hidden))  # noqa: E731
            model = compare(make, grid, [numbers(*shape)], with_penalty, **SHARDED)
            assert isinstance(model[0].down, BoxDown) == (box[0] < world.size)
            make = lambda: nn.TransformerEncoderLayer(8, 2, hidden, 0.25, batch_first=len(shape) > 2)  # noqa: B023, E731
            layer = compare(make, grid, [numbers(*shape)], **SHARDED)
            assert isinstance(layer.linear2, BoxDown) == (box[0] < world.size)
            with torch.inference_mode():
                expected = model(numbers(*shape))
            torch.testing.assert_close(copy.deepcopy(model)(numbers(*shape)), expected, **CLOSE)


def with_penalty(model, x):
    """Of weights that are read outside of their block."""
    return model(x) + sum(weight.sin().cumsum(0).sum() for weight in (model[0].both.weight, model[2].down.weight))


class Gated(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.both, self.down = nn.Linear(8, 2 * hidden), nn.Linear(hidden, 8, bias=False)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Centred(MLP):
    """Each hidden feature by itself, and all tokens together."""

    def forward(self, x):
        h = self.up(x)
        return self.down(F.relu(h - h.mean(0, keepdim=True)))


class Shaped(MLP):
    """Asks for the shape of the whole."""

    def forward(self, x):
        return self.down(F.relu(self.up(x)).view(*x.shape[:-1], -1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [Centred, Shaped])
def test_blocks_of_several_tokens(world, kind):
    """They stay in one line on a box."""
    for box in BOXES[world.size]:
        compare(
            lambda: nn.Sequential(kind(), nn.LayerNorm(8), kind()), ht.Grid(tensor=box), [numbers(4, 3, 8)], **SHARDED
        )


class Curious(nn.Module):
    """Code that looks at what a block gives, and changes it."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.norm, self.how = MLP(), MLP(), nn.LayerNorm(8), how
        self.table = nn.Parameter(numbers(5, 8))
        self.kept = nn.Parameter(numbers(1, 1, 8))

    def forward(self, x):
        return self.how(self, self.norm(x + self.first(x)))


def in_place(self, h):
    h = h.clone()
    before = self.second(h.clone())
    h += before
    h[:, 0] = 1.5
    h.flatten(0, 1)[1:3].mul_(2)
    return h + self.second(h)


def without_gradient(self, h):
    with torch.no_grad():
        scale = h.abs().mean()
    return self.second(h / scale).sum(1) + h[:, -1] + h[:, 0].detach()


def hooked(self, h):
    h.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1).cumsum(0))
    return self.second(h)


def shapes(self, h):
    assert (h.shape, h.size(), h.dim(), h.ndim, len(h), h.numel()) == ((2, 5, 8), (2, 5, 8), 3, 3, 2, 80)
    if isinstance(h, ShardedActivation):
        assert h.view(2, -1, 8) is h.reshape(h.shape) is h.contiguous() is h[:, 0:] is h
    assert ([each.shape for each in h], h.mT.shape, h.stride()) == ([(5, 8)] * 2, (2, 8, 5), (40, 8, 1))
    return self.second(2 - h.view(-1, 8)).view(5, 2, 8) + torch.cat([h, -h])[1:3].mT.reshape(5, 2, 8)


def sums(self, h):
    other = self.second(h)
    masked = h * torch.tensor([[1.0], [0], [1], [1], [0]]).expand(2, 5, 1) + self.table
    with torch.no_grad():
        fixed = self.second.down.weight[:, 0] * h + h * self.second.down.weight[:, 1]
    weighted = self.norm.weight * h - h * self.norm.bias + fixed
    return 1 - (masked * self.kept - other / 3) + 2 * (h - self.kept.view(8)).double() + sum([weighted, other])


def dropped(self, h):
    h = F.dropout(self.second(h), 0.5, self.training) + h
    return F.dropout(h, 0.25, self.training, inplace=True) + torch.dropout(h, 0.3, True)


HOW = {how.__name__: how for how in (in_place, without_gradient, hooked, shapes, sums, dropped)}


@pytest.mark.parametrize("how", HOW)
def test_code_that_looks(world, how):
    for grid in boxes(world):
        compare(lambda: Curious(HOW[how]), grid, [numbers(2, 5, 8)], **SHARDED)


@pytest.mark.ranks(2)
def test_refused(world):
    grid = ht.Grid(tensor=2)
    for what, forbidden in {
        "retain_grad": lambda self, h: h.retain_grad(),
        "__get__": lambda self, h: h.data.zero_(),
        "__set__": lambda self, h: setattr(h, "requires_grad", False),
    }.items():
        model = ht.parallelize(Curious(forbidden).double(), grid, **SHARDED)
        with pytest.raises(
            ValueError, match=f"line .* of .*{__name__}.py: {what} of an activation of which every rank"
        ):
            model(numbers(2, 5, 8))
    model = ht.parallelize(Curious(lambda self, h: (h, self.second(h))).double(), grid, **SHARDED)
    for given in model(numbers(2, 5, 8)):
        with pytest.raises(ValueError, match=f"line .* of .*{__name__}.py: retain_grad, for a tensor of which"):
            given.retain_grad()
    with pytest.raises(ValueError, match="shard_activations must be True or False, got 1"):
        ht.parallelize(MLP(), grid, shard_activations=1)


@pytest.mark.ranks(2)
def test_what_a_model_returns(world):
    """A tensor like any other: alone it keeps its gradient, and without one it is saved."""
    grid = ht.Grid(tensor=2)
    alone = ht.parallelize(MLP().double(), grid, **SHARDED)(numbers(2, 5, 8))
    alone.retain_grad()
    alone.square().sum().backward()
    torch.testing.assert_close(alone.grad, 2 * alone.detach(), **CLOSE)
    model = ht.parallelize(Curious(lambda self, h: (h, self.second(h))).double(), grid, **SHARDED)
    with torch.no_grad():
        made, saved = model(numbers(2, 5, 8)), io.BytesIO()
    torch.save(made, saved)
    saved.seek(0)
    torch.testing.assert_close(torch.load(saved, weights_only=True), made)


@pytest.mark.ranks(2, 4)
def test_checkpointing_generation_and_replicas(world):
    """Blocks that are computed once more; caches and single tokens; gradients that replicas average."""
    for box in BOXES[2][::2]:
        grid = ht.Grid(data=world.size // 2, tensor=box)
        torch.manual_seed(3)
        serial = llama().double()
        model = ht.parallelize(copy.deepcopy(serial), grid, zero=0, **SHARDED)
        for each in (serial, model):
            each.gradient_checkpointing_enable({"use_reentrant": False})
            each.train()
            each(IDS, labels=IDS).loss.backward()
        check_gradients(model, serial, grid)
        written = [m.eval().generate(IDS[:, :4], max_new_tokens=3, do_sample=False) for m in (serial, model)]
        assert torch.equal(*written)


@pytest.mark.ranks(2, 4)
def test_checkpoints_that_know_of_no_parts(world):
    torch.manual_seed(3)
    for grid in boxes(world):
        model = ht.parallelize(llama(num_hidden_layers=1).double(), grid, **SHARDED).train()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        with pytest.raises(ValueError, match=r"\(use_reentrant=True\) cannot give back activations .*; use use_re"):
            model(IDS, labels=IDS)
        with torch.no_grad():
            model.eval()(IDS, labels=IDS)


class DroppedRows(nn.Module):
    """A norm of one's own, that drops features of tokens in training."""

    def __init__(self):
        super().__init__()
        self.gamma, self.p = nn.Parameter(torch.rand(8)), 0.3

    def forward(self, x):
        return F.dropout(x, self.p, self.training) * self.gamma


class NoisyRows(DroppedRows):
    def forward(self, x):
        return (x + self.p * torch.randn_like(x) if self.training else x) * self.gamma


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("kind", "p"), [(DroppedRows, 0.3), (DroppedRows, 0.0), (NoisyRows, 0.3)])
def test_modules_that_drop_rows_in_training(world, kind, p):
    """Divided in evaluation, and trained: such a module is given all rows, whatever its p is at first."""

    def make():
        model = nn.Sequential(MLP(), kind(), MLP()).eval()
        model[1].p = p
        return model

    def run(model, x):
        model.train()
        model[1].p = 0.3
        return model(x)

    compare(make, ht.Grid(tensor=world.size), [numbers(2, 5, 8)], run, **SHARDED)
