"""What layers refuse: on all ranks alike, before a collective, and rather than computing something else."""

import math

import pytest
import torch
from layer_checks import DOUBLE, KEY, Layout, tensor_grids, whole

from hpctrain import Grid
from hpctrain.layers import (
    MLP,
    Attention,
    BatchNorm2d,
    Conv2d,
    CrossEntropy,
    Dropout,
    Embedding,
    Experts,
    LayerNorm,
    Linear,
    Mixture,
    RMSNorm,
    Router,
    Tokens,
    algorithm_of,
)  # fmt: skip

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]
DTYPE = "dtype must be one of real floating point numbers, such as torch.float32"
DROPOUT = "dropout must be at least 0 and below 1, in steps of 2^-16"


@pytest.mark.parametrize(
    "make",
    [
        lambda grid: Linear(grid, 8, 8, to="inner", **DOUBLE),
        lambda grid: RMSNorm(grid, 8, **DOUBLE),
        lambda grid: MLP(grid, 8, 8, **DOUBLE),
        lambda grid: Attention(grid, 8, 2, **DOUBLE),
        lambda grid: Mixture(grid, 8, 8, 4, 2, **DOUBLE),
    ],
)
def test_a_second_derivative(world, make):
    """Rather than being that of the local part, or without what torch.autograd.grad does not follow."""
    for grid in tensor_grids(world):
        layout = Layout(grid, 4, 2)
        x = layout.residual(whole((8, 8), "x", False)).clone().requires_grad_()
        y = make(grid)(x.tanh(), layout.tokens)
        with pytest.raises(ValueError, match="has no second derivative, got a backward with create_graph=True"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.ranks(1, 2)
def test_autocast(world):
    grid = Grid(tensor=world.size)
    layer = Linear(grid, 8, 6, to="inner", key=KEY)
    with (
        torch.autocast("cpu"),
        pytest.raises(ValueError, match="within torch.autocast: leave it out, and make"),
    ):
        layer(torch.ones(2, 8), Tokens.of(grid, 1, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: Linear(g, 4, 4, to="outer"), 'to must be "inner" or "residual", got \'outer\''),
        (lambda g: Linear(g, 0, 4, to="inner"), "in_features must be an integer of at least 1, got 0"),
        (
            lambda g: Linear(g, 8, 10, to="inner", out_unit=4),
            "out_features must be a multiple of out_unit, got 10 and 4",
        ),
        (lambda g: Linear(g, 8, 4, to="residual", in_unit=0), "in_features must be a multiple of in_unit, got 8 and 0"),
        (lambda g: RMSNorm(g, -1), "width must be an integer of at least 1, got -1"),
        (lambda g: LayerNorm(g, (8,)), "width must be an integer of at least 1, got (8,)"),
        (lambda g: Embedding(g, 8, -1), "width must be an integer of at least 1, got -1"),
        (lambda g: CrossEntropy(g, 0), "vocabulary must be an integer of at least 1, got 0"),
        (lambda g: Attention(g, 8, 0), "heads must be an integer of at least 1, got 0"),
        (lambda g: Attention(g, 8, 2, window=1.5), "window must be a number of positions, or 0 for all, got 1.5"),
        (lambda g: MLP(g, 8, 0), "hidden must be an integer of at least 1, got 0"),
        (lambda g: Mixture(g, 8, 0, 4, 2), "ffn must be an integer of at least 1, got 0"),
        (lambda g: Router(g, 0, 4, 2), "features must be an integer of at least 1, got 0"),
        (lambda g: Experts(g, 8, 4, 2.0), "experts must be an integer of at least 1, got 2.0"),
        (lambda g: Experts(g, 8, 4, 2, capacity=math.nan), "capacity must be positive, or 0 for no limit, got nan"),
        (lambda g: BatchNorm2d(g, -1), "features must be an integer of at least 1, got -1"),
        (lambda g: Conv2d(g, 0, 3, 3), "in_channels must be an integer of at least 1, got 0"),
        (lambda g: Tokens.of(g, -1, 3), "sequences and length must be from 0 on, got -1 and 3"),
        (lambda g: Linear(g, 4, 4, to="inner", key=0), "key must be an RngKey, such as ht.RngKey(0), got 0"),
        (lambda g: Dropout(g, 0.5, 4, key=0), "key must be an RngKey, such as ht.RngKey(0), got 0"),
        # their gradients would lack the conjugate
        (lambda g: Linear(g, 4, 4, to="inner", dtype=torch.cdouble), f"{DTYPE}, got torch.complex128"),
        (lambda g: Embedding(g, 4, 4, dtype=torch.int64), f"{DTYPE}, got torch.int64"),
        *((lambda g, p=p: Dropout(g, p, 4, key=KEY), f"{DROPOUT}, got {p}") for p in (-0.5, 1.0, 1 - 2**-18)),
    ],
)
def test_bad_arguments(world, make, message):
    with pytest.raises(ValueError) as refused:
        make(Grid(tensor=world.size))
    assert str(refused.value) == message


@pytest.mark.parametrize("algorithm", ["agarwal", "summa"])
def test_rows_or_columns_of_another_layout(world, algorithm):
    grid = Grid(tensor=(1, world.size, 1))
    tokens = Tokens.of(grid, sequences=3, length=2, algorithm=algorithm)
    columns = 8 // world.size
    layers = [
        Linear(grid, 8, 8, to="inner", algorithm=algorithm), LayerNorm(grid, 8), RMSNorm(grid, 8),
        Dropout(grid, 0.5, 8, key=KEY), Mixture(grid, 8, 4, 2, 1, algorithm=algorithm),
    ]  # fmt: skip
    for layer in layers:
        layer(torch.ones(6, columns), tokens)
        for shape in ((7, columns), (6, columns + 1), (6, 1), (2, 3, columns)):
            with pytest.raises(ValueError) as refused:
                layer(torch.ones(shape), tokens)
            said = (
                f"takes this rank's 6 rows and {columns} columns of x in the residual layout, got {shape}; the tokens"
            )
            assert said in str(refused.value)


@pytest.mark.parametrize("shape", [(3, 4), (11,), (24,)])
def test_ids_that_are_not_a_vector_of_the_tokens(world, shape):
    for grid in tensor_grids(world):
        tokens = Tokens.of(grid, 3 * grid.tensor.z.size, 4)
        with pytest.raises(ValueError, match="takes the ids of all 12 tokens of the z block as a vector, got"):
            Embedding(grid, 7, 8)(torch.zeros(shape, dtype=torch.int64), tokens)


@pytest.mark.parametrize(("rows", "more"), [((5,), 0), ((1,), 0), ((2, 3), 0), ((6,), 1), ((6,), -1)])
def test_logits_of_another_vocabulary_or_other_targets(world, rows, more):
    """Padded ones have other words on other ranks: their loss would be one of other targets."""
    for grid in tensor_grids(world):
        loss = CrossEntropy(grid, 8)
        logits = torch.ones(6, 8 // (grid.tensor.x.size * grid.tensor.y.size) + more)
        with pytest.raises(ValueError, match=r"of a vocabulary of 8 takes this rank's \(rows, \d\) logits .* got"):
            loss(logits, torch.zeros(rows, dtype=torch.int64), 1.0)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    "make",
    [
        lambda grid: Linear(grid, 8, 8, to="inner"),
        lambda grid: LayerNorm(grid, 8),
        lambda grid: RMSNorm(grid, 8),
        lambda grid: Dropout(grid, 0.5, 8, key=KEY),
        lambda grid: Mixture(grid, 8, 4, 2, 1),
    ],
)
def test_tokens_of_another_grid(world, make):
    """Of as many rows, with which the product would be that of a part of the weight, and the masks those of others."""
    grid, other = Grid(tensor=(world.size, 1, 1)), Grid(tensor=(1, 1, world.size))
    layer, tokens = make(grid), Tokens.of(other, 4, 2)
    with pytest.raises(ValueError, match=r"is of a grid of .*'x': \d, .* got tokens of one of .*; make them by"):
        layer(torch.ones(tokens.local_rows, 8), tokens)


@pytest.mark.ranks(2, 4)
def test_ids_with_tokens_of_another_grid(world):
    """The rows of other ranks would be zeros, as nobody sums over x."""
    grid, other = Grid(tensor=(world.size, 1, 1)), Grid(tensor=(1, world.size, 1))
    with pytest.raises(ValueError, match=r"Embedding\(\) is of a grid of .* got tokens of one of .*; make them by"):
        Embedding(grid, 8, 4)(torch.arange(8), Tokens.of(other, 4, 2))


@pytest.mark.ranks(2, 4)
def test_an_algorithm_of_another_grid(world):
    grid, other = Grid(tensor=(world.size, 1, 1)), Grid(tensor=(1, 1, world.size))
    with pytest.raises(ValueError, match=r"algorithm was made for a grid of .*, and the layer is of .*; make it by"):
        Linear(grid, 8, 8, to="inner", algorithm=algorithm_of(other, "agarwal"))
