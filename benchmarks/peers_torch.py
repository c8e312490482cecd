"""The GPT of benchmarks/peers.py in plain torch modules, and training it with torch's own parallelism over gloo.

The linear layers are given, so that a peer with its own parallel ones puts them in the same model.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def causal_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, width, heads, column, row, attend):
        super().__init__()
        self.head_width, self.attend = width // heads, attend
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.ModuleDict({"qkv": column(width, 3 * width), "proj": row(width, width)})
        self.mlp = nn.ModuleDict({"up": column(width, 4 * width), "down": row(4 * width, width)})

    def forward(self, x):
        # (sequences, length, head, {q, k, v}, feature); the number of heads follows from what this rank's matrix gives
        qkv = self.attention["qkv"](self.ln_1(x)).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = qkv.transpose(1, 2).unbind(3)
        h = self.attend(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.attention["proj"](h)
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Parameters have the names of hpctrain.models.gpt2.GPT2, and their shapes where the layers hold whole matrices.

    Args:
        weights: name -> whole tensor; they give all sizes but the number of heads.
        column, row: make a linear layer from its numbers of input and output features, split along the output and along
            the input.
        embedding: makes the table of tokens from its numbers of rows and columns.
        head: makes the projection onto the vocabulary, without bias, like `column`.
        attention: of queries, keys and values, (sequences, heads, tokens, features).
    """

    def __init__(
        self, weights, heads, column=nn.Linear, row=nn.Linear, embedding=nn.Embedding,
        head=lambda n, m: nn.Linear(n, m, bias=False), attention=causal_attention,
    ):  # fmt: skip
        super().__init__()
        vocabulary, width = weights["wte.weight"].shape
        layers = sum(name.endswith("ln_1.weight") for name in weights)
        self.wte = embedding(vocabulary, width)
        self.wpe = nn.Embedding(*weights["wpe.weight"].shape)
        self.blocks = nn.ModuleList(Block(width, heads, column, row, attention) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), head(width, vocabulary)

    def forward(self, ids, positions=None):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device) if positions is None else positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def adamw(parameters):
    """The settings of hpctrain.train.optimizer.make_optimizer."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


def torch_ddp(weights, heads, batch, sharded=None):
    """torch's DistributedDataParallel over gloo, gradients as views of its buckets. `sharded` is the class of an
    optimizer that spreads its state."""
    model = GPT(weights, heads).to(batch.device)
    model.load_state_dict(weights)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(model.parameters())
    if sharded is not None:
        settings = {"lr": 1e-3, "betas": (0.9, 0.95), "fused": True}
        groups = [{k: group[k] for k in ("params", "weight_decay")} for group in optimizer.param_groups]
        optimizer = sharded(groups, torch.optim.AdamW, **settings)
    return _step(wrapped, optimizer, batch)


def _step(model, optimizer, batch):
    """A step on this rank's part of the batch, the mean of whose losses is the loss."""
    mine = batch.tensor_split(dist.get_world_size())[dist.get_rank()]
    ids, targets = mine[:, :-1], mine[:, 1:]

    def step():
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def torch_zero_redundancy(weights, heads, batch):
    """torch's ZeroRedundancyOptimizer (ZeRO-1) on DistributedDataParallel."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return torch_ddp(weights, heads, batch, ZeroRedundancyOptimizer)


def torch_fsdp(weights, heads, batch, reshard):
    """torch's FSDP2: every block is a unit, the rest another. With `reshard` weights are freed after forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(batch.device.type, (dist.get_world_size(),))
    model = GPT(weights, heads).to(batch.device)
    model.load_state_dict(weights)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return _step(model, adamw(model.parameters()), batch)


def torch_tensor_parallel(weights, heads, batch):
    """torch.distributed.tensor.parallel over gloo: column and row plans, vocabulary-parallel output and loss."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh(batch.device.type, (dist.get_world_size(),))
    model = GPT(weights, heads).to(batch.device)
    model.load_state_dict(weights)
    plan = {"wte": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    for i in range(len(model.blocks)):
        plan.update({f"blocks.{i}.{name}": ColwiseParallel() for name in ("attention.qkv", "mlp.up")})
        plan.update({f"blocks.{i}.{name}": RowwiseParallel() for name in ("attention.proj", "mlp.down")})
    parallelize_module(model, mesh, plan)
    # fused steps refuse a mixture of DTensors and tensors, so one optimizer for each
    split_parameters = [p for p in model.parameters() if hasattr(p, "device_mesh")]
    whole_parameters = [p for p in model.parameters() if not hasattr(p, "device_mesh")]
    optimizers = [adamw(p) for p in (split_parameters, whole_parameters)]
    ids, targets = batch[:, :-1], batch[:, 1:]

    def step():
        with loss_parallel():
            loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach().full_tensor()

    return step
