"""Parallel matrix products on the tensor axes of a grid, differentiable, and what any such product must communicate."""

from hpctrain.matmul.agarwal import Agarwal
from hpctrain.matmul.bounds import lower_bound
from hpctrain.matmul.plane import Cannon, Summa
from hpctrain.matmul.two_half_d import TwoHalfD

__all__ = ["Agarwal", "Cannon", "Summa", "TwoHalfD", "lower_bound"]
