"""Mixtral: a Llama whose MLPs are mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.layers.experts.mixture import Mixture
from hpctrain.models.llama.model import Llama


class Mixtral(Llama):
    """This rank's part of a Mixtral; arguments as of `StagedTransformer`, with a `MixtralShape`."""

    def make_mlp(self, index: int, **options: Any) -> torch.nn.Module:
        shape = self.shape
        if index < shape.dense_layers:
            return super().make_mlp(index, **options)
        return Mixture(
            self.grid, shape.width, shape.expert_ffn, shape.experts, shape.top_k, scores=shape.router,
            normalized=shape.normalized, groups=shape.groups, groups_kept=shape.groups_kept, scale=shape.scale,
            shared_experts=shape.shared_experts, aux_loss=shape.aux_loss, aux_scope=shape.aux_scope,
            z_loss=shape.z_loss, balance_bias=shape.balance_bias, capacity=shape.capacity,
            capacity_policy=shape.capacity_policy, jitter=shape.jitter, **options,
        )  # fmt: skip
