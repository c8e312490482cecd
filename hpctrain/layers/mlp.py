"""The MLP of a transformer block."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from hpctrain.grid import Grid
from hpctrain.layers.algorithm import Algorithm, algorithm_of
from hpctrain.layers.gelu import gelu_tanh
from hpctrain.layers.linear import Linear
from hpctrain.layers.parameter import check_sizes, drawn_key
from hpctrain.layers.tokens import Tokens
from hpctrain.once_differentiable import once_differentiable
from hpctrain.randomness import RngKey


class MLP(torch.nn.Module):
    """Linear to `hidden` features, activation, Linear back; (rows, width) in the residual layout.

    Args:
        activation: "gelu_tanh" (GELU in the tanh form of GPT-2), "gelu", "relu", or "swiglu": silu(gate) · up, as in
            Llama, where gate and up are one matrix of 2 hidden rows ordered (feature, {gate, up}), so that every rank
            holds the two that it multiplies.
        bias: of both matrices.
        algorithm: the matrix product; see `Linear`.
        std, std_out: standard deviations of the initial weights of `up` and `down`.

    Raises:
        ValueError: when the activation is none of these.
    """

    def __init__(
        self, grid: Grid, width: int, hidden: int, activation: str = "gelu_tanh", *, bias: bool = True,
        algorithm: str | Algorithm = "agarwal", std: float | None = None, std_out: float | None = None,
        key: RngKey | None = None, dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ):  # fmt: skip
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
        check_sizes(width=width, hidden=hidden)
        self.activation, key = activation, drawn_key(grid, key)
        linear = functools.partial(
            Linear, grid, bias=bias, algorithm=algorithm_of(grid, algorithm), dtype=dtype, device=device
        )
        unit = 2 if activation == "swiglu" else 1
        self.up = linear(width, unit * hidden, to="inner", out_unit=unit, std=std, key=key / "up")
        self.down = linear(hidden, width, to="residual", std=std_out, key=key / "down")

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return self.down(_ACTIVATIONS[self.activation](self.up(x, tokens)), tokens)

    def extra_repr(self) -> str:
        return self.activation


class _SwiGLU(torch.autograd.Function):
    """silu(gate) · up of (rows, features × {gate, up}). Keeps nothing but that.

    The gates are copied together first: torch's exponential is vectorised only where they lie side by side.
    """

    @staticmethod
    def forward(ctx, both):
        ctx.save_for_backward(both)
        gate, up = _columns(both)
        return F.silu(gate.clone(memory_format=torch.contiguous_format), inplace=True).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up = _columns(*ctx.saved_tensors)
        gate = gate.contiguous()
        grad_both = grad.new_empty(len(grad), 2 * grad.shape[1])
        grad_gate, grad_up = _columns(grad_both)
        torch.mul(grad, F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return grad_both


def _columns(both):
    return both.unflatten(1, (-1, 2)).unbind(2)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_tanh": gelu_tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "swiglu": _SwiGLU.apply,
}
