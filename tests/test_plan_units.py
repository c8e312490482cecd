"""What the units of anybody's model take on a machine: as much as a prediction of a model of this package has."""

import dataclasses

import pytest
import torch
from torch import nn

import hpctrain as ht
from hpctrain.config import load_config
from hpctrain.plan import Machine
from hpctrain.plan import job as jobs
from hpctrain.plan.for_model import unit_graph
from hpctrain.plan.network import Network
from hpctrain.plan.passes import Box

pytestmark = pytest.mark.mpi


class Scores(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal, self.qkv = causal, nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Written(Scores):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
        return (q @ k.mT).softmax(-1) @ v


@pytest.mark.ranks(2)
def test_attention_that_is_written_out(world):
    """Two products of 512² × 2 in each of 3 · 4 heads; backward has two of each, whose factors are at hand."""
    on = Machine.load("cpu-cluster")
    graph = unit_graph(Written(False), ht.Grid(tensor=2), torch.ones(3, 512, 8), on, (), False)
    rate = on.peak["fp32"] * on.device.product * on.device.attention
    expected = 3 * 2 * 3 * 4 * 2 * 512**2 * 2 / rate
    assert sum(map(graph._mixing, graph.work)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("causal", [True, False])
def test_attention(world, causal):
    """Of three sequences of 512 tokens, where a score costs something and the rate depends on the length."""
    on = Machine.load("cpu-cluster")
    figures = {"score": 1e-9, "long_attention": 0.7, "long_score": 3e-9}
    on = dataclasses.replace(on, device=dataclasses.replace(on.device, **figures))
    job, choice = jobs.read(
        load_config(overrides=["model.width=8", "model.heads=4", "model.context=512", "train.batch=3"])
    )
    box = Box(job, on, Network(on), choice)
    graph = unit_graph(Scores(causal), ht.Grid(tensor=2), torch.ones(3, 512, 8), on, (), False)
    (work,) = (work for work in graph.work if work.attention)
    expected = (1 + 2.5) * box.attention / (1 if causal else on.software.attended)
    assert graph._mixing(work) == pytest.approx(expected, rel=1e-12)
