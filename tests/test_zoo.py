"""Tiny models of Hugging Face by the one line alone: the start of benchmarks/zoo.py, which has a hundred."""

import copy
from pathlib import Path

import pytest
import torch

import hpctrain as ht

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.mpi

MODELS = {  # by the number of ranks, over which all is even, and not
    2: "mixtral qwen3 gpt_neox gptj falcon bert bart vit clip convnext".split(),
    3: "phi gemma2 opt mamba deberta-v2 t5 whisper dinov2 swin wav2vec2".split(),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.ranks(ranks)) for ranks, names in MODELS.items() for name in names],
)
def test_model(world, monkeypatch, name):
    """Outputs and gradients in float64 are those of the untouched model, and nearly all weights are divided."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import zoo

    result = zoo.tried(f"transformers/{name}", ht.Grid(tensor=world.size))
    assert result.keys() == {"divided", "whole", "difference", "bytes"}, result
    assert result["difference"] < 1e-11
    assert result["divided"] >= 0.8
    of_rank, whole = result["bytes"]
    assert of_rank < 0.7 * whole


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["qwen3", "gpt_neox", "bart", "t5"])
def test_generate(world, monkeypatch, name):
    """With caches, which hold this rank's heads."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import zoo_models

    torch.manual_seed(0)
    serial, inputs = zoo_models.models()[f"transformers/{name}"]()
    serial = serial.double().eval()
    model = ht.parallelize(copy.deepcopy(serial), ht.Grid(tensor=world.size))
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": True, "decoder_start_token_id": 1}
    expected, got = (m.generate(inputs["input_ids"], **how) for m in (serial, model))
    assert torch.equal(got, expected)
