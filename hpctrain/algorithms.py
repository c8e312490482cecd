"""Algorithms by name: parallel matrix products with the tensor grids each works on, sums over ranks, optimizers."""

from __future__ import annotations

# What may run beside products of layers on a box of ranks:
#   input_gradient    the sum of the input's gradient, beside the product for the weight's
#   weight_gradient   the sum over z of a weight's gradient, once a step instead of once a microbatch
#   prefetch          the gather over z of the next layer's weight, beside this layer's products
OVERLAPS = ("input_gradient", "weight_gradient", "prefetch")

# Where the ranks' processors also carry the messages, the other two gain nothing: see benchmarks/overlap.py.
DEFAULT_OVERLAP = ("weight_gradient",)

# How sums over the data axis are taken; see comm/algorithms. "shared": gradients in shared memory where all ranks are
# on one node, everything else by MPI. "auto" takes the fastest for each size, as measured at the start.
ALL_REDUCE = ("shared", "mpi", "naive", "ring", "parallel", "halving", "hierarchical", "auto")

RECOMPUTE = ("none", "attention", "block")  # what of a model's activations is computed again in backward

ALGORITHMS = ("agarwal", "megatron", "cannon", "summa", "two_half_d")

# Those that treat every element by itself, so that ranks may hold any part of a weight.
OPTIMIZERS = ("adamw", "adam", "nadam", "radam", "adamax", "adagrad", "rmsprop", "sgd")

# What the update of one element depends on, besides its own gradients.
MIXING_OPTIMIZERS = {
    "adafactor": "row and column means of squares of the whole matrix",
    "lamb": "the norms of the whole weight and of its update",
    "lars": "the norms of the whole weight and of its gradient",
    "lbfgs": "inner products of whole gradients",
    "muon": "the whole matrix of the momentum, which it orthogonalises",
    "shampoo": "inner products of rows and of columns of the whole gradient",
    "soap": "the eigenvectors of Shampoo's matrices",
}


def check_optimizer(name: str) -> None:
    """Raise ValueError unless this optimizer treats every element of a weight by itself and torch has it.

    >>> check_optimizer("lamb")
    Traceback (most recent call last):
    ValueError: train.optimizer = "lamb" needs the norms of the whole weight and of its update, of which a rank may hold
    only a part; use one of adamw, adam, nadam, radam, adamax, adagrad, rmsprop, sgd
    """
    if name in MIXING_OPTIMIZERS:
        raise ValueError(
            f'train.optimizer = "{name}" needs {MIXING_OPTIMIZERS[name]}, of which a rank may hold only a part; '
            f"use one of {', '.join(OPTIMIZERS)}"
        )
    if name not in OPTIMIZERS:
        raise ValueError(f"train.optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")


def check_algorithm(name: str, x: int, y: int, z: int) -> None:
    """Raise ValueError unless this is the name of an algorithm that works on x × y × z ranks.

    >>> check_algorithm("cannon", 2, 1, 1)
    Traceback (most recent call last):
    ValueError: tensor.algorithm = "cannon" needs grid.tensor = [q, q, 1], got [2, 1, 1]
    """
    needs = {
        "agarwal": ("[x, y, z]", True),
        "megatron": ("[t, 1, 1]", y == z == 1),
        "cannon": ("[q, q, 1]", x == y and z == 1),
        "summa": ("[x, y, 1]", z == 1),
        "two_half_d": ("[q, q, c]", x == y),
    }
    if name not in needs:
        raise ValueError(f"tensor.algorithm must be one of {', '.join(ALGORITHMS)}, got {name!r}")
    form, fits = needs[name]
    if not fits:
        raise ValueError(f'tensor.algorithm = "{name}" needs grid.tensor = {form}, got [{x}, {y}, {z}]')


def check_overlap(names) -> None:
    """Raise ValueError unless these are names of overlaps.

    >>> check_overlap(["prefetched"])
    Traceback (most recent call last):
    ValueError: tensor.overlap must list some of input_gradient, weight_gradient, prefetch, got 'prefetched'
    """
    for name in names:
        if name not in OVERLAPS:
            raise ValueError(f"tensor.overlap must list some of {', '.join(OVERLAPS)}, got {name!r}")
