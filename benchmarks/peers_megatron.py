"""Training the GPT of benchmarks/peers.py with Megatron-core's tensor-parallel layers and loss over gloo.

Megatron-core's layers need no GPU where `use_cpu_initialization` is set and sequence parallelism is not: its all-gather
and reduce-scatter allocate on the CUDA device. Everything that moves data or multiplies is Megatron-core's: embedding,
linear layers, loss. The rest is that of `peers_torch.GPT`; its fused attention is faster on a CPU than Megatron-core's.
"""

import os
import warnings

import torch
import torch.distributed as dist
from peers_torch import GPT, adamw

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # it warns otherwise; nothing here is on a GPU
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not installed
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        vocab_parallel_cross_entropy,
    )


class Column(ColumnParallelLinear):
    def forward(self, x):
        return super().forward(x)[0]  # (output, bias that is left to add: none)


class Row(RowParallelLinear):
    def forward(self, x):
        return super().forward(x)[0]


def megatron_tensor_parallel(weights, heads, batch):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(ranks)
    config = ModelParallelConfig(tensor_model_parallel_size=ranks, use_cpu_initialization=True)
    made = {"config": config, "init_method": torch.nn.init.zeros_}
    model = GPT(
        weights,
        heads,
        column=lambda n, m: Column(n, m, **made),
        row=lambda n, m: Row(n, m, bias=True, input_is_parallel=True, skip_bias_add=False, **made),
        embedding=lambda n, m: VocabParallelEmbedding(n, m, **made),
        head=lambda n, m: Column(n, m, bias=False, **made),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = weights[name]
            if getattr(parameter, "tensor_model_parallel", False):
                whole = whole.chunk(ranks, parameter.partition_dim)[rank]
            parameter.copy_(whole)
    optimizer = adamw(model.parameters())
    ids, targets = batch[:, :-1], batch[:, 1:].contiguous()

    def step():
        loss = vocab_parallel_cross_entropy(model(ids), targets).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
