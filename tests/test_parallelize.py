"""ht.parallelize on each kind of module, against the untouched module."""

import copy
import math

import pytest
import torch
from parallelize_checks import check_gradients, compare, held_once, numbers, part_of, tensor_grids
from torch import nn

import hpctrain as ht
from hpctrain.shard import split_sizes

pytestmark = pytest.mark.mpi

SINGLE = {
    "linear": (lambda: nn.Linear(5, 7), (3, 5)),
    "linear, wide input": (lambda: nn.Linear(9, 3), (2, 3, 9)),
    "linear, one feature": (lambda: nn.Linear(1, 1), (4, 1)),
    "linear without bias": (lambda: nn.Linear(6, 2, bias=False), (6,)),
    "layer norm": (lambda: nn.LayerNorm(6), (2, 3, 6)),
    "layer norm of two dims": (lambda: nn.LayerNorm((2, 5)), (3, 2, 5)),
    "layer norm without weights": (lambda: nn.Sequential(nn.LayerNorm(3, elementwise_affine=False)), (2, 3)),
    "rms norm": (lambda: nn.RMSNorm(5, eps=1e-5), (2, 3, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (2, 6, 3)),
    "prelu": (lambda: nn.PReLU(3), (2, 3, 4)),
    "conv1d": (lambda: nn.Conv1d(3, 5, 3, padding=1), (2, 3, 6)),
    "conv2d": (lambda: nn.Conv2d(3, 7, 3, stride=2, padding=1), (2, 3, 5, 6)),
    "conv2d, one sample": (lambda: nn.Conv2d(2, 3, 2, bias=False), (2, 5, 6)),
    "conv2d, circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (1, 2, 5, 6)),
    "conv2d, groups": (lambda: nn.Conv2d(6, 9, 3, groups=3), (2, 6, 4, 4)),
    "conv2d, depthwise": (lambda: nn.Conv2d(5, 5, 3, groups=5), (2, 5, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (1, 2, 3, 3, 3)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "batch norm of features": (lambda: nn.BatchNorm1d(5, affine=False), (4, 5)),
}


@pytest.mark.parametrize("case", SINGLE)
def test_module(world, case):
    make, shape = SINGLE[case]
    for grid in tensor_grids(world):
        model = compare(make, grid, [numbers(*shape)])
        held_once(model, grid)


@pytest.mark.parametrize(("rows", "width", "padding"), [(11, 4, None), (11, 4, 2), (3, 10, None), (3, 10, 1)])
def test_embedding(world, rows, width, padding):
    ids = torch.arange(24).view(2, 12) * 5 % rows
    for grid in tensor_grids(world):
        compare(lambda: nn.Embedding(rows, width, padding_idx=padding), grid, [ids])


@pytest.mark.parametrize("wrong", [-1, 6])
@pytest.mark.parametrize("width", [2, 9])
def test_embedding_refuses_an_index_outside(world, width, wrong):
    """On all ranks, whoever holds the row or the features."""
    for grid in tensor_grids(world):
        torch.manual_seed(0)
        model = ht.parallelize(nn.Embedding(6, width), grid)
        with pytest.raises(IndexError, match=f"of 6 rows got the index {wrong}; indices must be from 0 to 5"):
            model(torch.tensor([0, wrong, 3]))


def test_shared_weights_stay_shared(world):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(13, 6), nn.Linear(6, 13)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.table(ids).tanh())

    for grid in tensor_grids(world):
        model = compare(Tied, grid, [torch.arange(13)])
        assert model.head.weight is model.table.weight


def test_convolutional_network(world):
    def make():
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.3),
            nn.Conv2d(6, 5, 3, padding=1), nn.BatchNorm2d(5, momentum=None), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(20, 10),
        )  # fmt: skip

    for grid in tensor_grids(world):
        model = compare(make, grid, [numbers(4, 1, 8, 8)])
        compare(lambda: make().eval(), grid, [numbers(4, 1, 8, 8)])
        held_once(model, grid)


def test_activations_in_place(world):
    def make():
        return nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(inplace=True), nn.Linear(3, 4), nn.Sequential(nn.ReLU(True)))

    for grid in tensor_grids(world):
        compare(make, grid, [numbers(2, 1, 4, 4)])
    serial, grid = make().double(), ht.Grid(data=world.size)
    model = ht.parallelize(copy.deepcopy(serial), grid)
    for each in (serial, model):
        each(numbers(2, 1, 4, 4)).sum().div(1 if each is serial else world.size).backward()
    ht.sync_gradients(model)
    check_gradients(model, serial, grid)


def test_ranks_without_channels_go_through_backward(world):
    """Where the input needs no gradient too: all ranks take part in the collectives of the layers before."""

    def run(model):
        return model(numbers(2, 1, 6, 6))

    for frozen in ((), ("weight",), ("bias",), ("weight", "bias")):

        def make(frozen=frozen):
            model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Tanh(), nn.Conv2d(1, 2, 2), nn.Conv2d(2, 1, 2))
            for name in frozen:
                getattr(model[0], name).requires_grad_(False)
            return model

        for grid in tensor_grids(world):
            compare(make, grid, [], run)


def test_residual_and_reshape_code_of_the_user(world):
    """What the forward does between modules is not restricted in any way."""

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.tokens, self.channels = nn.LayerNorm(6), nn.Linear(4, 4), nn.Linear(6, 6)

        def forward(self, x):
            x = x + self.tokens(self.norm(x).mT).mT
            return (x + self.channels(self.norm(x))).reshape(-1, 8).softmax(-1)[::2]

    for grid in tensor_grids(world):
        compare(Mixer, grid, [numbers(2, 4, 6)])


MASKS = {
    "none": {},
    "causal": {"attn_mask": torch.full((5, 5), -math.inf, dtype=torch.float64).triu(1), "is_causal": True},
    "booleans": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(2)},
    "by head": {"attn_mask": numbers(6, 5, 5, seed=8)},
    "padding": {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
    "both": {
        "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1),
        "key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
    },
}


@pytest.mark.parametrize("mask", MASKS)
def test_self_attention(world, mask):
    for grid in tensor_grids(world):
        compare(
            lambda: nn.MultiheadAttention(12, 3, batch_first=True, dropout=0.2), grid, [numbers(2, 5, 12)],
            lambda model, x: model(x, x, x, **MASKS[mask]),
        )  # fmt: skip


@pytest.mark.parametrize("shape", [(5, 5), (6, 5, 5)])
@pytest.mark.parametrize("need_weights", [True, False])
def test_learned_masks(world, shape, need_weights):
    """A position bias, of all heads or by head, and numbers for padding: their gradients are of all heads."""

    def run(model, x, bias, padding):
        return model(x, x, x, attn_mask=bias, key_padding_mask=padding, need_weights=need_weights)

    for grid in tensor_grids(world):
        compare(
            lambda: nn.MultiheadAttention(12, 3, batch_first=True), grid,
            [numbers(2, 5, 12), numbers(*shape, seed=8), numbers(2, 5, seed=9)], run,
        )  # fmt: skip


@pytest.mark.parametrize("how", [{"need_weights": False}, {"average_attn_weights": False}])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_attention_weights(world, how, dropout):
    for grid in tensor_grids(world):
        compare(
            lambda: nn.MultiheadAttention(12, 3, dropout=dropout), grid, [numbers(5, 2, 12)],
            lambda model, x: model(x, x, x, **MASKS["both"], **how),
        )  # fmt: skip


def test_queries_that_attend_to_nothing(world):
    """Zeros, as in torch's fused attention, with dropout too."""
    padding = torch.tensor([[False] * 5, [True] * 5])
    for grid in tensor_grids(world):
        compare(
            lambda: nn.MultiheadAttention(12, 3, batch_first=True, dropout=0.2), grid, [numbers(2, 5, 12)],
            lambda model, x: model(x, x, x, key_padding_mask=padding, need_weights=False),
        )  # fmt: skip


def test_attention_of_other_widths(world):
    """Keys and values of their own widths and length, no bias; and one sequence without a batch."""
    for grid in tensor_grids(world):
        model = compare(
            lambda: nn.MultiheadAttention(8, 2, kdim=3, vdim=5, bias=False, batch_first=True), grid,
            [numbers(2, 4, 8), numbers(2, 6, 3), numbers(2, 6, 5)],
        )  # fmt: skip
        held_once(model, grid)
        compare(lambda: nn.MultiheadAttention(8, 2), grid, [numbers(4, 8), numbers(6, 8), numbers(6, 8)])


@pytest.mark.parametrize("how", [{}, {"norm_first": True, "activation": "gelu"}, {"bias": False, "dropout": 0.0}])
def test_encoder_layer(world, how):
    for grid in tensor_grids(world):
        model = compare(lambda: nn.TransformerEncoderLayer(12, 3, 17, **how), grid, [numbers(5, 2, 12)])
        held_once(model, grid)


def test_gradient_penalty(world):
    """Backward through backward."""

    def make():
        return nn.Sequential(
            nn.Conv1d(3, 2, 2), nn.Tanh(), nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 4)
        )

    def run(model, x):
        return torch.autograd.grad(model(x).square().sum(), x, create_graph=True)

    for grid in tensor_grids(world):
        compare(make, grid, [numbers(2, 3, 6)], run)


def test_learned_mask_of_an_encoder_layer(world):
    for grid in tensor_grids(world):
        compare(lambda: nn.TransformerEncoderLayer(12, 3, 17), grid, [numbers(5, 2, 12), numbers(6, 5, 5, seed=8)])


def test_encoder_in_evaluation(world):
    """torch's fused kernel, which would want whole weights, is kept away, padding mask and all."""
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def make():
        layer = nn.TransformerEncoderLayer(12, 4, 16, batch_first=True)
        return nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)

    def run(model, x):
        y = model(x, src_key_padding_mask=padding)
        return y.masked_fill(padding[:, :, None], 0)  # torch's kernel leaves zeros there

    for grid in tensor_grids(world):
        compare(make, grid, [numbers(2, 5, 12)], run)


def test_encoder_and_decoder(world):
    for grid in tensor_grids(world):
        compare(lambda: nn.Transformer(8, 2, 1, 1, 10, batch_first=True), grid, [numbers(2, 4, 8), numbers(2, 3, 8)])


def test_attention_is_divided(world):
    """Ranks work on their own heads: no rank sees the queries of all."""
    for grid in tensor_grids(world):
        torch.manual_seed(0)
        model = ht.parallelize(nn.MultiheadAttention(16, 8), grid)
        features = 2 * split_sizes(8, world.size)[grid.tensor.rank]
        assert part_of(model.in_proj_weight).shape == (3 * features, 16)
        assert part_of(model.out_proj.weight).shape == (16, features)


def test_one_exit_for_a_pair(world):
    """An encoder layer moves two sums of its activation forward, and two backward: no more than Megatron-LM."""
    grid = ht.Grid(tensor=world.size)
    torch.manual_seed(0)
    model = ht.parallelize(nn.TransformerEncoderLayer(8, 8, 32, dropout=0.0), grid)
    x = numbers(3, 2, 8).float().requires_grad_()
    grid.transport.traffic.clear()
    model(x).sum().backward()
    table = grid.transport.traffic.table()
    reduced = table.get(("x+y+z", "all_reduce"), {"sent": 0})["sent"]
    assert reduced == 4 * 2 * (world.size - 1) * x.nbytes // world.size


def test_kept_modules(world):
    """Modules in `replicate` stay whole, their gradients are the same everywhere, and they are counted once."""

    def make():
        return nn.Sequential(nn.Linear(6, 8), nn.GRU(8, 4), nn.Identity())

    def run(model, x):
        return model[1](model[0](x))[0]

    for grid in tensor_grids(world):
        for replicate in (["GRU"], ["1"], ["[1-9]"]):
            model = compare(make, grid, [numbers(5, 2, 6)], run, replicate)
            assert model[1].weight_ih_l0.shape == (12, 8)
        square = sum(float((p.grad**2).sum()) for p in model.parameters())  # of whole gradients
        assert float(ht.clip_grad_norm_(model, math.inf)) == pytest.approx(square**0.5, rel=1e-12)
