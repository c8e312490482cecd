"""What an expert does between its two products: an activation, times the weight of each row."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class SwiGLU:
    """silu(gate) · up of (rows, {gate, up} × ffn)."""

    unit = 2  # rows of the first product for each row of the result

    @staticmethod
    def forward(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(rows, ffn), times weight[r] in row r."""
        gate, up = _halves(hidden)
        return F.silu(gate).mul_(up).mul_(weight[:, None])

    @staticmethod
    def backward(
        hidden: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `forward` gave, and the gradients of `hidden` and `weight`; overwrites `grad`."""
        gate, up = _halves(hidden)
        grad_hidden = torch.empty_like(hidden)
        grad_gate, grad_up = _halves(grad_hidden)
        activated = F.silu(gate)
        y = activated * up
        grad_weight = torch.linalg.vecdot(grad.to(weight.dtype), y.to(weight.dtype))
        weight = weight[:, None]
        torch.mul(grad.mul_(weight), activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=grad_gate)
        return y.mul_(weight), grad_hidden, grad_weight


def _halves(hidden):
    return hidden.split_with_sizes([hidden.shape[1] // 2] * 2, 1)


class GELU:
    """gelu(hidden) of (rows, ffn); methods as of `SwiGLU`."""

    unit = 1

    @staticmethod
    def forward(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.gelu(hidden).mul_(weight[:, None])

    @staticmethod
    def backward(
        hidden: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = F.gelu(hidden)
        grad_weight = torch.linalg.vecdot(grad.to(weight.dtype), y.to(weight.dtype))
        grad_hidden = torch.ops.aten.gelu_backward(grad.mul_(weight[:, None]), hidden)
        return y.mul_(weight[:, None]), grad_hidden, grad_weight


ACTIVATIONS: dict[str, type[SwiGLU] | type[GELU]] = {"swiglu": SwiGLU, "gelu": GELU}
