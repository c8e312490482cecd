"""Models built on the meta device: drawn slice by slice, the same on every grid, in the original's distributions."""

import math

import pytest
import torch
from parallelize_checks import tensor_grids
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hpctrain as ht

pytestmark = pytest.mark.mpi


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(500, 40, padding_idx=3)
        self.image = nn.Sequential(nn.Conv2d(16, 50, 3), nn.BatchNorm2d(50), nn.Conv2d(8, 8, 3, groups=4))
        self.layer = nn.TransformerEncoderLayer(48, 6, 100)
        self.other = nn.MultiheadAttention(40, 4, kdim=20, vdim=30)
        self.head, self.kept = nn.Linear(40, 500), nn.Linear(60, 70)
        self.head.weight = self.table.weight


def build(grid, make, **how):
    torch.manual_seed(7)
    with torch.device("meta"):
        model = make()
    model = ht.parallelize(model, grid, **how)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model


def gathered_on_all(model, grid):
    return grid.comm.bcast(ht.gather_state_dict(model))


def test_the_same_on_every_grid(world):
    alone = build(ht.Grid(comm=world.Split(world.rank)), Network, replicate=["kept"])
    expected = alone.state_dict()
    for grid in [*tensor_grids(world), ht.Grid(data=world.size)]:
        got = gathered_on_all(build(grid, Network, replicate=["kept"]), grid)
        assert list(got) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor.view(got[name].shape)), name


def test_distributions(world):
    """Mean, deviation and range of every weight are those of the module built by torch itself."""
    torch.manual_seed(1)
    expected = Network().state_dict()
    grid = tensor_grids(world)[-1]
    got = gathered_on_all(build(grid, Network, replicate=["kept"]), grid)
    check_distributions(got, expected)
    assert torch.equal(got["table.weight"][3], torch.zeros(40))
    assert not torch.equal(got["layer.linear1.weight"].flatten()[:100], got["kept.weight"].flatten()[:100])


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation makes, those on the meta device aside."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out.is_meta:
            self.numel = max(self.numel, out.numel())
        return out


def test_no_rank_makes_a_whole_weight(world):
    shape = 3072, 1024
    for grid in tensor_grids(world):
        with Largest() as largest:
            build(grid, lambda: nn.Sequential(nn.Linear(*shape), nn.Linear(*shape[::-1], bias=False)))
        part = -(-3072 // world.size) * 1024
        assert part <= largest.numel <= max(part, 2**20)  # numbers are drawn a million at a time


@pytest.mark.ranks(2)
def test_hugging_face_within(world):
    """Each model draws by the configuration of its own, and the rest as torch does."""
    transformers = pytest.importorskip("transformers")

    def make():
        gpt2 = transformers.GPT2Config(
            n_layer=2, n_embd=48, n_head=4, n_positions=32, vocab_size=211, initializer_range=0.1
        )
        opt = transformers.OPTConfig(
            num_hidden_layers=1, hidden_size=48, ffn_dim=64, num_attention_heads=4, vocab_size=211,
            max_position_embeddings=32, word_embed_proj_dim=48, init_std=0.1,
        )  # fmt: skip
        models = {"gpt2": transformers.GPT2Model(gpt2), "opt": transformers.OPTModel(opt)}
        return nn.ModuleDict({**models, "head": nn.Linear(48, 211)})

    torch.manual_seed(1)
    reference = make()
    grid = ht.Grid(tensor=2)
    check_distributions(gathered_on_all(build(grid, make), grid), reference.state_dict())


class Drawing(nn.Module):
    """Of one's own, whose method is nobody's to call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def _init_weights(self, module):
        pass


@pytest.mark.ranks(1)
def test_methods_of_the_name_of_hugging_faces(world):
    build(ht.Grid(tensor=world.size), lambda: nn.Sequential(Drawing()))
    with pytest.raises(ValueError, match="how a Drawing is initialised is not known"):
        build(ht.Grid(tensor=world.size), Drawing)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face(world, name):
    transformers = pytest.importorskip("transformers")

    def make():
        if name == "gpt2":
            config = transformers.GPT2Config(n_layer=3, n_embd=48, n_head=4, n_positions=32, vocab_size=211)
            return transformers.GPT2LMHeadModel(config)
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_hidden_layers=1, hidden_size=48, intermediate_size=80, num_attention_heads=6,
                num_key_value_heads=2, vocab_size=211, initializer_range=0.05,
            )
        )  # fmt: skip

    torch.manual_seed(1)
    reference = make()
    grid = tensor_grids(world)[-1]
    model = build(grid, make)
    got = gathered_on_all(model, grid)
    check_distributions(got, reference.state_dict())
    reference.load_state_dict(got)
    ids = torch.arange(20).view(2, 10)
    torch.testing.assert_close(model.eval()(ids).logits, reference.eval()(ids).logits, rtol=1e-4, atol=1e-5)


def check_distributions(got, expected):
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        mine, theirs = got[name].double(), tensor.double()
        assert mine.shape == theirs.shape
        if theirs.numel() < 2 or theirs.std() == 0:
            assert torch.equal(mine, theirs), name
            continue
        error = 5 / math.sqrt(theirs.numel())  # five standard deviations of a sample's mean
        assert abs(mine.mean() - theirs.mean()) < 1.5 * error * theirs.std(), name
        assert abs(mine.std() / theirs.std() - 1) < 1.5 * error, name
        assert abs(mine.abs().max() / theirs.abs().max() - 1) < 0.4, name
