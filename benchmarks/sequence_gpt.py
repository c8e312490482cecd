"""A step of a GPT whose one sequence ranks share: of ours, and of peers_torch.py's with another's attention."""

import torch
import torch.nn.functional as F
from mpi4py import MPI
from peers_torch import GPT, adamw

import hpctrain as ht
from hpctrain.layers import Tokens
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.train import optimizer
from hpctrain.train.batches import Microbatch
from hpctrain.train.trainer import Trainer

HEADS, VOCABULARY = 8, 1024


def model_of(grid, length):
    shape = GPT2Shape(layers=2, width=256, heads=HEADS, context=length, vocabulary=VOCABULARY, tied=False)
    return GPT2(grid, shape, key=ht.RngKey(0), dtype=torch.float32)


def text(length):
    return torch.randint(VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(0))


def ours(data, length):
    """A step, and a list of this rank's share of its loss, on a grid of (ring, Ulysses) ranks."""
    grid = ht.Grid(data=(1, *data))
    model = model_of(grid, length)
    trainer = Trainer(model, grid, optimizer.make_optimizer(model.parameters(), 0.01))
    tokens, ids = Tokens.of(grid, 1, length), text(length)
    here = tokens.positions()
    batch = Microbatch(tokens, ids[0, here], ids[0, here + 1], 1 / length)

    def loss():
        return [trainer.step([batch])[0] / grid.world.size]

    return loss, loss


def theirs(attention, spans, length, alone):
    """The same with `attention` of the tokens at `spans`; `alone`: of all in this process, or none."""
    if attention is None:
        return lambda: None, lambda: [0.0]
    weights = {name: p.detach().clone() for name, p in model_of(ht.Grid(comm=MPI.COMM_SELF), length).named_parameters()}
    model = GPT(weights, HEADS, attention=attention)
    model.load_state_dict(weights)
    ranks = 1 if alone else MPI.COMM_WORLD.size
    wrapped = model if alone else torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    steps, ids = adamw(model.parameters()), text(length)
    here = torch.cat([torch.arange(span.start, span.stop) for span in spans])

    def loss():
        logits = wrapped(ids[:, here], here)
        total = F.cross_entropy(logits.flatten(0, 1), ids[0, here + 1], reduction="sum") / length
        (total * ranks).backward()  # of which the mean over ranks is taken
        steps.step()
        steps.zero_grad()
        return [float(total.detach())]

    return loss, loss
