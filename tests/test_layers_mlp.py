"""The MLP against torch's and Hugging Face's own, on every tensor grid of the ranks there are."""

import pytest
import torch
import torch.nn.functional as F
from layer_checks import DOUBLE, KEY, Layout, check, randomise, tensor_grids, whole

from hpctrain import Grid
from hpctrain.layers import MLP
from hpctrain.layers.gelu import gelu_tanh

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    ("activation", "hidden", "bias", "function"),
    [
        ("gelu_tanh", 10, True, lambda x: F.gelu(x, approximate="tanh")),
        ("gelu", 16, False, F.gelu),
        ("relu", 10, True, F.relu),
        ("relu", 2, False, F.relu),
        ("swiglu", 16, True, lambda x: F.silu(x[:, 0::2]) * x[:, 1::2]),
        ("swiglu", 3, True, lambda x: F.silu(x[:, 0::2]) * x[:, 1::2]),  # ranks without features
    ],
)
def test_mlp(world, activation, hidden, bias, function):
    for grid in tensor_grids(world):
        layout = Layout(grid, 3, 5)
        layer = randomise(MLP(grid, 7, hidden, activation, bias=bias, key=KEY, **DOUBLE))

        def serial(w, x):
            between = function(F.linear(x, w["up.weight"], w.get("up.bias")))
            return F.linear(between, w["down.weight"], w.get("down.bias"))

        check(layout, layer, serial, whole((15, 7), "x"), layout.residual, layout.residual)


@pytest.mark.ranks(1, 2)
def test_default_is_gpt_2_s(world):
    layer = MLP(Grid(tensor=world.size), 4, 8, key=KEY)
    assert layer.activation == "gelu_tanh"
    assert {name for name, _ in layer.named_parameters()} == {"up.weight", "up.bias", "down.weight", "down.bias"}


@pytest.mark.parametrize(
    ("width", "hidden", "bias", "sequences", "length"),
    [(6, 11, False, 3, 5), (8, 16, True, 2, 4), (2, 1, False, 1, 1)],  # one element: its columns already lie together
)
def test_swiglu_against_hugging_face(world, width, hidden, bias, sequences, length):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = LlamaConfig(hidden_size=width, intermediate_size=hidden, mlp_bias=bias, num_attention_heads=1)
    theirs = LlamaMLP(config).double()

    def serial(w, x):
        weights = {}
        for kind in ("weight", "bias") if bias else ("weight",):
            weights["gate_proj." + kind], weights["up_proj." + kind] = w["up." + kind][0::2], w["up." + kind][1::2]
            weights["down_proj." + kind] = w["down." + kind]
        return torch.func.functional_call(theirs, weights, x)

    for grid in tensor_grids(world):
        layout = Layout(grid, sequences, length)
        layer = randomise(MLP(grid, width, hidden, "swiglu", bias=bias, key=KEY, **DOUBLE))
        check(layout, layer, serial, whole((sequences * length, width), "x"), layout.residual, layout.residual)


@pytest.mark.ranks(1, 2)
def test_an_unknown_activation_is_refused(world):
    with pytest.raises(ValueError, match="activation must be one of gelu_tanh, gelu, relu, swiglu, got 'tanh'"):
        MLP(Grid(tensor=world.size), 4, 8, "tanh", key=KEY)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gelu_tanh_is_torch_s_far_out(dtype):
    """Where the cube of x is infinite in 32 bits; x itself is finite, and so is the gradient."""
    x = torch.tensor([sign * 10.0**power for power in (2, 4, 9, 13, 13.5, 15, 18) for sign in (1, -1)], dtype=dtype)
    (ours,), (theirs,) = (
        torch.autograd.grad(function(leaf).sum(), leaf)
        for function in (gelu_tanh, lambda x: F.gelu(x, approximate="tanh"))
        for leaf in [x.clone().requires_grad_()]
    )
    assert ours.tolist() == theirs.tolist() == [1.0, 0.0] * 7


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 5), (700, 301)])  # none, few, and more than one chunk
def test_gelu_tanh_is_torch_s(dtype, shape):
    torch.manual_seed(0)
    x = (8 * torch.randn(*reversed(shape))).to(dtype).t()  # whose rows do not lie together
    x[:1, :1] = 60.0  # where exponentials overflow
    grad, results = torch.randn(shape).to(dtype), []
    for function in (gelu_tanh, lambda x: F.gelu(x, approximate="tanh")):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.backward(grad)
        results.append((y.detach(), leaf.grad, function(x)))
    (ours, ours_grad, ours_eval), (theirs, theirs_grad, _) = results
    assert torch.equal(ours, ours_eval)
    limit = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=limit, atol=10 * limit)
