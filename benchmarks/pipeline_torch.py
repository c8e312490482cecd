"""The GPT of benchmarks/peers_torch.py cut into stages, and training it with torch.distributed.pipelining over gloo."""

import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from peers_torch import GPT, adamw
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}


class Part(nn.Module):
    """One stage: ids or the residual stream, (sequences, length[, width]), to the residual stream or logits."""

    def __init__(self, gpt, blocks, first, last):
        super().__init__()
        self.blocks = nn.ModuleList(gpt.blocks[i] for i in blocks)
        if first:
            self.wte, self.wpe = gpt.wte, gpt.wpe
        if last:
            self.ln_f, self.head = gpt.ln_f, gpt.head
        self.first, self.last = first, last

    def forward(self, x):
        if self.first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x)) if self.last else x


def parts(weights, heads, cut):
    """All stages of the model, `cut` blocks each."""
    gpt = GPT(weights, heads)
    gpt.load_state_dict(weights)
    starts = [0, *itertools.accumulate(cut)]
    last = len(cut) - 1
    return [Part(gpt, range(starts[s], starts[s + 1]), s == 0, s == last) for s in range(len(cut))]


def torch_pipelining(name, weights, heads, cut, placement, batch, microbatches):
    """A function that takes a step and returns this rank's part of the loss."""
    rank = dist.get_rank()
    mine = {s: part for s, part in enumerate(parts(weights, heads, cut)) if placement[0, s] == rank}
    stages = [PipelineStage(part, s, len(cut), torch.device("cpu")) for s, part in mine.items()]
    ids, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    def loss(logits, targets):  # a sum, so that nothing need scale the gradients
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / ids.numel()

    kind = SCHEDULES[name]
    several = name in ("interleaved", "zb-v")
    schedule = kind(stages if several else stages[0], microbatches, loss, scale_grads=False)
    optimizer = adamw(itertools.chain.from_iterable(part.parameters() for part in mine.values()))
    inputs = (ids,) if 0 in mine else ()
    target = targets if len(cut) - 1 in mine else None

    def step():
        losses: list[torch.Tensor] = []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses)

    return step
