"""Training the GPT of benchmarks/peers_torch.py, cut into stages, with DeepSpeed's PipelineModule over gloo."""

import itertools
import logging
import os

import torch.distributed as dist
import torch.nn.functional as F
from peers_torch import adamw
from pipeline_torch import parts

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.pipe import PipelineModule
from deepspeed.utils import logger

logger.setLevel(logging.ERROR)


def deepspeed_pipeline(name, weights, heads, cut, placement, batch, microbatches):
    """A function that takes a step and returns this rank's part of the loss. DeepSpeed has one schedule, 1F1B."""
    assert name == "1f1b"
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)

    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    # one layer a stage, so that "uniform" is this cut
    model = PipelineModule(parts(weights, heads, cut), num_stages=len(cut), loss_fn=loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config={
            "train_batch_size": len(batch),
            "train_micro_batch_size_per_gpu": len(batch) // microbatches,
            "gradient_clipping": 0.0,  # 1 by default
            "steps_per_print": 1 << 30,
        },
    )
    samples = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in batch.tensor_split(microbatches)]
    stream = itertools.cycle(samples)

    def step():
        value = float(engine.train_batch(stream))
        return value / len(cut)  # every stage has the mean

    return step
