"""A whole step of a Mixtral, ours and transformers', for `experts.py --step`.

4 layers, width 256, 4 heads of which 2 of keys, 8 experts of inner width 512 of which a token has 2, vocabulary 4096;
8 × 256 tokens a step over all ranks, other ones in each step; fused AdamW, nothing clipped, no auxiliary loss. Both
sides start from the same weights, which ours writes in Hugging Face's format.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mpi4py import MPI
from peers_torch import adamw

import hpctrain as ht
from hpctrain import models
from hpctrain.layers import Tokens
from hpctrain.models.export import export
from hpctrain.models.mixtral import MixtralShape
from hpctrain.shard import split
from hpctrain.train import optimizer
from hpctrain.train.batches import Microbatch
from hpctrain.train.trainer import Trainer

SEQUENCES, LENGTH, VOCABULARY = 8, 256, 4096
SHAPE = MixtralShape(
    layers=4, width=256, heads=4, kv_heads=2, head_width=64, ffn=512, context=LENGTH, vocabulary=VOCABULARY,
    rope_base=1e4, norm_eps=1e-5, tied=False, experts=8, top_k=2, expert_ffn=512,
)  # fmt: skip


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)


def ours(dispatch):
    """A function of a step's number that takes the step and returns its loss."""
    world = MPI.COMM_WORLD
    grid = ht.Grid(data=world.size, expert=world.size)
    model = models.get("mixtral").build(grid, SHAPE, key=ht.RngKey(0), dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, ht.layers.Experts):
            module.dispatch = dispatch
    trainer = Trainer(model, grid, optimizer.make_optimizer(model.parameters(), 0.01))
    part = split(SEQUENCES, grid.data.size, grid.data.rank)

    def step(number):
        rows = batch_of(number)[part]
        tokens = Tokens.of(grid, len(rows), LENGTH, part.start, number)
        scale = 1 / (SEQUENCES * LENGTH)
        return trainer.step([Microbatch(tokens, rows[:, :-1].reshape(-1), rows[:, 1:].reshape(-1), scale)])[0]

    return step


def transformers(parallel):
    """The same by transformers' model: "ddp", in torch's DistributedDataParallel; "ep", its own expert parallelism with
    FSDP2. The loss is this rank's mean, and gradients are means over ranks."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    transformers.modeling_utils.check_and_set_device_map = lambda device_map: None  # which asks for accelerate
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    with tempfile.TemporaryDirectory() as own:
        folder = Path(MPI.COMM_WORLD.bcast(own))
        if rank == 0:
            alone = ht.Grid(comm=MPI.COMM_SELF)
            model = models.get("mixtral").build(alone, SHAPE, key=ht.RngKey(0), dtype=torch.float32)
            export(models.get("mixtral"), model, alone, folder)
        MPI.COMM_WORLD.Barrier()
        how = {"distributed_config": DistributedConfig(fsdp_size=ranks, ep_size=ranks)} if parallel == "ep" else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).train()
        MPI.COMM_WORLD.Barrier()
    called = model
    if parallel == "ddp":
        called = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    steps, part = adamw(model.parameters()), split(SEQUENCES, ranks, rank)

    def step(number):
        rows = batch_of(number)[part]
        logits = called(rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].reshape(-1))
        loss.backward()
        steps.step()
        steps.zero_grad()
        return loss.detach()

    return step
