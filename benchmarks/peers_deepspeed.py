"""Training the GPT of benchmarks/peers_torch.py with DeepSpeed's ZeRO over gloo."""

import logging
import os

import torch.distributed as dist
import torch.nn.functional as F
from peers_torch import GPT, adamw

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.utils import logger

logger.setLevel(logging.ERROR)


def begin():
    """Let DeepSpeed find this rank in torch's default group, before its modules are made."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)


def engine(model, batch, pieces, **settings):
    """DeepSpeed's engine of a model whose batch is cut into `pieces`, with the optimizer of the other sides."""
    config = {
        "train_batch_size": len(batch),
        "train_micro_batch_size_per_gpu": len(batch) // pieces,
        "gradient_clipping": 0.0,  # 1 by default
        "steps_per_print": 1 << 30,
    }
    return deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config | settings)[0]


def deepspeed_zero(stage, weights, heads, batch):
    """A function that takes a step on this rank's part of the batch, the mean of whose losses is the loss."""
    begin()
    model = GPT(weights, heads)
    model.load_state_dict(weights)
    ranks = dist.get_world_size()
    settings = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    made = engine(model, batch, ranks, **settings)
    mine = batch.tensor_split(ranks)[dist.get_rank()]
    ids, targets = mine[:, :-1], mine[:, 1:]

    def step():
        loss = F.cross_entropy(made(ids).flatten(0, 1), targets.flatten())
        made.backward(loss)
        made.step()
        return loss.detach()

    return step
