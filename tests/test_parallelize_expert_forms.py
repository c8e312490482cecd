"""Experts divided by hidden features, of whatever form: recognised by what they compute, and only those."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from parallelize_checks import CLOSE, check_gradients, compare, numbers, part_of, tensor_grids
from torch import nn

import hpctrain as ht
from hpctrain.convert.experts import SplitExperts, SplitStack
from hpctrain.shard import split_sizes

pytestmark = pytest.mark.mpi

EXPERTS, WIDTH, HIDDEN = 3, 4, 5
MODELS = "gpt_oss llama4_text aria_text jetmoe hy_v4 nemotron_h".split()


class Sorted(nn.Module):
    """Experts of as many tokens each, one after the other, that keep their matrices in any form."""

    def __init__(self, act, transposed=False, fused=1, biased=False, out=WIDTH):
        super().__init__()
        shapes = (EXPERTS, fused * HIDDEN, WIDTH), (EXPERTS, out, HIDDEN)
        up, down = (nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.up, self.down = (nn.Parameter(x.mT.contiguous()) if transposed else x for x in (up, down))
        self.transposed, self.act = transposed, act
        if biased:
            self.up_bias, self.down_bias = (nn.Parameter(torch.randn(shape[:2])) for shape in shapes)

    def forward(self, x):
        up, down = (w if self.transposed else w.mT for w in (self.up, self.down))
        x = x.view(EXPERTS, -1, WIDTH) @ up
        if hasattr(self, "up_bias"):
            return (self.act(x + self.up_bias[:, None]) @ down + self.down_bias[:, None]).flatten(0, 1)
        return (self.act(x) @ down).flatten(0, 1)


def halves(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def by_turns(x):
    return x[..., ::2].clamp(max=2.0) * (x[..., 1::2] + 1)


FORMS = {
    "one up": lambda: Sorted(F.gelu),
    "transposed": lambda: Sorted(F.relu, True),
    "gate and up": lambda: Sorted(halves, fused=2),
    "gate and up, transposed": lambda: Sorted(halves, True, 2),
    "by turns": lambda: Sorted(by_turns, True, 2),
    "biases": lambda: Sorted(by_turns, True, 2, True),
    "biases, not transposed": lambda: Sorted(halves, False, 2, True, out=6),
}
OTHERS = {
    "hidden features meet": lambda: Sorted(lambda x: x.softmax(-1), True),
    "hidden features are normed": lambda: Sorted(lambda x: F.layer_norm(x, x.shape[-1:])),
    "gates of other features": lambda: Sorted(lambda x: halves(x).flip(-1) * halves(x), fused=2),
    "always random": lambda: Sorted(lambda x: F.dropout(x, 0.5)),
    "random in training": lambda: Sorted(nn.Dropout(0.5)),
    "the input is added": lambda: Added(torch.tanh),
    "the last bias is read twice": lambda: BiasTwice(torch.relu, biased=True),
    "hidden features are kept": lambda: Keeping(F.gelu),
}


class Added(Sorted):
    def forward(self, x):
        return super().forward(x) + x


class BiasTwice(Sorted):
    def forward(self, x):
        return super().forward(x) * (1 + self.down_bias.mean())


class Keeping(Sorted):
    def forward(self, x):
        self.kept = x.view(EXPERTS, -1, WIDTH) @ self.up.mT
        return super().forward(x)


class Stack(nn.Module):
    """Of linear layers, which takes rows and how many of them are each layer's."""

    def __init__(self, transposed):
        super().__init__()
        self.stack = nn.Parameter(
            torch.randn(EXPERTS, WIDTH, HIDDEN) if transposed else torch.randn(EXPERTS, HIDDEN, WIDTH)
        )
        self.transposed = transposed

    def forward(self, rows, sizes):
        matrices = self.stack if self.transposed else self.stack.mT
        return torch.cat([x @ matrix for x, matrix in zip(rows.split(sizes), matrices)])


class StackOfCounts(Stack):
    """Which takes them as a tensor, as Aria's of older transformers."""

    def forward(self, rows, sizes):
        return super().forward(rows, sizes.tolist())


class Around(nn.Module):
    """So that `experts` are in a model."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, *sizes):
        return self.experts(x, *sizes)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("form", FORMS)
def test_forms(world, form):
    for grid in tensor_grids(world):
        model = compare(lambda: Around(FORMS[form]()), grid, [numbers(6, WIDTH)])
        assert isinstance(model.experts, SplitExperts)
        hidden = split_sizes(HIDDEN, world.size)[grid.tensor.rank]
        up = part_of(model.experts.up).shape
        assert hidden in (up[1:] if up[2] != WIDTH else up[1:2]) or 2 * hidden in up[1:]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", OTHERS)
def test_what_is_none_stays_whole(world, form):
    model = compare(lambda: Around(OTHERS[form]().eval()), ht.Grid(tensor=world.size), [numbers(6, WIDTH)])
    assert all(parameter.shard.replicated for parameter in model.parameters())


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("transposed", [False, True])
def test_stack(world, transposed):
    for grid in tensor_grids(world):
        run = lambda model, x: model(x, [2, 0, 4])  # noqa: E731
        model = compare(lambda: Around(Stack(transposed)), grid, [numbers(6, WIDTH)], run)
        assert isinstance(model.experts, SplitStack)
        assert part_of(model.experts.stack).shape[2 if transposed else 1] == model.experts.counts[grid.tensor.rank]


@pytest.mark.ranks(2)
def test_a_stack_that_takes_a_tensor_of_counts(world):
    run = lambda model, x: model(x, torch.tensor([2, 0, 4]))  # noqa: E731
    model = compare(lambda: Around(StackOfCounts(False)), ht.Grid(tensor=world.size), [numbers(6, WIDTH)], run)
    assert isinstance(model.experts, SplitStack)


@pytest.mark.ranks(2)
def test_experts_that_say_nothing_of_norms(world, zoo):
    """As those of older transformers, which have none."""
    pytest.importorskip("transformers")
    model, _ = zoo.models()["transformers/mixtral"]()
    for module in model.modules():
        vars(module).pop("has_post_expert_norm", None)
    assert zoo.share(ht.parallelize(model, ht.Grid(tensor=world.size))) > 0.9


@pytest.mark.ranks(2)
def test_a_hook_within(world):
    """Would be shown hidden features of this rank: the experts stay whole, and afterwards it is refused."""

    def make():
        experts = Sorted(nn.ReLU())
        experts.act.register_forward_hook(lambda module, arguments, y: seen.append(y.shape[-1]))
        return Around(experts)

    seen = []
    compare(make, ht.Grid(tensor=world.size), [numbers(6, WIDTH)])
    assert set(seen) == {HIDDEN}
    model = ht.parallelize(Around(Sorted(nn.ReLU())), ht.Grid(tensor=world.size))
    model.experts.act.register_forward_hook(lambda module, arguments, y: None)
    with pytest.raises(ValueError, match="a hook on a layer of experts, which ht.parallelize divided together"):
        model(torch.ones(6, WIDTH))


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return pytest.importorskip("zoo")


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", MODELS)
def test_models(world, zoo, name):
    """Two steps with clipping; the weights into a plain model, and those of a plain one back."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    serial, inputs = zoo.models()[f"transformers/{name}"]()
    serial = serial.double().train()
    with torch.no_grad():
        for parameter in serial.parameters():  # biases and sinks are zeros, routers have no opinions
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    grid = ht.Grid(tensor=world.size)
    model = ht.parallelize(copy.deepcopy(serial), grid)
    assert world.size == 1 or zoo.share(model) >= 0.8
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (serial, model)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with zoo.Doubles():
            logits = [m(**inputs).logits for m in (serial, model)]
            for each in logits:
                F.cross_entropy(each.flatten(0, 1), inputs["input_ids"].flatten()).backward()
        torch.testing.assert_close(logits[1], logits[0], **CLOSE)
        check_gradients(model, serial, grid)
        norms = [float(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)) for m in (serial, model)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-12)
        for optimizer in optimizers:
            optimizer.step()
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        torch.testing.assert_close(gathered, dict(serial.state_dict()), **CLOSE)
    model.load_state_dict(serial.state_dict())
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        for name, tensor in serial.state_dict().items():
            assert torch.equal(gathered[name], tensor), name
