"""The mixture of experts of a transformer block."""

from __future__ import annotations

import torch

from hpctrain.grid import Grid
from hpctrain.layers.algorithm import Algorithm
from hpctrain.layers.experts.experts import Experts
from hpctrain.layers.experts.router import Router
from hpctrain.layers.experts.whole_rows import WholeRows
from hpctrain.layers.mlp import MLP
from hpctrain.layers.parameter import Factory, check_shape, check_sizes, check_tokens, drawn_key
from hpctrain.layers.tokens import Tokens
from hpctrain.randomness import RngKey
from hpctrain.shard import split_sizes


class Mixture(torch.nn.Module):
    """Stands where an `MLP` stands in a block: (rows, features) in the residual layout. Every token goes through the
    `top_k` of the experts that `router` chooses for it, and through the shared ones.

    Args:
        ffn: inner width of an expert.
        shared_experts: how many experts all tokens go through, which are one `MLP` of their widths together.
        shared_ffn: inner width of each of them, by default that of the others.
        std, std_out: as of `Experts` and `MLP`.

    The others are as of `Router` and `Experts`.

    Source: DeepSeek-AI, "DeepSeekMoE" (2024), of shared experts.
    """

    def __init__(
        self, grid: Grid, features: int, ffn: int, experts: int, top_k: int, *, shared_experts: int = 0,
        shared_ffn: int | None = None, scores: str = "softmax", normalized: bool = True, groups: int = 1,
        groups_kept: int = 1, scale: float = 1.0, aux_loss: float = 0.0, aux_scope: str = "sequence",
        z_loss: float = 0.0, balance_bias: float = 0.0, jitter: float = 0.0, activation: str = "swiglu",
        capacity: float = 0.0, capacity_policy: str = "probability", dispatch: str = "auto", replicate_hot: int = 0,
        algorithm: str | Algorithm = "agarwal", std: float | None = None, std_out: float | None = None,
        key: RngKey | None = None, dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ):  # fmt: skip
        super().__init__()
        check_sizes(features=features, ffn=ffn)
        self.columns = split_sizes(features, grid.tensor.y.size)[grid.tensor.y.rank]
        self.grid, self.features, key = grid, features, drawn_key(grid, key)
        factory = Factory(dtype=dtype, device=device)
        self.router = Router(
            grid, features, experts, top_k, scores=scores, normalized=normalized, groups=groups,
            groups_kept=groups_kept, scale=scale, aux_loss=aux_loss, aux_scope=aux_scope, z_loss=z_loss,
            balance_bias=balance_bias, jitter=jitter, std=std, key=key / "router", **factory,
        )  # fmt: skip
        self.experts = Experts(
            grid, features, ffn, experts, activation=activation, capacity=capacity, capacity_policy=capacity_policy,
            dispatch=dispatch, replicate_hot=replicate_hot, std=std, std_out=std_out, key=key / "experts", **factory,
        )  # fmt: skip
        self.shared = None
        if shared_experts:
            self.shared = MLP(
                grid, features, shared_experts * (ffn if shared_ffn is None else shared_ffn), activation, bias=False,
                algorithm=algorithm, std=std, std_out=std_out, key=key / "shared", **factory,
            )  # fmt: skip

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        check_tokens(self, self.grid, tokens)
        check_shape(self, x, (tokens.local_rows, self.columns))
        rows = WholeRows(self.grid, tokens)
        whole = rows.enter(x, self.features)
        beside: list[torch.Tensor] = []

        def shared() -> None:
            assert self.shared is not None
            beside.append(self.shared(x, tokens))

        routing, meanwhile = self.router(whole, tokens), None if self.shared is None else shared
        mixed = rows.leave(self.experts(routing.x, routing, meanwhile), self.features)
        return mixed + beside[0] if beside else mixed
