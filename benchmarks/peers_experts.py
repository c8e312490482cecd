"""Layers of experts of Megatron-core, DeepSpeed and transformers on a CPU, over gloo, with given weights.

Each function takes the whole weights of ours, the numbers of experts and of those that a token has, and an expert's
inner width, and gives a function of this rank's tokens. Megatron-core asks for the current CUDA device, which is
answered with the CPU, and moves counts by streams; it computes on what it is given.
"""

import contextlib
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

WIDTH = 256


def counts_on_processor(self, point, tokens_per_expert=None):
    """Megatron-core's move of its counts to the host, which needs no streams where they are there."""
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(self, name)
            setattr(self, name, splits.tolist() if isinstance(splits, torch.Tensor) else splits)
    return tokens_per_expert


def megatron_layer(dispatcher, weights, experts, top_k, ffn):
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.moe.experts import SequentialMLP
        from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_config import TransformerConfig

    ranks, rank = dist.get_world_size(), dist.get_rank()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    torch.cuda.current_device = lambda: "cpu"
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"  # it makes one otherwise
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = counts_on_processor
    moe_utils.te_general_gemm = None  # it reads the name also where Transformer Engine, which defines it, is not there
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=4, num_moe_experts=experts, moe_ffn_hidden_size=ffn,
        ffn_hidden_size=ffn, moe_router_topk=top_k, moe_router_load_balancing_type="none", add_bias_linear=False,
        moe_token_dispatcher_type=dispatcher, expert_model_parallel_size=ranks, use_cpu_initialization=True,
        gated_linear_unit=True, activation_func=F.silu, bias_activation_fusion=False, moe_grouped_gemm=False,
    )  # fmt: skip
    parts = ModuleSpec(
        SequentialMLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    layer = MoELayer(config, MoESubmodules(experts=parts), layer_number=1)
    layer.set_layer_number(1)
    local = experts // ranks
    with torch.no_grad():
        layer.router.weight.copy_(weights["router.weight"])
        for number, expert in enumerate(layer.experts.local_experts):
            expert.linear_fc1.weight.copy_(weights["experts.up"][rank * local + number].flatten(0, 1))
            expert.linear_fc2.weight.copy_(weights["experts.down"][rank * local + number])
    return lambda x: layer(x.unsqueeze(1))[0].squeeze(1)


class Expert(torch.nn.Module):
    """As Mixtral's, for DeepSpeed, which makes copies of it."""

    def __init__(self, ffn):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * ffn, bias=False)
        self.down = torch.nn.Linear(ffn, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def deepspeed_layer(drops, weights, experts, top_k, ffn):
    """With `drops`, an expert takes the mean of all experts' tokens at most."""
    with contextlib.redirect_stdout(sys.stderr):  # it prints
        import peers_deepspeed
        from deepspeed.moe.layer import MoE

        peers_deepspeed.begin()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        layer = MoE(
            WIDTH, Expert(ffn), experts, ep_size=ranks, k=top_k, capacity_factor=1.0, min_capacity=0, drop_tokens=drops,
            use_rts=False, top2_2nd_expert_sampling=False,
        )  # fmt: skip
        layer.set_deepspeed_parallelism()
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(weights["router.weight"])
        for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts, rank * (experts // ranks)):
            expert.up.weight.copy_(weights["experts.up"][number].flatten(0, 1))
            expert.down.weight.copy_(weights["experts.down"][number])
    return lambda x: layer(x.unsqueeze(0))[0].squeeze(0)


def transformers_layer(weights, experts, top_k, ffn):
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=ffn, num_local_experts=experts, num_experts_per_tok=top_k
    )
    config._experts_implementation = "grouped_mm"  # as in its models, and the fastest it has
    layer = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        layer.gate.weight.copy_(weights["router.weight"])
        layer.experts.gate_up_proj.copy_(weights["experts.up"].flatten(1, 2))
        layer.experts.down_proj.copy_(weights["experts.down"])
    return lambda x: layer(x.unsqueeze(0))[0]
