"""What parallelize refuses: one error, the same on every rank, before the model is changed."""

import re

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.zeros(4))


class LoRA(nn.Linear):
    """Has a forward of its own."""


def encoder(**changed):
    """An encoder layer with some of its layers exchanged."""
    layer = nn.TransformerEncoderLayer(4, 2, 6)
    for name, module in changed.items():
        layer.set_submodule(name.replace("__", "."), module)
    return layer


def network():
    return nn.Sequential(
        nn.Linear(4, 4), nn.LSTM(4, 4), nn.Sequential(nn.ReLU(), nn.Embedding(4, 3, max_norm=1.0)), Table(),
        nn.MultiheadAttention(4, 2, add_bias_kv=True), nn.Flatten(),
    )  # fmt: skip


class Twice(nn.Module):
    """One weight as the first matrix of a pair, and as the second."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.TransformerEncoderLayer(4, 2, 4) for _ in range(2))
        self.b.linear2.weight = self.a.linear1.weight


def on_every_rank(world, make, text, grid=None, **how):
    torch.manual_seed(0)
    model = make()
    before = dict(model.named_parameters())
    copies = {name: p.detach().clone() for name, p in before.items() if not p.is_meta and not is_lazy(p)}
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError) as refused:
        ht.parallelize(model, grid or ht.Grid(tensor=world.size), **how)
    assert re.search(text, str(refused.value)), str(refused.value)
    assert len(set(world.allgather(str(refused.value)))) == 1
    assert [type(module) for module in model.modules()] == kinds
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    for name, tensor in copies.items():
        assert torch.equal(before[name], tensor)


def test_every_offender_is_named(world):
    first, second = (
        r"2\.1 \(Embedding\): max_norm is not supported",
        r"4 \(MultiheadAttention\): add_bias_kv is not supp",
    )
    on_every_rank(world, network, rf"^parallelize cannot divide {first}; {second}orted\. List paths or types in repl")
    on_every_rank(world, network, rf"divide {second}orted\.", replicate=["1", "Embedding"])
    torch.manual_seed(0)
    ht.parallelize(network(), ht.Grid(tensor=world.size), replicate=["1", "2.*", "Table", "4"])


@pytest.mark.parametrize(
    ("make", "text", "how"),
    [
        (lambda: nn.Sequential(nn.Embedding(4, 3, max_norm=1.0)), r"0 \(Embedding\): max_norm", {}),
        (
            lambda: nn.Sequential(nn.MultiheadAttention(4, 2, add_zero_attn=True)),
            "0 .*: add_zero_attn is not supported",
            {},
        ),
        (
            lambda: nn.Sequential(nn.MultiheadAttention(4, 2, add_bias_kv=True)),
            "0 .*: add_bias_kv is not supported",
            {},
        ),
        (lambda: encoder(self_attn__out_proj=LoRA(4, 4)), r"self_attn \(Mu.*\): out_proj: its type is LoRA, not", {}),
        (
            lambda: encoder(self_attn__out_proj=nn.utils.weight_norm(nn.Linear(4, 4))),
            r"self_attn \(Mu.*\): out_proj: its weight is computed",
            {},
        ),
        (network, r"replicate: no module has the path or type 'LSMT'", {"replicate": ["LSMT"]}),
        (
            network,
            "replicate must list paths or names of types, as strings, got the type LSTM",
            {"replicate": [nn.LSTM]},
        ),
        (network, "list paths or names of types, as strings, got a Linear", {"replicate": [nn.Linear(2, 2)]}),
        (network, r"replicate must be a list of paths or types, got 'LSTM'; write \['LSTM'\]", {"replicate": "LSTM"}),
    ],
)
def test_refusals(world, make, text, how):
    on_every_rank(world, make, text, **how)


@pytest.mark.ranks(2, 4)
def test_weights_shared_in_a_way_that_cannot_be_divided(world):
    on_every_rank(
        world, Twice, r"divide b \(Tr.*'a\.linear1\.weight' is shared by modules that need it divided in diff"
    )


@pytest.mark.ranks(2, 4)
def test_weights_that_differ_between_ranks(world):
    def make():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if world.rank == world.size - 1:
            with torch.no_grad():
                model[1].bias += 1
        return model

    on_every_rank(world, make, rf"differs between ranks 0 and {world.size - 1}, first in '1\.bias'; call torch\.manual")

    def graph(other=world.rank == world.size - 1):
        model = nn.Linear(2, 2)
        model.register_buffer("edges", (torch.eye(3) * (1.0 + other)).to_sparse())
        return model

    on_every_rank(world, graph, rf"differs between ranks 0 and {world.size - 1}, first in 'edges'")
    assert ht.parallelize(graph(False), ht.Grid(tensor=world.size)).edges.is_sparse


@pytest.mark.ranks(2, 4)
def test_pipeline(world):
    grid = ht.Grid(pipeline=world.size)
    text = f"a pipeline of {world.size} stages cuts one ModuleList or Sequential of .* and the model has none; name it"
    on_every_rank(world, lambda: nn.Linear(2, 2), text, grid)


def test_twice(world):
    torch.manual_seed(0)
    grid = ht.Grid(tensor=world.size)
    model = ht.parallelize(nn.Linear(2, 2), grid)
    with pytest.raises(ValueError, match="already parallelized"):
        ht.parallelize(model, grid)


def test_models_that_parallelize_did_not_make(world):
    for call in (ht.sync_gradients, ht.gather_state_dict, lambda model: ht.clip_grad_norm_(model, 1.0)):
        with pytest.raises(ValueError, match="was not made by parallelize: pass its grid"):
            call(nn.Linear(2, 2))


def test_on_meta(world):
    """Nothing is left without values."""

    def make(model):
        def build():
            with torch.device("meta"):
                return model()

        return build

    on_every_rank(world, make(network), r"1\.weight_ih_l0 is on the meta device, and how a LSTM", replicate=["*"])
    on_every_rank(world, make(Table), "its buffer 'positions' on the meta device", replicate=["Table"])


def test_optimizers_that_mix_elements(world):
    torch.manual_seed(0)
    grid = ht.Grid(tensor=world.size)
    model = ht.parallelize(nn.Linear(2, 2), grid)
    with pytest.raises(ValueError, match="must treat every element of a weight by itself, got LBFGS"):
        ht.Trainer(model, grid, torch.optim.LBFGS(model.parameters()))
