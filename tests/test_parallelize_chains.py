"""Pairs of linear layers in nn.Sequential: nothing is made whole between them, unless somebody looks."""

import pytest
import torch
from parallelize_checks import compare, held_once, numbers, tensor_grids
from torch import nn

import hpctrain as ht
from hpctrain.convert.chains import Chained

pytestmark = pytest.mark.mpi

CHAINS = {
    "pair": lambda: nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.2), nn.GELU(), nn.Linear(9, 3)),
    "two pairs": lambda: nn.Sequential(
        nn.LayerNorm(5), nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 5, bias=False), nn.Tanh(),
        nn.Linear(5, 6), nn.Linear(6, 6),
    ),
    "interrupted": lambda: nn.Sequential(nn.Linear(5, 9), nn.Softmax(-1), nn.Linear(9, 4), nn.LayerNorm(4)),
    "narrow": lambda: nn.Sequential(nn.Linear(5, 2), nn.ReLU(), nn.Linear(2, 5)),
    "wide": lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 20)),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(5, 7), nn.SiLU(), nn.Linear(7, 7)), nn.ReLU(), nn.Linear(7, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHAINS)
def test_chain(world, case):
    for grid in tensor_grids(world):
        held_once(compare(CHAINS[case], grid, [numbers(2, 3, 5)]), grid)


def test_bytes(world):
    """A pair sums its output forward and the gradient of its input backward; what lies between is never sent."""
    grid = ht.Grid(tensor=world.size)
    torch.manual_seed(0)
    model = ht.parallelize(nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 8)), grid)
    x = torch.ones(16, 4, requires_grad=True)
    grid.transport.traffic.clear()
    model(x).sum().backward()
    sums = [2 * (world.size - 1) * 16 * features * 4 // world.size for features in (4, 8)]
    assert grid.transport.traffic.total("sent") == sum(sums)


@pytest.mark.ranks(2, 3, 4)
def test_the_fewest_bytes(world):
    """Layers are a pair where that receives less than each of them alone."""
    grid = ht.Grid(tensor=world.size)

    def sent(into, hidden, out, pair):
        torch.manual_seed(0)
        layers = nn.Linear(into, hidden), nn.ReLU(), nn.Linear(hidden, out)
        chain = nn.Sequential(*layers) if pair else nn.Sequential(layers[0], nn.Identity(), nn.Sequential(*layers[1:]))
        model = ht.parallelize(chain, grid, check_steps=0)
        x = torch.ones(12, into, requires_grad=True)
        grid.transport.traffic.clear()
        model(x).sum().backward()
        return isinstance(model, Chained), grid.transport.traffic.total("sent")

    for sizes in ((12, 36, 36), (12, 24, 36), (24, 12, 24), (36, 12, 12), (12, 12, 12), (12, 24, 84), (36, 12, 24)):
        pair, of_pair = sent(*sizes, pair=True)
        _, of_layers = sent(*sizes, pair=False)
        assert (of_pair < of_layers) == pair
        into, hidden, out = sizes
        as_pair = 2 * (world.size - 1) * 12 * (into + out) * 4 // world.size
        assert (as_pair < of_layers) == pair


def test_modules_one_by_one(world):
    """Called by themselves, sliced out or watched by a hook, the modules take and return whole activations."""
    seen = []

    def run(model, x):
        y = model(x)
        handle = model[1].register_forward_hook(lambda module, args, output: seen.append(output))
        z = model(x)
        handle.remove()
        one_by_one = model[2](model[1](model[0](x)))
        model.insert(1, nn.Identity())
        changed = model(x)
        del model[1]
        return y, z, seen.pop(), one_by_one, model[:2](x), changed

    for grid in tensor_grids(world):
        compare(lambda: nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)), grid, [numbers(4, 5)], run)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("register", ["forward", "full_backward_pre"])
def test_hooks_on_all_modules(world, register):
    model = ht.parallelize(nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)), ht.Grid(tensor=2))
    hook = getattr(nn.modules.module, f"register_module_{register}_hook")(lambda *given: None)
    try:
        with pytest.raises(ValueError, match="on all modules would be shown parts of the activations"):
            model(torch.ones(2, 5))
    finally:
        hook.remove()


def test_shared_layer(world):
    def make():
        layer = nn.Linear(6, 6)
        return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(6, 8), nn.Linear(8, 2))

    for grid in tensor_grids(world):
        compare(make, grid, [numbers(4, 6)])


class OlderFiles(nn.Sequential):
    """As torchvision's MLPBlock, whose layers had other names once."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
        if local_metadata.get("version", 1) < 2:
            for place, name in (("0", "up"), ("2", "down")):
                state_dict[f"{prefix}{place}.weight"] = state_dict.pop(f"{prefix}{name}.weight")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


def test_a_sequence_that_reads_older_files(world):
    """Is divided as any other, and reads them."""
    grid = ht.Grid(tensor=world.size)
    layers = [nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)]
    model = ht.parallelize(OlderFiles(*layers).double(), grid)
    assert isinstance(model, Chained)
    assert model.divided
    up, down = numbers(8, 4, seed=1), numbers(4, 8, seed=2)
    model.load_state_dict({"up.weight": up, "down.weight": down})
    torch.testing.assert_close(model(numbers(3, 4)), (numbers(3, 4) @ up.t()).tanh() @ down.t())
