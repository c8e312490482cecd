"""Units with a part exchanged: nothing is taken over that does more than what torch put there."""

import pytest
import torch
from parallelize_checks import compare, numbers, tensor_grids
from torch import nn

pytestmark = pytest.mark.mpi


class Adapted(nn.Module):
    """A layer with another beside it, as LoRA puts into the place of one."""

    def __init__(self, base, inner, outer):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(inner, 2), nn.Linear(2, outer)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Magnitude(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.norm(dim=1) + 0.3)


class Dora(nn.Module):
    """As peft's DoRA: it reads the whole weight and bias of the layer, and of those beside it the product."""

    def __init__(self, base):
        super().__init__()
        self.base, self.magnitude = base, Magnitude(base.weight.detach())
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        eye = torch.eye(self.down.weight.shape[1], dtype=self.down.weight.dtype)
        norm = torch.linalg.norm(self.base.weight + self.up(self.down(eye)).T.detach(), dim=1).detach()
        scale = (self.magnitude.weight / norm).view(1, -1)
        result = self.base(x)
        return result + (scale - 1) * (result - self.base.bias) + scale * self.up(self.down(x))


class Doubled(nn.Dropout):
    def forward(self, x):
        return 2 * super().forward(x)


EXCHANGED = {
    "activation of all features": lambda: {"activation": lambda x: x.softmax(-1)},
    "activation with a weight": lambda: {"activation": nn.PReLU()},
    "first": lambda: {"linear1": Adapted(nn.Linear(12, 17), 12, 17)},
    "second": lambda: {"linear2": Adapted(nn.Linear(17, 12), 17, 12)},
    "first, as by DoRA": lambda: {"linear1": Dora(nn.Linear(12, 17))},
    "both, as by DoRA": lambda: {"linear1": Dora(nn.Linear(12, 17)), "linear2": Dora(nn.Linear(17, 12))},
    "dropout": lambda: {"dropout": Doubled(0.2)},
    "no dropout": lambda: {"dropout": nn.Identity()},
}


@pytest.mark.parametrize("case", EXCHANGED)
def test_encoder_layer_with_a_part_exchanged(world, case):
    def make():
        layer = nn.TransformerEncoderLayer(12, 3, 17)
        for name, part in EXCHANGED[case]().items():
            setattr(layer, name, part)
        return layer

    for grid in tensor_grids(world):
        compare(make, grid, [numbers(5, 2, 12)])


def test_weights_computed_from_others(world):
    """They are left whole, be it by themselves."""

    def make():
        return nn.Sequential(nn.Linear(4, 5), nn.utils.spectral_norm(nn.Linear(5, 3)), nn.Linear(3, 2))

    for grid in tensor_grids(world):
        for replicate in ([], ["1"]):
            compare(make, grid, [numbers(2, 4)], replicate=replicate)
