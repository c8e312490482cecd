"""nn.TransformerEncoder on padded batches: torch leaves the padding out as a nested tensor, where it can."""

import copy

import pytest
import torch
from parallelize_checks import CLOSE, numbers, tensor_grids
from torch import nn

import hpctrain as ht

pytestmark = pytest.mark.mpi

LEFT = torch.arange(5) >= torch.tensor([[5], [2], [4]])  # True where there is no key
GAPS = LEFT.roll(1, 1)


def encoder(norm=None, **how):
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(12, 4, 17, batch_first=True, **how)
    return nn.TransformerEncoder(layer, 2, norm).double().eval()


def shifted():
    """A norm that makes ones of zeros."""
    norm = nn.LayerNorm(12)
    nn.init.ones_(norm.bias)
    return norm


CASES = {  # the model, its mask, and whether torch fills the padding's place with zeros
    "left aligned": (encoder, LEFT, True),
    "numbers": (encoder, torch.zeros(3, 5, dtype=torch.float64).masked_fill(LEFT, -torch.inf), True),
    "with a norm": (lambda: encoder(shifted()), LEFT, False),
    "gaps": (encoder, GAPS, False),
    "gelu": (lambda: encoder(activation="gelu"), LEFT, True),
    "norm first": (lambda: encoder(norm_first=True), LEFT, False),
    "training": (lambda: encoder(dropout=0.0).train(), LEFT, False),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("case", CASES)
def test_padded_batches(world, case):
    make, mask, zeros = CASES[case]
    for grid in tensor_grids(world):
        for replicate in ([], ["layers.*"], ["TransformerEncoder"]):
            serial = make()
            model = ht.parallelize(copy.deepcopy(serial), grid, replicate=replicate)
            x = numbers(3, 5, 12)
            for context in (torch.no_grad, torch.enable_grad):
                with context():
                    expected, got = (m(x, src_key_padding_mask=mask) for m in (serial, model))
                torch.testing.assert_close(got, expected, **CLOSE)
                is_zero = bool((expected[LEFT] == 0).all())
                assert is_zero == (zeros and context is torch.no_grad)
