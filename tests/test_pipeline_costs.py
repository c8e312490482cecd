"""Costs of a pipeline's stages, as benchmarks/pipeline.py measures them for the simulator."""

import importlib

import pytest
import torch
from running import ROOT

from hpctrain import Grid, RngKey
from hpctrain.layers import SplitBackward, Tokens
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.pipeline import schedule


@pytest.mark.mpi
@pytest.mark.ranks(1)
def test_put_off_weight_gradients_keep_inputs_and_gradients(world, monkeypatch):
    """Of a block's four matrices, which are all that this stage has."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    costs = importlib.import_module("pipeline_costs")
    grid, width = Grid(), 8
    placement = schedule("interleaved", 1, 1, virtual_stages=3).placement
    shape = GPT2Shape(3, width, 2, 4, 11, tied=False)
    model = GPT2(grid, shape, (1, 1, 1), placement=placement, key=RngKey(0), dtype=torch.float32)
    tokens = Tokens.of(grid, 2, 4)
    rows = 2 * 4
    x = torch.randn(rows, width).requires_grad_()
    found = costs.kept(lambda x: model(x, tokens, 1), x, SplitBackward(model))
    widths = (1 + 3, 1 + 1, 1 + 4, 4 + 1)  # of inputs and of outputs' gradients
    assert found == rows * width * sum(widths) * torch.float32.itemsize
