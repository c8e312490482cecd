"""Training the GPT of benchmarks/peers_torch.py, cut into stages, with DeepSpeed's PipelineModule over gloo."""

import itertools

import torch.nn.functional as F
from peers_deepspeed import begin, engine
from pipeline_torch import parts


def deepspeed_pipeline(name, weights, heads, cut, placement, batch, microbatches):
    """A function that takes a step and returns this rank's part of the loss. DeepSpeed has one schedule, 1F1B."""
    assert name == "1f1b"
    from deepspeed.pipe import PipelineModule  # after peers_deepspeed, which chooses the accelerator

    begin()

    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    # one layer a stage, so that "uniform" is this cut
    model = PipelineModule(parts(weights, heads, cut), num_stages=len(cut), loss_fn=loss, partition_method="uniform")
    made = engine(model, batch, microbatches)
    samples = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in batch.tensor_split(microbatches)]
    stream = itertools.cycle(samples)

    def step():
        value = float(made.train_batch(stream))
        return value / len(cut)  # every stage has the mean

    return step
