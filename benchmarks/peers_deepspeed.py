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


def deepspeed_zero(stage, weights, heads, batch):
    """A function that takes a step on this rank's part of the batch, the mean of whose losses is the loss."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    model = GPT(weights, heads)
    model.load_state_dict(weights)
    ranks = dist.get_world_size()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config={
            "train_batch_size": len(batch),
            "train_micro_batch_size_per_gpu": len(batch) // ranks,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # 1 by default
            "steps_per_print": 1 << 30,
        },
    )
    mine = batch.tensor_split(ranks)[dist.get_rank()]
    ids, targets = mine[:, :-1], mine[:, 1:]

    def step():
        loss = F.cross_entropy(engine(ids).flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
