"""torch's recurrent and parametrized layers, transposed convolutions, bilinear layers and bags: divided, and equal."""

import pytest
import torch
from parallelize_checks import compare, held_once, numbers, tensor_grids
from test_parallelize_refusals import on_every_rank
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization
from transformers.pytorch_utils import Conv1D

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4)]

IDS = torch.tensor([1, 0, 4, 4, 2, 6, 6])
BAGS = torch.tensor([0, 2, 2, 5])  # one is empty


def bag(mode, width=5, **how):
    return lambda: nn.EmbeddingBag(7, width, mode=mode, padding_idx=6, **how)


def in_bags(model, *scale):
    return model(IDS, BAGS, *scale)


def outputs(model, x, *state):
    y, last = model(x, *([tuple(state)] if len(state) > 1 else state))
    return (y, *last) if isinstance(last, tuple) else (y, last)


def channels_last(model, x):
    return model(x.to(memory_format=torch.channels_last))


CASES = {  # what: (module, shapes of its inputs, how it is called)
    "lstm": (lambda: nn.LSTM(5, 3, 2, dropout=0.3, bidirectional=True), [(4, 2, 5)], outputs),
    "lstm with projections": (lambda: nn.LSTM(5, 4, proj_size=2, batch_first=True), [(2, 4, 5)], outputs),
    "lstm with a state": (lambda: nn.LSTM(5, 3), [(4, 2, 5), (1, 2, 3), (1, 2, 3)], outputs),
    "gru": (lambda: nn.GRU(5, 1, 2, bias=False), [(4, 2, 5), (2, 2, 1)], outputs),
    "rnn": (lambda: nn.RNN(2, 3, nonlinearity="relu"), [(4, 2)], outputs),
    "lstm cell": (lambda: nn.LSTMCell(5, 3), [(2, 5), (2, 3), (2, 3)], lambda m, x, *state: m(x, state)),
    "gru cell": (lambda: nn.GRUCell(5, 1, bias=False), [(2, 5)], None),
    "weight norm": (lambda: weight_norm(nn.Conv1d(3, 5, 2, bias=False)), [(2, 3, 4)], None),
    "spectral norm": (lambda: spectral_norm(nn.Linear(3, 5, bias=False)), [(2, 3)], lambda m, x: m(x) + m(2 * x)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 5, 3, 2, 1, output_padding=1), [(2, 3, 4, 5)], None),
    "transposed to one channel": (lambda: nn.ConvTranspose1d(3, 1, 2, bias=False), [(2, 3, 4)], None),
    "transposed, of a size": (
        lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, dilation=2), [(2, 4)], lambda m, x: m(x, output_size=[12]),
    ),
    "transposed of groups": (lambda: nn.ConvTranspose3d(6, 9, 2, groups=3), [(2, 6, 2, 3, 2)], None),
    "bilinear": (lambda: nn.Bilinear(3, 2, 5), [(4, 2, 3), (4, 2, 2)], None),
    "bilinear of one": (lambda: nn.Bilinear(3, 2, 1, bias=False), [(4, 3), (4, 2)], None),
    "linear by name": (lambda: nn.Linear(3, 5), [(4, 3)], lambda m, x: m(input=x)),
    "convolution by name": (lambda: nn.Conv2d(3, 5, 2), [(2, 3, 4, 5)], lambda m, x: m(input=x)),
    "transposed by name": (lambda: nn.ConvTranspose1d(3, 4, 2), [(2, 3, 4)], lambda m, x: m(input=x)),
    "GPT-2's by name": (lambda: Conv1D(5, 3), [(4, 3)], lambda m, x: m(x=x)),
    "masks where channels lie last": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Dropout(), nn.Conv2d(6, 1, 2)), [(2, 4, 3, 4)],
        channels_last,
    ),
    "masks where those of the weights do": (
        lambda: nn.Sequential(nn.Conv2d(2, 5, 2), nn.Dropout()).to(memory_format=torch.channels_last),
        [(2, 2, 3, 4)], None,
    ),
    "masks of what is transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Dropout()), [(2, 2, 3, 4)], channels_last,
    ),
    "bag": (bag("mean"), [], in_bags),
    "bag of one feature": (bag("sum", 1), [], in_bags),
    "bag of the largest": (bag("max"), [], in_bags),
    "bag of one feature, the largest": (bag("max", 1), [], in_bags),
    "bag with weights": (bag("sum"), [(7,)], in_bags),
    "bag of rows": (lambda: nn.EmbeddingBag(7, 5), [], lambda m: m(IDS[:6].view(2, 3))),
    "bag with its end": (bag("sum", include_last_offset=True), [], in_bags),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_layers(world, case):
    make, shapes, run = CASES[case]
    inputs = [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    for grid in tensor_grids(world):
        held_once(compare(make, grid, inputs, run), grid)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.scale * x


def test_parametrized_scalars_stay_whole(world):
    for grid in tensor_grids(world):
        compare(lambda: register_parametrization(Scaled(), "scale", nn.Softplus()), grid, [numbers(2, 3)])


def test_several_calls(world):
    """Nothing is kept of the whole weights between them."""
    for grid in tensor_grids(world):
        model = compare(lambda: nn.LSTM(5, 3), grid, [numbers(4, 2, 5)], lambda m, x: (m(x)[0], m(2 * x)[0]))
        assert all(any(weight is p for p in model.parameters()) for weight in model._flat_weights)


@pytest.mark.ranks(2)
def test_weights_are_not_laid_out_for_cudnn(world, monkeypatch):
    """As on a GPU, of the sizes of the whole."""
    model, x = nn.LSTM(5, 3), numbers(4, 2, 5)
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda self: pytest.fail("of parts"))
    ht.parallelize(model, ht.Grid(tensor=2)).double()(x)
    model.flatten_parameters()


@pytest.mark.ranks(2)
def test_refused(world):
    text = r"itself \(EmbeddingBag\): max_norm is not supported"
    on_every_rank(world, lambda: nn.EmbeddingBag(4, 3, max_norm=1.0), text)
    model = ht.parallelize(nn.Sequential(nn.InstanceNorm1d(3, affine=True)), ht.Grid(tensor=world.size))
    assert all(parameter.shard.replicated for parameter in model.parameters())
