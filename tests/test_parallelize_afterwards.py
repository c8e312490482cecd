"""What is done to a model after the line: the right thing, or an error that names module, line and remedy."""

import contextlib
import copy
import io
import os
import pickle

import pytest
import safetensors.torch
import torch
from parallelize_checks import CLOSE, compare, numbers, part_of, tensor_grids
from torch import nn
from torch.nn.utils import parametrizations, prune

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]

SOME = [numbers(2, 3, 4)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4)).double()


def replace(model):
    model[0].weight = nn.Parameter(torch.zeros(6, 4))


CHANGES = {
    "weight_norm": lambda m: parametrizations.weight_norm(m[0]),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m[0]),
    "orthogonal": lambda m: parametrizations.orthogonal(m[0]),
    "old weight_norm": lambda m: nn.utils.weight_norm(m[0]),
    "old spectral_norm": lambda m: nn.utils.spectral_norm(m[0]),
    "prune": lambda m: prune.l1_unstructured(m[0], "weight", 0.5),
    "replace": replace,
    "delete": lambda m: delattr(m[0], "weight"),
}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_changes_of_a_weight(world, case):
    model = ht.parallelize(network(), ht.Grid(tensor=world.size))
    text = r"^line \d+ of .*test_parallelize_afterwards\.py would .* the weight '0\.weight', which is divided .*; do it"
    with pytest.raises(ValueError, match=text + " before parallelize, and list its module in replicate") as error:
        CHANGES[case](model)
    assert len(set(world.allgather(str(error.value)))) == 1


@pytest.mark.parametrize("whole", [False, True])
def test_pruned_over_layers(world, whole):
    model = ht.parallelize(network(), ht.Grid(tensor=world.size), replicate=["*"] if whole else [])
    text = r"would be that of the part .* replicate=|would compute from 'weight_orig' the weight '0.weight'"
    with contextlib.nullcontext() if whole else pytest.raises(ValueError, match=text):
        prune.global_unstructured([(model[0], "weight"), (model[2], "weight")], prune.L1Unstructured, amount=0.5)


@pytest.mark.ranks(1, 2, 4)
def test_weights_shared_afterwards(world):
    """As `head.weight = table.weight`: where both are divided alike."""
    grid = ht.Grid(tensor=world.size)

    def make():
        torch.manual_seed(0)
        return nn.ModuleDict({"table": nn.Embedding(7, 4), "head": nn.Linear(4, 7)}).double()

    def tie(model):
        model["head"].weight = model["table"].weight
        return model

    serial, model = tie(make()), tie(ht.parallelize(make(), grid))
    assert model["head"].weight is model["table"].weight
    ids = torch.arange(7)
    for m in (serial, model):
        m["head"](m["table"](ids)).square().sum().backward()
        torch.optim.SGD(m.parameters(), 0.1).step()
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        torch.testing.assert_close(gathered, dict(serial.state_dict()), **CLOSE)


def test_state_dicts(world):
    """Whole ones, and those of the part, are taken back."""
    grid = ht.Grid(tensor=world.size)
    serial, model = network(), ht.parallelize(network(), grid)
    with torch.no_grad():
        for p in serial.parameters():
            p.add_(1.0)
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(serial.state_dict())
    torch.testing.assert_close(model(*SOME), serial(*SOME), **CLOSE)
    model.load_state_dict(kept)
    torch.testing.assert_close(model(*SOME), network()(*SOME), **CLOSE)
    model.float().double()
    assert type(model[0].weight).__name__ == ("ShardedParameter" if world.size > 1 else "ReplicatedParameter")
    torch.testing.assert_close(model(*SOME), network()(*SOME), rtol=1e-6, atol=1e-6)


FILES = {
    "torch.save": lambda state: torch.save(state, io.BytesIO()),
    "of copies": lambda state: torch.save({name: 0.5 * x.cpu().clone() for name, x in state.items()}, os.devnull),
    "pickle": pickle.dumps,
    "safetensors": lambda state: safetensors.torch.save(state),
}


@pytest.mark.parametrize("how", FILES)
def test_state_dicts_to_files(world, how):
    """They hold shards, which no file can name; on one rank they are whole."""
    model = ht.parallelize(network(), ht.Grid(tensor=world.size))
    if world.size == 1:
        FILES[how](model.state_dict())
        return
    with pytest.raises(
        ValueError, match=r"state_dict\(\) .* divided over ranks .*: save ht\.gather_state_dict\(model\)"
    ):
        FILES[how](model.state_dict())


@pytest.mark.parametrize("how", FILES)
@pytest.mark.parametrize("of", [lambda p: p.data, lambda p: 0.5 * p.detach()], ids=["data", "detach"])
def test_parts_to_files(world, how, of):
    """Which a script takes from the parameters themselves, as of a moving average."""
    model = ht.parallelize(network(), ht.Grid(tensor=world.size))
    parts = {name: of(parameter) for name, parameter in model.named_parameters()}
    if world.size == 1:
        FILES[how](parts)
        return
    with pytest.raises(ValueError, match=r"'0.weight' is divided over ranks .*: save ht\.gather_state_dict\(model\)"):
        FILES[how](parts)
    FILES[how]({name: part.as_subclass(torch.Tensor) for name, part in parts.items()})


@pytest.mark.parametrize(
    ("of", "whole"),
    [(lambda p: p, "gather_state_dict"), (lambda p: p.grad, "gather_gradients")],
    ids=["weights", "gradients"],
)
def test_files_by_address(world, of, whole):
    """safetensors reads as many elements as the whole has, which are not all there."""
    model = ht.parallelize(network(), ht.Grid(tensor=world.size))
    model(*SOME).sum().backward()
    tensors = {name: of(parameter) for name, parameter in model.named_parameters()}
    if world.size == 1:
        safetensors.torch.save(tensors)
        return
    with pytest.raises(ValueError, match=rf"'0.weight' is divided over ranks .*: save ht\.{whole}\(model\)"):
        safetensors.torch.save(tensors)


def test_pickled(world):
    model = ht.parallelize(nn.ModuleList([network()]), ht.Grid(tensor=world.size))
    with pytest.raises(ValueError, match=r"the module 0 is divided .*: save ht\.gather_state_dict\(model\)"):
        pickle.dumps(model[0])
    with pytest.raises(ValueError, match=r"save ht\.gather_state_dict\(model\)"):
        pickle.dumps(model)
    with pytest.raises(ValueError, match=r"grid.* cannot be pickled"):
        pickle.dumps(model.hpctrain_grid)


def test_a_layer_added_afterwards(world):
    grid = ht.Grid(tensor=world.size)
    model = ht.parallelize(network(), grid)
    model.append(nn.Linear(4, 2).double())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls = (
        lambda: ht.sync_gradients(model), lambda: ht.clip_grad_norm_(model, 1.0), lambda: ht.gather_state_dict(model),
        lambda: ht.Trainer(model, grid, optimizer),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match=r"'4\.weight' is of a layer that was added after .*add it before"):
            call()


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("path", ["self_attn.out_proj", "self_attn", "linear2"])
def test_parts_of_a_layer_that_stay_whole(world, path):
    for grid in tensor_grids(world):
        make = lambda: nn.TransformerEncoderLayer(6, 3, 8, batch_first=True)  # noqa: E731
        model = compare(make, grid, [numbers(2, 5, 6)], replicate=[path])
        whole = model.get_submodule(path)
        assert all(part_of(p).shape == p.whole_shape for p in whole.parameters())
        for name, p in model.named_parameters():
            if not name.startswith((path, "norm")):
                assert grid.tensor.comm.allreduce(part_of(p).numel()) == torch.Size(p.whole_shape).numel()


@pytest.mark.ranks(1, 2, 4)
def test_attention_alone_with_its_output_whole(world):
    """Unbatched, and with as few heads as to leave ranks without."""
    for heads in (1, 3):
        make = lambda heads=heads: nn.MultiheadAttention(6, heads)  # noqa: E731
        for grid in tensor_grids(world):
            run = lambda model, x: model(x, x, x)  # noqa: E731
            compare(make, grid, [numbers(5, 6)], run, replicate=["out_proj"])


def test_changes_of_a_module_that_is_whole(world):
    """It is as any other of torch's."""
    grid = ht.Grid(tensor=world.size)
    serial, model = network(), ht.parallelize(network(), grid, replicate=["0"])
    for m in (serial, model):
        parametrizations.weight_norm(m[0])
    torch.testing.assert_close(model(*SOME), serial(*SOME), **CLOSE)
