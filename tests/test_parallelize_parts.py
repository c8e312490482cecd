"""Code of one's own that meets the parts of weights and gradients: what it makes is of the whole, or is refused."""

import copy
import types

import pytest
import torch
from parallelize_checks import CLOSE, numbers
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


def mlp():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).double()


def both(world):
    return mlp(), ht.parallelize(mlp(), ht.Grid(tensor=world.size))


def loss(model, step=0):
    return model(numbers(4, 6, seed=step)).square().mean()


def check(serial, model, world):
    gathered = ht.gather_state_dict(model)
    if world.rank == 0:
        torch.testing.assert_close(gathered, dict(serial.state_dict()), **CLOSE)


def test_gradients_that_autograd_gives(world):
    """torch.autograd.grad: numbers of all of a gradient, and updates by parts."""
    found = []
    for model in (models := both(world)):
        weights = dict(model.named_parameters())
        gradients = torch.autograd.grad(loss(model), weights)
        found.append(torch.stack([g.norm() for g in gradients.values()]))
        with torch.no_grad():
            for name, p in weights.items():
                p -= 0.1 * gradients[name]
        for p, g in zip(weights.values(), torch.autograd.grad(loss(model), list(weights.values()))):
            p.grad = 2 * g.clone()
        found[-1] = found[-1] * nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        torch.optim.SGD(model.parameters(), 1.0).step()
    torch.testing.assert_close(found[1], found[0], **CLOSE)
    check(*models, world)


def test_gradients_of_gradients(world):
    """Penalties of gradients of weights, their products with vectors, and what is one step ahead."""
    found = []
    for model in (models := both(world)):
        weights = list(model.parameters())
        gradients = torch.autograd.grad(loss(model), weights, create_graph=True)
        vectors = [torch.arange(g.numel(), dtype=g.dtype).view(g.shape) for g in gradients]
        product = sum((g * v).sum() for g, v in zip(gradients, vectors))
        ahead = [p - 0.1 * g for p, g in zip(weights, gradients)]
        twice = torch.autograd.grad(product, weights, retain_graph=True)
        found.append(torch.stack([product, *(g.norm() for g in twice), *(p.norm() for p in ahead)]))
        (loss(model, 1) + product + sum(p.pow(3).sum() for p in ahead)).backward()
        torch.optim.SGD(weights, 0.01).step()
        model.zero_grad()
        loss(model, 2).backward(create_graph=True)
        sum(p.grad.square().sum() + p.grad.pow(3).mean() for p in weights).backward()
        torch.optim.SGD(weights, 0.01).step()
    torch.testing.assert_close(found[1], found[0], **CLOSE)
    check(*models, world)


class Recomputed(nn.Sequential):
    """A checkpoint that reads weights outside of their layers; the last parameter is of no use."""

    def __init__(self):
        super().__init__(*mlp())
        self.unused = nn.Linear(5, 3)

    def forward(self, x):
        return checkpoint(self.penalised, x, use_reentrant=False)

    def penalised(self, x):
        return self[2](torch.tanh(self[0](x))) * (self[0].weight.norm() + self[2].weight.square().sum())


class Adapted(nn.Module):
    """Frozen blocks, recomputed, with a low-rank sum beside them, as of LoRA."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 12), nn.Linear(12, 3)
        self.block = nn.Sequential(
            nn.TransformerEncoderLayer(12, 3, 24, dropout=0, batch_first=True), nn.Linear(12, 20), nn.GELU(),
            nn.Linear(20, 12), nn.LayerNorm(12), nn.Conv1d(5, 5, 1),
        )  # fmt: skip
        self.block.requires_grad_(False)
        self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 12, bias=False)

    def forward(self, x):
        x = self.enter(x)
        return self.leave(checkpoint(lambda h: self.block(h) + self.up(self.down(h)), x, use_reentrant=False))


@pytest.mark.parametrize("shards", [False, True])
def test_frozen_weights_of_a_checkpoint(world, shards):
    """torch compares what both forwards saved: of a weight that is frozen, the weight itself."""
    torch.manual_seed(0)
    serial, x = Adapted().double(), torch.randn(2, 5, 6, dtype=torch.float64)
    model = ht.parallelize(copy.deepcopy(serial), ht.Grid(tensor=world.size), shard_activations=shards)
    for each in (serial, model):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    check(serial, model, world)


def test_inputs_of_backward_and_grad(world):
    """Gradients of some weights alone, from a checkpoint, whose forward in backward sees whole weights as well."""
    models = Recomputed().double(), ht.parallelize(Recomputed().double(), ht.Grid(tensor=world.size))
    for model in models:
        loss(model).backward(inputs=[model[0].weight, model[2].bias])
        assert [name for name, p in model.named_parameters() if p.grad is not None] == ["0.weight", "2.bias"]
        torch.optim.SGD(model.parameters(), 0.1).step()
        weights = list(model.parameters())
        for p, g in zip(weights, torch.autograd.grad(loss(model, 1), weights, materialize_grads=True)):
            p.grad = g
        torch.optim.SGD(weights, 0.1, weight_decay=0.1).step()
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(loss(model), weights)
    check(*models, world)


class TrustRatio(torch.optim.Optimizer):
    """As people write it, under a name that nobody knows."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p.data)
            state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["v"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
            update = state["m"] / (state["v"].sqrt() + 1e-3)
            p.add_(update * (p.data.norm() / update.norm()), alpha=-0.1)


def norms(model):
    optimizer = TrustRatio(model.parameters(), {})
    for step in range(2):
        model.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    states = [value.norm() for value in copy.deepcopy(model.state_dict()).values()]
    return [*states, *(p.data.norm() + p.detach().abs().sum() + p.data.max() for p in model.parameters())]


def anchors(model):
    """A penalty of the distance to where training began, weighed by squares of gradients (Kirkpatrick et al., 2017)."""
    weights = dict(model.named_parameters())
    start = {name: p.data.clone() for name, p in weights.items()}
    fisher = {name: torch.zeros_like(p) for name, p in weights.items()}
    optimizer = torch.optim.SGD(weights.values(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        far = sum((fisher[name] * (p - start[name]) ** 2).sum() for name, p in weights.items())
        (loss(model, step) + 0.5 * far).backward()
        for name, p in weights.items():
            fisher[name] += p.grad**2
        optimizer.step()
    return []


def projected(model):
    """One gradient less its part along another (Yu et al., 2020), by copies of gradients."""
    found = []
    for step in range(2):
        model.zero_grad()
        loss(model, step).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    along = sum((a * b).sum() for a, b in zip(*found)) / sum((b * b).sum() for b in found[1])
    for p, a, b in zip(model.parameters(), *found):
        p.grad = a - along * b
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.optim.SGD(model.parameters(), 1.0).step()
    return [along, norm, torch.tensor(float(torch.equal(*found[0][:1] * 2)))]


def noise(model):
    loss(model).backward()
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.1)
        p.grad.add_(torch.empty_like(p.grad).uniform_(-1, 1))
        p.data += 0.1 * p.data.new(p.data.size()).normal_()
    torch.optim.SGD(model.parameters(), 0.1).step()
    nn.init.trunc_normal_(model[0].weight.data, std=0.1)
    nn.init.kaiming_uniform_(model[2].weight)
    return [torch.rand(1)]


def written(model):
    """Rows that are frozen, and masks of the whole shape."""
    loss(model).backward()
    mask = torch.ones(model[0].weight.shape, dtype=torch.float64)
    mask[:, 1] = 0.0
    for p in model.parameters():
        p.grad[:2] = 0.0
        p.data[1] = 0.5
    model[0].weight.grad *= mask
    model[0].weight.data.mul_(mask)
    torch.optim.SGD(model.parameters(), 0.1).step()
    return []


CASES = (norms, anchors, projected, noise, written)


@pytest.mark.parametrize("code", CASES, ids=lambda code: code.__name__)
def test_code_of_ones_own(world, code):
    found = []
    for model in (models := both(world)):
        torch.manual_seed(5)
        found.append(code(model))
    torch.testing.assert_close(found[1], found[0], **CLOSE)
    check(*models, world)


REFUSED = {
    "mean of the weight": lambda w: w.data.mean(),
    "norm of the weight": lambda w: w.data.norm(dim=1),
    "__getitem__ of the weight": lambda w: w.detach()[7],
    "kthvalue of the weight": lambda w: w.data.abs().flatten().kthvalue(5),
    "unbind of the gradient": lambda w: [row.norm() for row in w.grad],
    "chunk of the gradient": lambda w: w.grad.chunk(2),
    "item of the gradient": lambda w: w.grad.item(),
    "a whole of the gradient": lambda w: w.grad.T + torch.ones(6, 9),
    "shape of a part": lambda w: nn.init.xavier_uniform_(w.data),
    "unique of the weight": lambda w: torch.unique(w.data, return_counts=True),
    "cummax of the gradient": lambda w: w.grad.cummax(0),
    "__contains__ of the weight": lambda w: 0.5 in w.data,
    "numel of several gradients": lambda w: torch.cat([w.grad.flatten(), w.grad.flatten()]).numel(),
    "a whole of the weight": lambda w: w.data.flatten().nonzero(as_tuple=True),
    "a whole of the gradient of '0.weight'": lambda w: (w.grad.flatten() * w.grad.t().flatten()).sum(),
    "numpy of the weight": lambda w: types.FunctionType(
        (lambda x: x.detach().cpu().numpy()).__code__, {"__name__": "torch.utils.tensorboard._convert_np"}
    )(w),
    "is_grads_batched": lambda w: torch.autograd.grad(
        (w * w).sum(), w, torch.ones(2, dtype=w.dtype), is_grads_batched=True
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(world, text):
    """On all ranks, and by name."""
    _, model = both(world)
    loss(model).backward()
    with pytest.raises(ValueError, match=text):
        REFUSED[text](model[0].weight)


@pytest.mark.ranks(2)
def test_a_transposed_part_that_is_square(world):
    """Has the shape of the part, and not its elements; a view that was taken back has them."""
    model = ht.parallelize(nn.Linear(2, 4), ht.Grid(tensor=2))
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    gradient = model.weight.grad
    with pytest.raises(ValueError, match="a whole of the gradient"):
        gradient.T + torch.ones(2, 4)
    assert (gradient.view(-1).view(2, 2) + torch.ones(4, 2)).shape == (4, 2)
    torch.testing.assert_close((gradient.T * gradient.T).sum(), gradient.norm() ** 2)


@pytest.mark.ranks(2)
def test_weights_divided_in_two_ways(world):
    """Parts of one shape, of other rows of the whole."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=8, vocab_size=11)
    torch.manual_seed(3)
    plain = [transformers.GPT2LMHeadModel(config).double() for _ in range(2)]
    how = [{}, {"replicate": ["*.attn.c_proj"]}]
    models = [ht.parallelize(copy.deepcopy(m), ht.Grid(tensor=2), **options) for m, options in zip(plain, how)]
    path = "transformer.h.0.attn.c_attn.weight"
    ours, theirs = (m.get_parameter(path) for m in models)
    assert ours.sharding.local_shape == theirs.sharding.local_shape
    assert ours.sharding.counts != theirs.sharding.counts
    with pytest.raises(ValueError, match="is divided over ranks in another way"), torch.no_grad():
        torch._foreach_lerp_([ours], [theirs], 0.5)
    found = []
    for mean, p in ([m.get_parameter(path) for m in plain], (ours, theirs)):
        with torch.no_grad():
            far = (mean - p).norm() + (mean.data * p.data).sum()
            mean.lerp_(p, 0.25)
            p.data = mean.data
        found += [far + 0 * mean.norm(), (mean + 0).detach(), (p + 0).detach()]
    for got, expected in zip(found[3:], found[:3]):
        torch.testing.assert_close(got.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor), **CLOSE)


def test_a_forward_that_is_replaced_afterwards(world):
    """Of a layer between others whose activations would stay divided."""
    outputs = []
    for model in both(world):
        before = model[0].forward
        model[0].forward = lambda x, before=before: 2 * before(x)
        outputs.append(model(numbers(4, 6)).detach())
    torch.testing.assert_close(outputs[1], outputs[0], **CLOSE)


def test_torch_func_and_jit(world):
    _, model = both(world)
    with pytest.raises(ValueError, match="within torch.func"):
        torch.func.vmap(model)(numbers(2, 4, 6))
    with pytest.raises(ValueError, match="compiled by torch.jit"):
        ht.parallelize(torch.jit.script(mlp()), ht.Grid(tensor=world.size))
    for export in (torch.export.export, torch.jit.trace):
        with pytest.raises(ValueError, match=r"one rank has; export the model as it was .* ht.gather_state_dict"):
            export(model, (numbers(4, 6),))
    replicas = ht.parallelize(mlp(), ht.Grid(data=world.size), zero=0)
    with pytest.raises(ValueError, match="within torch.func"):
        torch.func.vmap(replicas)(numbers(2, 4, 6))
    other = copy.deepcopy({name: 2 * p.detach() for name, p in mlp().named_parameters()})
    got = torch.func.functional_call(replicas, other, (numbers(4, 6),))
    torch.testing.assert_close(got, torch.func.functional_call(mlp(), other, (numbers(4, 6),)), **CLOSE)


class Watched(torch.overrides.TorchFunctionMode):
    """As torch.set_default_device puts one between a call and what handles it."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


def test_optimizer_of_ones_own_in_a_checkpoint(world, tmp_path):
    """Its states are parts, which checkpoints take apart as they do those of torch's."""
    tmp_path = world.bcast(tmp_path)
    states = []
    for grid in (ht.Grid(tensor=world.size), ht.Grid(data=world.size)):
        model = ht.parallelize(mlp(), grid)
        optimizer = TrustRatio(model.parameters(), {})
        with Watched():
            trainer = ht.Trainer(model, grid, optimizer, loss=lambda m, _, grid=grid: loss(m) / grid.data.size)
            if states:
                assert ht.checkpoint.load(tmp_path, model, trainer.strategy).step == 1
            trainer.step([None])
        ht.checkpoint.save(tmp_path, 1 + len(states), model, trainer.strategy)
        states.append(type(optimizer.state[model[0].weight]["m"]).__name__)
    assert states[0] == "PartialGradient"
