"""What a GPT-2 begins with: the standard deviations of the paper's code, as Hugging Face's `_init_weights` has them."""

import math

import pytest
import torch

from hpctrain import Grid, RngKey
from hpctrain.models.gpt2 import GPT2, GPT2Shape

pytestmark = pytest.mark.mpi

LAYERS = 8
# of matrices; the projections onto the residual stream are smaller, as there are two to a layer
SMALL = 0.02 / math.sqrt(2 * LAYERS)
STD = {"wte": 0.02, "wpe": 0.02, "head": 0.02, "qkv": 0.02, "proj": SMALL, "up": 0.02, "down": SMALL}


@pytest.mark.parametrize("tied", [True, False])
def test_standard_deviations(tied):
    from mpi4py import MPI

    model = GPT2(Grid(comm=MPI.COMM_SELF), GPT2Shape(LAYERS, 64, 4, 64, 257, tied=tied), key=RngKey(1))
    kinds = set()
    for name, weight in model.named_parameters():
        module, kind = name.split(".")[-2:]
        if weight.dim() == 1:
            assert torch.equal(weight, torch.full_like(weight, float(module.startswith("ln") and kind == "weight")))
        else:
            kinds.add(module)
            assert weight.mean().abs().item() < 5 * STD[module] / math.sqrt(weight.numel()), name
            # the estimate's own deviation is 1/√(2n) of it
            assert weight.std().item() == pytest.approx(STD[module], rel=4 / math.sqrt(2 * weight.numel())), name
    assert kinds == set(STD) - ({"head"} if tied else set())
