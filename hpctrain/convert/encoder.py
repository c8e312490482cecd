"""torch.nn.TransformerEncoder: without the nested tensors that it makes of padded batches in evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


class PaddedEncoder(nn.TransformerEncoder):
    """Mixin for nn.TransformerEncoder, whose layers take padded tensors only.

    Where torch would leave the padding out, as a nested tensor, and fill its place with zeros before the last norm,
    the result here has the same zeros.

    Attributes: `nests`, whether torch found the layers fit for nested tensors.
    """

    nests: bool

    def forward(
        self,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ):
        leaves_out = self.nests and mask is None and self._leaves_out(src, src_key_padding_mask)
        if src_key_padding_mask is None or not leaves_out:
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        norm, self.norm = self.norm, None
        try:
            out = super().forward(src, None, src_key_padding_mask, is_causal)
        finally:
            self.norm = norm
        out = out.masked_fill(_padding(src_key_padding_mask).unsqueeze(-1), 0)
        return out if norm is None else norm(out)

    def _leaves_out(self, src, padding) -> bool:
        """The conditions of nn.TransformerEncoder.forward."""
        if padding is None or self.layers[0].training or src.dim() != 3 or torch.is_autocast_enabled():
            return False
        learns = src.requires_grad or any(parameter.requires_grad for parameter in self.layers[0].parameters())
        return (
            torch.backends.mha.get_fastpath_enabled()
            and not (torch.is_grad_enabled() and learns)
            and torch._nested_tensor_from_mask_left_aligned(src, ~_padding(padding))
        )


def _padding(mask: torch.Tensor) -> torch.Tensor:
    """True where a key is left out."""
    return mask if mask.dtype == torch.bool else mask == -torch.inf


def pad_encoder(plan: Plan, module: torch.nn.Module) -> None:
    """Unless it is a subclass with a forward of its own."""
    if type(module).forward is nn.TransformerEncoder.forward:
        plan.swap_class(module, PaddedEncoder, nests=module.use_nested_tensor)
        plan.change(module, use_nested_tensor=False)
