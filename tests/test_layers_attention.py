"""Attention against torch's and Hugging Face's own, on every tensor grid of the ranks there are."""

import math

import pytest
import torch
import torch.nn.functional as F
from context_checks import use_tiles
from layer_checks import DOUBLE, KEY, Layout, check, randomise, tensor_grids, whole

from hpctrain import Grid
from hpctrain.layers import Attention, Tokens
from hpctrain.layers.kv_cache import KVCache
from hpctrain.layers.rotary import RopeScaling
from hpctrain.layers.softmax_attention import softmax

pytestmark = pytest.mark.mpi

SEQUENCES, LENGTH = 3, 6


def parts(qkv, heads, kv_heads, head_width):
    """The rows of the fused weight (or bias) that make queries, keys and values, head by head."""
    queries = heads // kv_heads
    packed = qkv.view(kv_heads, queries + 2, head_width, *qkv.shape[1:])
    return [packed[:, part].flatten(0, 2) for part in (slice(queries), slice(queries, -1), slice(queries + 1, None))]


def turned(x, base, scaling=None):
    """Heads (…, length, width) turned by their positions, as complex numbers (feature i, feature i + width/2)."""
    frequencies = [base ** (-2 * i / x.shape[-1]) for i in range(x.shape[-1] // 2)]
    if scaling is not None:
        frequencies = [scaled(frequency, **vars(scaling)) for frequency in frequencies]
    angles = torch.outer(torch.arange(x.shape[-2], **DOUBLE), torch.tensor(frequencies, **DOUBLE))
    pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def scaled(frequency, factor, low_freq_factor, high_freq_factor, original_context):
    """Llama 3.1's three ranges of wavelengths, one frequency at a time."""
    wavelength = 2 * math.pi / frequency
    if wavelength > original_context / low_freq_factor:
        return frequency / factor
    if wavelength < original_context / high_freq_factor:
        return frequency
    smooth = (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return (1 - smooth) * frequency / factor + smooth * frequency


def plain(heads, kv_heads, head_width, causal, keep=None, turn=lambda x: x, eps=None):
    """A function of whole matrices: softmax attention written out, key and value heads repeated for their queries.
    Queries and keys are normalised where there are weights for it."""

    def normalised(w, x, name):
        return F.rms_norm(x, (head_width,), w[name + ".weight"], eps) if name + ".weight" in w else x

    def serial(w, x):
        def project(weight, bias):
            return F.linear(x, weight, bias).view(SEQUENCES, LENGTH, -1, head_width).transpose(1, 2)

        biases = parts(w["qkv.bias"], heads, kv_heads, head_width) if "qkv.bias" in w else [None] * 3
        q, k, v = map(project, parts(w["qkv.weight"], heads, kv_heads, head_width), biases)
        q, k = turn(normalised(w, q, "q_norm")), turn(normalised(w, k, "k_norm"))
        k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
        scores = q @ k.mT / math.sqrt(head_width)
        if causal:
            scores = scores + torch.full((LENGTH, LENGTH), -math.inf).triu(1)
        mixed = (scores.softmax(-1) if keep is None else scores.softmax(-1) * keep) @ v
        return F.linear(mixed.transpose(1, 2).reshape(len(x), -1), w["proj.weight"], w.get("proj.bias"))

    return serial


@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "head_width", "causal", "bias"),
    [
        (16, 4, None, None, True, True),
        (12, 3, None, None, False, True),
        (4, 1, None, None, True, False),
        (12, 6, 3, None, True, True),
        (7, 6, 2, 3, True, False),  # a head width of its own
        (10, 5, 1, 4, False, False),  # multi-query: one group
    ],
)
def test_attention_against_torch(world, width, heads, kv_heads, head_width, causal, bias):
    for grid in tensor_grids(world):
        layout = Layout(grid, SEQUENCES, LENGTH)
        layer = randomise(
            Attention(
                grid, width, heads, kv_heads=kv_heads, head_width=head_width, causal=causal, qkv_bias=bias,
                proj_bias=not bias, key=KEY, **DOUBLE,
            )
        )  # fmt: skip
        serial = plain(heads, kv_heads or heads, head_width or width // heads, causal)
        check(layout, layer, serial, whole((SEQUENCES * LENGTH, width), "x"), layout.residual, layout.residual)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 3), (3, 1)])
def test_causal_attention_by_tiles(world, heads, kv_heads, monkeypatch):
    kinds = use_tiles(monkeypatch)
    for grid in tensor_grids(world):
        layout = Layout(grid, SEQUENCES, LENGTH)
        layer = randomise(Attention(grid, 12, heads, kv_heads=kv_heads, head_width=4, key=KEY, **DOUBLE))
        check(
            layout, layer, plain(heads, kv_heads, 4, True), whole((SEQUENCES * LENGTH, 12), "x"), layout.residual,
            layout.residual,
        )  # fmt: skip
        everywhere = {kind for of_rank in world.allgather(kinds) for kind in of_rank}  # a rank may have no heads
        assert everywhere == {"causal", "full"}
        kinds.clear()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_width", "base", "bias"),
    [(4, 4, 2, 10000.0, False), (6, 3, 4, 500000.0, True), (8, 2, 6, 100.0, False), (3, 1, 2, 10000.0, True)],
)
def test_rotary_attention_against_hugging_face(world, heads, kv_heads, head_width, base, bias):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    width = 24
    config = LlamaConfig(
        hidden_size=width, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_width,
        attention_bias=bias, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = LlamaAttention(config, 0).double()
    speeds = [base ** (-2 * i / head_width) for i in range(head_width // 2)] * 2
    angles = torch.tensor([[[at * speed for speed in speeds] for at in range(LENGTH)]], **DOUBLE)

    def serial(w, x):
        names, weights = ("q_proj", "k_proj", "v_proj"), {}
        for kind in ("weight", "bias") if bias else ("weight",):
            found = parts(w["qkv." + kind], heads, kv_heads, head_width)
            weights.update((f"{name}.{kind}", part) for name, part in zip(names, found))
            weights["o_proj." + kind] = w["proj." + kind]
        hidden = x.view(SEQUENCES, LENGTH, width)
        out, _ = torch.func.functional_call(theirs, weights, (hidden, (angles.cos(), angles.sin())))
        return out.flatten(0, 1)

    for grid in tensor_grids(world):
        layout = Layout(grid, SEQUENCES, LENGTH)
        layer = randomise(
            Attention(
                grid, width, heads, kv_heads=kv_heads, head_width=head_width, rotary=base, qkv_bias=bias,
                proj_bias=bias, key=KEY, **DOUBLE,
            )
        )  # fmt: skip
        check(layout, layer, serial, whole((SEQUENCES * LENGTH, width), "x"), layout.residual, layout.residual)


# Of 8 frequencies to the base 100 the first turns 6.4 times in 40 positions, the last 0.1 times: some in each range.
SCALING = RopeScaling(8.0, 1.0, 4.0, 40)


@pytest.mark.ranks(1)
def test_rope_scaling_is_that_of_hugging_face():
    """Whose frequencies are in float32."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kinds = set()
    for base, scaling in ((100.0, SCALING), (500000.0, RopeScaling(32.0, 1.0, 4.0, 8192))):
        told = {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": scaling.original_context, "rope_theta": base}  # fmt: skip
        config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=told, max_position_embeddings=10**5)
        theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        frequencies = base ** (torch.arange(0, 16, 2, **DOUBLE) / -16)
        ours = scaling.apply(frequencies)
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-6, atol=0)
        expected = torch.tensor([scaled(f.item(), **vars(scaling)) for f in frequencies], **DOUBLE)
        torch.testing.assert_close(ours, expected, rtol=1e-14, atol=0)
        kinds |= {ratio if ratio in (1.0, scaling.factor) else 2.0 for ratio in (frequencies / ours).tolist()}
    assert kinds == {1.0, 2.0, 8.0, 32.0}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_width", "scaling", "eps", "p", "recompute"),
    [
        (4, 4, 2, None, 1e-6, 0.0, False),
        (6, 3, 4, SCALING, None, 0.0, True),
        (6, 2, 16, SCALING, 1e-2, 0.3, False),
        (3, 1, 2, None, 1e-2, 0.3, True),  # ranks without heads, which share the weights of the norms all the same
    ],
)
def test_normalised_queries_and_keys(world, heads, kv_heads, head_width, scaling, eps, p, recompute):
    """Norm, turn and dropout together."""
    width, step = 7, 9
    mask = (KEY / "attention").mask(0, SEQUENCES * heads * LENGTH**2, p, step).view(-1, heads, LENGTH, LENGTH)
    keep = mask.double() / (1 - round(p * 65536) / 65536) if p else None
    serial = plain(heads, kv_heads, head_width, True, keep, lambda x: turned(x, 100.0, scaling), eps)
    for grid in tensor_grids(world):
        layout = Layout(grid, SEQUENCES, LENGTH, step=step)
        layer = randomise(
            Attention(
                grid, width, heads, p, kv_heads=kv_heads, head_width=head_width, rotary=100.0, rope_scaling=scaling,
                qk_norm=True, norm_eps=eps, recompute=recompute, key=KEY / "attention", **DOUBLE,
            )
        )  # fmt: skip
        check(layout, layer, serial, whole((SEQUENCES * LENGTH, width), "x"), layout.residual, layout.residual)


@pytest.mark.parametrize(("kv_heads", "causal"), [(6, True), (3, True), (2, False)])
def test_dropout_masks_depend_on_neither_grid_nor_groups(world, kv_heads, causal):
    heads, head_width, width, p, step = 6, 3, 7, 0.3, 9
    mask = (KEY / "attention").mask(0, SEQUENCES * heads * LENGTH**2, p, step).view(-1, heads, LENGTH, LENGTH)
    keep = mask.double() / (1 - round(p * 65536) / 65536)
    for grid in tensor_grids(world):
        layout = Layout(grid, SEQUENCES, LENGTH, step=step)
        arguments = {"kv_heads": kv_heads, "head_width": head_width, "causal": causal}
        layer = Attention(grid, width, heads, p, key=KEY / "attention", **arguments, **DOUBLE)
        serial = plain(heads, kv_heads, head_width, causal, keep)
        check(layout, layer, serial, whole((SEQUENCES * LENGTH, width), "x"), layout.residual, layout.residual)


@pytest.mark.parametrize(
    "options", [{}, {"rotary": 100.0}, {"rotary": 100.0, "rope_scaling": SCALING, "qk_norm": True}]
)
def test_slices_of_tokens_are_the_whole(options):
    """A slice's queries and keys turn by their positions in the whole sequence."""
    from mpi4py import MPI

    grid = Grid(comm=MPI.COMM_SELF)
    layer = randomise(Attention(grid, 12, 3, key=KEY, **options, **DOUBLE))
    x = whole((SEQUENCES * LENGTH, 12), "x")
    expected = layer(x, Tokens.of(grid, SEQUENCES, LENGTH)).view(SEQUENCES, LENGTH, 12)
    kv_cache, found = KVCache(), []
    for part in (slice(0, 1), slice(1, 4), slice(4, LENGTH)):
        tokens = Tokens.of(grid, SEQUENCES, LENGTH, part=part, kv_cache=kv_cache)
        rows = x.view(SEQUENCES, LENGTH, 12)[:, part].flatten(0, 1)
        found.append(layer(rows, tokens).view(SEQUENCES, -1, 12))
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-12, atol=1e-12)


def test_attention_moves_what_its_projections_move(world):
    """Groups, norms of heads and rotary embedding add no communication."""
    for grid in tensor_grids(world):
        layout = Layout(grid, 3, 4)
        layer = Attention(grid, 16, 6, kv_heads=3, head_width=4, rotary=100.0, qk_norm=True, key=KEY, **DOUBLE)
        block = layout.residual(whole((12, 16), "x").detach()).clone().requires_grad_()
        held = layer.proj.product.inner.sizes[grid.tensor.y.rank]

        def moved(y):
            y.sum().backward()
            table = grid.transport.traffic.table()  # noqa: B023 (called in this round)
            grid.transport.traffic.clear()  # noqa: B023
            return table

        grid.transport.traffic.clear()
        whole_layer = moved(layer(block, layout.tokens))
        assert whole_layer == moved(layer.proj(layer.qkv(block, layout.tokens)[:, :held], layout.tokens))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"width": 10, "heads": 3},
            "width must be a multiple of heads .* got width 10 and 3 heads",
        ),
        ({"width": 8, "heads": 4, "kv_heads": 3}, "kv_heads must be a divisor of heads, got 3 of 4 heads"),
        ({"width": 8, "heads": 4, "kv_heads": 0}, "kv_heads must be a divisor of heads, got 0 of 4 heads"),
        ({"width": 6, "heads": 2, "rotary": 10.0}, "rotary needs heads of an even width, got head_width 3"),
        ({"width": 8, "heads": 4, "rope_scaling": SCALING}, "rope_scaling needs rotary"),
    ],
)
def test_bad_arguments(world, arguments, message):
    with pytest.raises(ValueError, match=message):
        Attention(Grid(tensor=world.size), key=KEY, **arguments)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "values", [(0.5, 1.0, 4.0, 8), (8.0, 4.0, 4.0, 8), (8.0, 0.0, 4.0, 8), (8.0, 1.0, math.inf, 8), (8.0, 1.0, 4.0, 0)]
)
def test_bad_rope_scaling(values):
    with pytest.raises(ValueError, match=r"rope_scaling must be \[factor, .* got \["):
        RopeScaling(*values)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_of_16_bits_is_taken_in_float32(world, dtype):
    """Each of 300 equal probabilities is rounded the same way: their sum is off by as much, and with it the gradient,
    which is zero where that of all probabilities is the same."""
    scores = torch.zeros(2, 300, dtype=dtype, requires_grad=True)
    probabilities = softmax(scores)
    probabilities.backward(torch.full_like(scores, 64.0))
    assert (scores.grad.dtype, probabilities.dtype) == (dtype, dtype)
    assert probabilities[0, 0].item() == pytest.approx(1 / 300, rel=torch.finfo(dtype).eps)
    assert scores.grad.abs().max() < 1e-6
