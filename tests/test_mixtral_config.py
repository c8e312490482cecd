"""The section [model] of a mixture of experts: sizes, costs by hand, what is refused, and what its metrics say."""

import pytest
import torch

from hpctrain import models
from hpctrain.config import load_config
from hpctrain.layers.experts.balance import Load
from hpctrain.models.mixtral.huggingface import MixtralFormat
from hpctrain.train.expert_load import metrics, plot

SMALL = ["model.kind=mixtral", "model.width=24", "model.heads=4", "model.kv_heads=2", "model.layers=4"]
DEEPSEEK = [*SMALL, "model.router=sigmoid", "model.ffn=50", "model.expert_ffn=10", "model.experts=6",
            "model.dense_layers=1", "model.shared_experts=2"]  # fmt: skip


def shape(*overrides):
    config = load_config(overrides=list(overrides))
    return models.get("mixtral").shape(vars(config.model))


def test_costs_by_hand():
    """Attention 24 × (24 + 2·12) and 24 × 24, an expert 3·10·24, 6 of them and 3 for each token, shared 2 of them, the
    router 6·24; a dense layer 3·50·24."""
    costs = models.get("mixtral").costs(shape(*DEEPSEEK, "model.top_k=3"))
    attention, expert, router, dense = 24 * 48 + 24 * 24, 3 * 10 * 24, 6 * 24, 3 * 50 * 24
    assert costs.block_weights() == attention + 2 * expert + router + 6 * expert
    assert costs.block_weights(active=True) == attention + 2 * expert + router + 3 * expert
    assert costs.block_weights(dense=True) == costs.block_weights(dense=True, active=True) == attention + dense
    weights = 4 * attention + 3 * (5 * expert + router) + dense
    assert costs.flops_per_token == 6 * (weights + 257 * 24) + 12 * 4 * 24 * 128


def test_costs_are_those_of_the_model():
    """All parameters that are trained, and twice those that multiply a token as floating-point operations forward."""
    from mpi4py import MPI

    from hpctrain import Grid, RngKey

    made = shape(*DEEPSEEK, "model.tied=false", "model.qk_norm=true")
    model = models.get("mixtral").build(Grid(comm=MPI.COMM_SELF), made, key=RngKey(0), device=torch.device("cpu"))
    costs = models.get("mixtral").costs(made)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "wte" not in name)
    assert matrices == 3 * costs.block_weights() + costs.block_weights(dense=True) + 257 * 24


def test_what_is_left_out_is_mixtral_s_own():
    made = shape(*SMALL)
    assert (made.experts, made.top_k, made.expert_ffn, made.router, made.normalized) == (
        8,
        2,
        made.ffn,
        "softmax",
        True,
    )
    assert models.get("mixtral").describe(shape(*DEEPSEEK)) == (
        "mixtral: 4 layers, width 24, 4 heads of 6, 2 of keys, 6 experts with ffn 10 of which a token has 2 and 2 "
        "shared, 1 dense layers with ffn 50, context 128, vocabulary 257"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.top_k=9"], "model.top_k must be at most model.experts = 8, got 9"),
        (["model.dense_layers=4"], "model.dense_layers must leave a layer of experts, of model.layers = 4, got 4"),
        (["model.router=sigmoid", "model.router_groups=[3, 1]"], r"must divide model.experts = 8 .* got \[3, 1\]"),
        (["model.router=sigmoid", "model.router_groups=[4, 1]", "model.top_k=3"], r"have model.top_k = 3 experts"),
        (["model.router_groups=[2]"], r"model.router_groups must be \[groups, kept\], .* got \[2\]"),
        (["model.router_groups=[4, 2]"], r'router = "softmax" has no model.router_groups, got \[4, 2\]: Mixtral and'),
        (["model.balance_bias=0.1"], 'model.router = "softmax" has no model.balance_bias, got 0.1'),
        (["model.shared_experts=1"], 'model.router = "softmax" has no model.shared_experts, got 1'),
        (["model.router_scale=2.0"], 'model.router = "softmax" has no model.router_scale, got 2.0'),
        (["model.qkv_bias=true"], 'model.router = "softmax" has no model.qkv_bias, got True'),
        (["model.router_unnormalized=true"], "model.qk_norm = false has no model.router_unnormalized, got True"),
        (["model.dense_layers=1"], "model.qk_norm = false has no model.dense_layers, got 1"),
        (["model.router=sigmoid", "model.window=4"], 'model.router = "sigmoid" has no model.window, got 4'),
        (["model.kind=llama", "model.experts=4"], "model.kind = llama has no model.experts, got 4"),
        (["model.kind=llama", "grid.data=2", "grid.expert=2"], "model.kind = llama has not got; use grid.expert=1"),
        (["grid.data=2", "grid.expert=4"], "grid.expert"),
        (
            ["grid.pipeline=2", "pipeline.schedule=terapipe", "model.aux_loss=0.1"],
            r"model.aux_loss = 0.1 judges the experts of whole sequences, which token slices \(terapipe\) cut",
        ),
        (["grid.pipeline=2", "pipeline.schedule=terapipe", "model.capacity=1.0"], "model.capacity = 1.0 judges"),
        (
            ["grid.pipeline=2", "pipeline.schedule=pipedream", "model.tied=false", "train.clip=0",
             "model.router=sigmoid", "model.balance_bias=0.1"],
            "model.balance_bias = 0.1 changes after each step, .* pipedream updates weights on the way",
        ),
        (
            ["train.microbatches=2", "train.batch=4", "model.aux_loss=0.1", "model.aux_scope=step"],
            "model.aux_scope = step wants .*schedule = 1f1b with train.microbatches = 2 has not; use gpipe, or",
        ),
        (
            ["grid.data=2", "data_parallel.method=parameter_server", "data_parallel.staleness=1"],
            "data_parallel.staleness = 1 lets every rank go its own way; use 0",
        ),
    ],
)  # fmt: skip
def test_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(overrides=[*SMALL, *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        SMALL,
        [*SMALL, "model.qk_norm=true", "model.router_unnormalized=true", "model.dense_layers=2"],
        [*DEEPSEEK, "model.router_groups=[3, 2]", "model.router_scale=2.5", "model.qk_norm=true"],
        [*DEEPSEEK, "model.qkv_bias=true", "model.router_unnormalized=true"],
    ],
)
def test_options_of_a_config_are_those_it_was_written_from(overrides):
    made, format = shape(*overrides), MixtralFormat()
    found = format.options(format.config(made, 7))
    assert shape(*(f"model.{key}={str(value).lower()}" for key, value in found.items())) == made


@pytest.mark.parametrize(
    ("layers", "dense", "expected"),
    [
        (1, 0, (1, 0, [0])),
        (2, 0, (2, 0, [0, 1])),
        (5, 0, (3, 0, [0, 1, 1, 1, 2])),
        (2, 1, (2, 1, [0, 1])),
        (4, 1, (3, 1, [0, 1, 1, 2])),
        (6, 3, (4, 2, [0, 1, 1, 2, 2, 3])),
        (3, 2, (3, 2, [0, 1, 2])),
    ],
)
def test_what_stands_for_the_blocks(layers, dense, expected):
    """Of so many, the first ones dense: a shorter model, and which of its blocks each one is like."""
    made = shape(*SMALL, f"model.layers={layers}", f"model.dense_layers={dense}", "model.qk_norm=true")
    shorter, like = models.get("mixtral").shorter(made)
    assert (shorter.layers, shorter.dense_layers, like) == expected


def test_metrics():
    loads = {
        "blocks.1.mlp.router": Load((8, 0, 0, 0), 6, 0.5, 0.0),
        "blocks.2.mlp.router": Load((2, 2, 2, 2), 0, 1.0, 2.0),
    }
    found = metrics(loads)
    assert (found["aux_loss"], found["z_loss"]) == (1.5, 2.0)
    assert found["experts"] == {
        "load": [[1, 0, 0, 0], [0.25] * 4], "imbalance": [4, 1], "entropy": [0, 1], "dropped": [0.75, 0],
    }  # fmt: skip
    assert metrics({}) == {}
    empty = metrics({"router": Load((0,), 0, 0.0, 0.0)})["experts"]
    assert empty == {"load": [[0]], "imbalance": [0], "entropy": [1], "dropped": [0]}


def test_plot(tmp_path):
    records = [{"step": step, **metrics({"a": Load((step, 2), 0, 0.0, 0.0)})} for step in (1, 2)]
    plot(records, tmp_path / "experts.png")
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")
    plot([{"step": 1, "loss": 2.0}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
