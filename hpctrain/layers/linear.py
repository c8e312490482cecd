"""Linear layers by a parallel matrix product on the tensor axes."""

from __future__ import annotations

import torch

from hpctrain.grid import Grid
from hpctrain.layers.algorithm import Algorithm, BoxAlgorithm, PlaneAlgorithm, algorithm_of
from hpctrain.layers.box import BoxProduct
from hpctrain.layers.parameter import (
    Factory,
    Layer,
    check_shape,
    check_sizes,
    check_tokens,
    drawn_key,
    parameter,
    refuse_autocast,
)  # fmt: skip
from hpctrain.layers.plane import PlaneProduct
from hpctrain.layers.tokens import Tokens
from hpctrain.randomness import RngKey


class Linear(Layer):
    """y = x Wᵀ + b, taking the residual layout to the inner one (`to="inner"`) or back (`to="residual"`).

    No two ranks hold the same element of W. With algorithm="agarwal" and `to="inner"`, W's rows are spread over x and
    within that over z, its columns over y; with `to="residual"` x and y change places. For (t, 1, 1) this is Megatron's
    column- and row-parallel pair with its norms in sequence parallel form. With "cannon", "summa" and "two_half_d" the
    two layouts are the same (see `layers.algorithm`).

    Args:
        grid: the process grid; W is split over its tensor axis.
        in_features, out_features: any sizes. Where they do not divide, the first ranks hold one unit more.
        in_unit, out_unit: features that must stay together, such as those of one attention head; divisors of these.
        algorithm: the matrix product, by name or as made by `layers.algorithm_of`.
        std: standard deviation of the initial weights; torch's default, uniform, has 1 / sqrt(3 in_features).
        key: names the initial weights; by default drawn from torch's generator.

    Shapes: x is (rows, in_features) in its layout, the result (rows, out_features) in the other. Agarwal's product
    takes one all-gather of x, one of W and one reduce-scatter of y forward; two of each backward.

    Source: Agarwal, Balle, Gustavson, Joshi and Palkar, "A three-dimensional approach to parallel matrix
    multiplication", IBM J. Res. Dev. 39 (1995); alternated over the layers of a network as in Singh and Bhatele, "A 4D
    hybrid algorithm to scale parallel training to thousands of GPUs" (2023), with every operand spread over all ranks.
    """

    def __init__(
        self, grid: Grid, in_features: int, out_features: int, bias: bool = True, *, to: str, in_unit: int = 1,
        out_unit: int = 1, algorithm: str | Algorithm = "agarwal", std: float | None = None, key: RngKey | None = None,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ):  # fmt: skip
        super().__init__()
        if to not in ("inner", "residual"):
            raise ValueError(f'to must be "inner" or "residual", got {to!r}')
        check_sizes(in_features=in_features, out_features=out_features)
        for side, features, unit in (("in", in_features, in_unit), ("out", out_features, out_unit)):
            if unit < 1 or features % unit:
                raise ValueError(f"{side}_features must be a multiple of {side}_unit, got {features} and {unit}")
        self.grid, self.to_inner = grid, to == "inner"
        self.in_features, self.out_features = in_features, out_features
        key = drawn_key(grid, key)
        std = (3 * in_features) ** -0.5 if std is None else std

        algorithm = algorithm_of(grid, algorithm)
        sizes = in_features, out_features, self.to_inner, in_unit, out_unit
        self.product: BoxProduct | PlaneProduct
        if isinstance(algorithm, BoxAlgorithm):
            self.product = BoxProduct(algorithm, *sizes)
        else:
            assert isinstance(algorithm, PlaneAlgorithm)
            self.product = PlaneProduct(algorithm, *sizes)
        factory = Factory(dtype=dtype, device=device)
        self.weight = parameter(grid, self.product.weight, key / "weight", std, **factory)
        self.bias = parameter(grid, self.product.bias, key / "bias", None, **factory) if bias else None

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        refuse_autocast(x)
        check_tokens(self, self.grid, tokens)
        check_shape(self, x, self.product.shape_of_input(tokens), "residual" if self.to_inner else "inner")
        return self.product(x, self.weight, self.bias, tokens)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, to={'inner' if self.to_inner else 'residual'}"
