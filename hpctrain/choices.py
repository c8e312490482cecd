"""What is chosen by a name: matrix products, sums over ranks, optimizers and the like.

Below the mechanisms themselves, which bring torch: a login node reads a configuration without it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

DEVICES = ("auto", "cpu", "cuda")

DTYPES = ("fp32", "fp64", "bf16", "fp16")

# How the replicas of a model are kept alike; see hpctrain/data_parallel.
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "parameter_server", "local_sgd")

# What may run beside products of layers on a box of ranks:
#   input_gradient    the sum of the input's gradient, beside the product for the weight's
#   weight_gradient   the sum over z of a weight's gradient, once a step instead of once a microbatch
# A weight's gather over z needs no option: from other nodes it comes in panels, beside the product that takes them.
OVERLAPS = ("input_gradient", "weight_gradient")

# Where the ranks' processors also carry the messages, the other one gains nothing: see benchmarks/overlap.py.
DEFAULT_OVERLAP = ("weight_gradient",)

# Of the learning rate, after its warm-up; see train/learning_rate.py.
LR_SCHEDULES = ("cosine", "linear", "constant", "wsd", "inverse_sqrt")

# How sums over the data axis are taken; see comm/algorithms. "shared": gradients in shared memory where all ranks are
# on one node, everything else by MPI. "auto" takes the fastest for each size, as measured at the start.
ALL_REDUCE = ("shared", "mpi", "naive", "ring", "direct", "rabenseifner", "hierarchical", "auto")
ALL_REDUCE_ALIASES = {"parallel": "direct", "halving": "rabenseifner"}

RECOMPUTE = ("none", "attention", "block")  # what of a model's activations is computed again in backward

# How a sequence is shared; see hpctrain/layers/context.
SEQUENCE_METHODS = ("auto", "ulysses", "ring")
SEQUENCE_BALANCES = ("zigzag", "work", "none")

DISPATCHES = ("auto", "all_to_all", "gather", "once")  # how tokens travel to their experts
DROP_POLICIES = ("probability", "position")  # which tokens an expert keeps that has too many
AUX_SCOPES = ("sequence", "step")  # the tokens that an auxiliary loss of experts is of
ROUTERS = ("softmax", "sigmoid")  # how scores of experts follow from logits; see hpctrain/layers/experts

DOCUMENTS = ("packed", "masked")  # what a token attends to: what is before it, or of that its own document

# The parallel matrix products; see hpctrain/matmul.
PRODUCTS = ("agarwal", "megatron", "cannon", "summa", "two_half_d")
PLANE_PRODUCTS = ("cannon", "summa", "two_half_d")  # whose inner layout is the residual one; see layers.algorithm

# Those that treat every element by itself, so that ranks may hold any part of a weight.
OPTIMIZERS = ("adamw", "adam", "nadam", "radam", "adamax", "adagrad", "rmsprop", "sgd")

# What the update of one element depends on, besides its own gradients.
MIXING_OPTIMIZERS = {
    "adafactor": "row and column means of squares of the whole matrix",
    "lamb": "the norms of the whole weight and of its update",
    "lars": "the norms of the whole weight and of its gradient",
    "lbfgs": "inner products of whole gradients",
    "prodigy": "the distance of all weights from where they began",
    "muon": "the whole matrix of the momentum, which it orthogonalises",
    "shampoo": "inner products of rows and of columns of the whole gradient",
    "soap": "the eigenvectors of Shampoo's matrices",
}


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """
    >>> check_choice("precision.master", "fp64", ("fp32", "compute"))
    Traceback (most recent call last):
    ValueError: precision.master must be "fp32" or "compute", got 'fp64'
    """
    if value not in choices:
        raise ValueError(f"{option} must be {' or '.join(map(json.dumps, choices))}, got {value!r}")


def check_mixture(sources: Sequence) -> None:
    """Raise ValueError for anything else than pairs of a path and a weight."""
    for pair in sources:
        if not (
            len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) in (int, float) and 0 < pair[1] < math.inf
        ):
            raise ValueError(
                'data.mixture must list paths of packed data with their weights above 0, such as [["code.h5", 0.7], '
                f'["text.h5", 0.3]], got {pair!r}'
            )
    if len({path for path, _ in sources}) < len(sources):
        raise ValueError("data.mixture names a path twice; add the weights up")


def check_betas(values: Sequence[float]) -> None:
    """Raise ValueError for anything else than the two decays of Adam's moments."""
    if len(values) != 2 or not all(0 <= value < 1 for value in values):
        raise ValueError(f"train.betas must be two numbers at least 0 and below 1, such as [0.9, 0.95], got {values}")


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
    check_choice("train.optimizer", name, OPTIMIZERS)


def check_by_elements(optimizer: object, instead: str = "AdamW does") -> None:
    """Raise ValueError for an optimizer, of torch's kind, that mixes the elements of a weight."""
    kinds = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    if mixing := [kind for kind in kinds if kind in MIXING_OPTIMIZERS]:
        raise ValueError(
            f"optimizer must treat every element of a weight by itself, got {type(optimizer).__name__}, which needs "
            f"{MIXING_OPTIMIZERS[mixing[0]]}; {instead}"
        )


def check_product(name: str, x: int, y: int, z: int) -> None:
    """Raise ValueError unless this is the name of a product that works on x × y × z ranks.

    >>> check_product("cannon", 2, 1, 1)
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
    check_choice("tensor.algorithm", name, PRODUCTS)
    form, fits = needs[name]
    if not fits:
        raise ValueError(f'tensor.algorithm = "{name}" needs grid.tensor = {form}, got [{x}, {y}, {z}]')


def check_overlap(names: Sequence[str]) -> None:
    """Raise ValueError unless these are names of overlaps.

    >>> check_overlap(["prefetched"])
    Traceback (most recent call last):
    ValueError: tensor.overlap must list some of input_gradient, weight_gradient, got 'prefetched'
    """
    for name in names:
        if name not in OVERLAPS:
            raise ValueError(f"tensor.overlap must list some of {', '.join(OVERLAPS)}, got {name!r}")


def check_rope_scaling(values: Sequence[float]) -> None:
    """Raise ValueError for what is no scaling of rotary frequencies, nor empty; see `layers.rotary.RopeScaling`."""
    fits = len(values) == 4 and values[0] >= 1 and 0 < values[1] < values[2] and values[3] >= 1
    if values and not (fits and all(map(math.isfinite, values))):
        raise ValueError(
            "model.rope_scaling must be [factor, low_freq_factor, high_freq_factor, original context], such as"
            f" [8, 1, 4, 8192], with factor and context at least 1 and 0 < low_freq_factor < high_freq_factor, got"
            f" {list(values)}"
        )


def check_router_groups(values: Sequence[int]) -> None:
    """Raise ValueError for what is no pair of groups of experts and those that are kept, nor empty.

    >>> check_router_groups([4, 5])
    Traceback (most recent call last):
    ValueError: model.router_groups must be [groups, kept], with kept from 1 to groups, got [4, 5]
    """
    if values and not (len(values) == 2 and 1 <= values[1] <= values[0]):
        raise ValueError(f"model.router_groups must be [groups, kept], with kept from 1 to groups, got {list(values)}")
