"""Mixtral and its kin: training on every kind of grid equals the serial program's, by every method; and generation."""

import dataclasses

import pytest
import torch
from reference_experts import Mixtures
from test_pipeline_training import check_delayed
from training_checks import CORNERS, batches, check, check_strategy, fitting, in_turn, made, microbatches, serial

from hpctrain import Grid, RngKey
from hpctrain.config import DataParallelConfig
from hpctrain.data_parallel import Precision, make
from hpctrain.models.mixtral import Mixtral, MixtralShape
from hpctrain.pipeline import schedule
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(*CORNERS)]

# Nothing divides: 3 groups of 2 heads, width 15, 5 experts of inner width 7 and vocabulary 23 over 2, 4, 8 ranks.
MIXTRAL = MixtralShape(
    layers=9, width=15, heads=6, context=8, vocabulary=23, kv_heads=3, ffn=21, head_width=6, rope_base=10.0,
    experts=5, top_k=2, expert_ffn=7, aux_loss=0.5, z_loss=0.01,
)  # fmt: skip
QWEN3 = dataclasses.replace(
    MIXTRAL, qk_norm=True, norm_eps=1e-3, normalized=False, dense_layers=1, experts=3, top_k=3, tied=False
)
DEEPSEEK = dataclasses.replace(
    MIXTRAL, router="sigmoid", qk_norm=True, experts=6, top_k=3, groups=3, groups_kept=2, scale=2.5, shared_experts=2,
    dense_layers=1, balance_bias=0.03, z_loss=0.0,
)  # fmt: skip


# Of each two ranks both have half of their experts' features, of 7.
DIVIDED = {2: [(2, 1, 1, 2), (1, 1, 2, 2)], 4: [(4, 1, 1, 4), (2, 1, (1, 2, 1), 4), (2, 2, 1, 2)]}


@pytest.mark.ranks(*DIVIDED)
@pytest.mark.parametrize(("method", "recompute"), [("ddp", "none"), ("zero3", "block")])
def test_experts_that_ranks_divide(world, case, method, recompute):
    for data, pipeline, tensor, expert in in_turn(DIVIDED, world.size, case):
        shape = dataclasses.replace(fitting(DEEPSEEK, pipeline), capacity=1.1)
        with Grid(data, pipeline, tensor, expert=expert, expert_tensor=2) as grid:
            model = made(grid, shape, recompute=recompute)
            check_strategy(method, model, grid, shape, 2, serial(shape, 1.0))


def experts_over(ranks):
    """Numbers of ranks that experts are spread over, of so many ranks of data and tensor: none, all, and between."""
    return sorted({1, ranks, *([ranks // 2] if ranks > 2 else [])})


@pytest.mark.parametrize(
    ("shape", "count", "clip"),
    [
        (MIXTRAL, 2, 1.0),
        (dataclasses.replace(QWEN3, dropout=0.3), 2, 1.0),
        (DEEPSEEK, 6, 0.3),  # more microbatches than sequences; the clipping always bites
        (dataclasses.replace(MIXTRAL, experts=1, top_k=1, expert_ffn=1, vocabulary=3), 1, 0.0),
    ],
)
def test_equals_one_rank(world, case, shape, count, clip):
    """Losses, norms and weights of two steps, biases of routers among them."""
    for number, (data, pipeline, tensor) in enumerate(in_turn(CORNERS, world.size, case)):
        ranks = world.size // pipeline
        spread = experts_over(ranks) if shape is MIXTRAL else [ranks]
        for expert in spread[number % len(spread) :: 3] if world.size == 4 else spread:
            with Grid(data, pipeline, tensor, expert=expert) as grid:
                check(grid, fitting(shape, pipeline), count, clip)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(
    "shape",
    [
        dataclasses.replace(MIXTRAL, capacity=0.8, jitter=0.2),
        dataclasses.replace(DEEPSEEK, capacity=1.1, capacity_policy="position", jitter=0.1),
    ],
)
def test_ten_steps(world, case, shape):
    """With capacities and jitter, on two grids of all axes between them."""
    places = {ranks: found[1:3] or found for ranks, found in CORNERS.items()}
    for data, pipeline, tensor in in_turn(places, world.size, case):
        with Grid(data, pipeline, tensor, expert=world.size // pipeline) as grid:
            check(grid, fitting(shape, pipeline), count=2, clip=1.0, steps=10)


PLANES = {2: [("summa", (1, 2, 1)), ("two_half_d", (1, 1, 2))], 4: [("cannon", (2, 2, 1)), ("summa", (2, 2, 1))]}


@pytest.mark.ranks(*PLANES)
def test_plane_products(world):
    """Shared experts, attention and dense layers by other matrix products."""
    for algorithm, tensor in PLANES[world.size]:
        with Grid(1, 1, tensor, expert=world.size) as grid:
            check(grid, fitting(DEEPSEEK, 1), count=2, clip=1.0, algorithm=algorithm)


@pytest.mark.ranks(2, 4)
def test_delayed_schedules(world):
    """PipeDream, whose backwards use the experts, and the routing, of the weights of their forwards."""
    for name, count in (("pipedream", 2), ("pipedream-2bw", 2)):
        shape = dataclasses.replace(fitting(MIXTRAL, 2), tied=False, aux_loss=0.0, z_loss=0.0)
        with Grid(world.size // 2, 2, 1, expert=world.size // 2) as grid:
            check_delayed(grid, name, shape, Mixtures(shape).logits, count)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-h1", "zb-v", "dualpipev", "chimera"])
def test_schedules(world, name):
    """Stages with two replicas, and split backwards."""
    stages = schedule(name, 2, 2).graph.stages
    shape = dataclasses.replace(DEEPSEEK, layers=stages + 1, dropout=0.3)
    parts = world.size // 2 if name in ("zb-h1", "chimera") else 1
    with Grid(1, 2, world.size // 2, expert=world.size // 2, expert_tensor=parts) as grid:
        check(grid, shape, count=2, clip=1.0, pipeline=name)


@pytest.mark.ranks(2, 4)
def test_balance_of_a_step(world):
    """Auxiliary losses of all tokens of a step, known before the first of its backwards; computed once more."""
    for data, pipeline in sorted({(2, world.size // 2), (1, world.size), (world.size, 1)}):
        shape = dataclasses.replace(fitting(MIXTRAL, pipeline), aux_scope="step")
        with Grid(data, pipeline, 1, expert=data) as grid:
            check(grid, shape, count=3, clip=1.0, pipeline="gpipe", recompute="block")


@pytest.mark.ranks(2, 4)
def test_token_slices(world):
    shape = dataclasses.replace(fitting(QWEN3, 2), aux_loss=0.0, z_loss=0.0)
    with Grid(1, 2, world.size // 2, expert=world.size // 2) as grid:
        check(grid, shape, count=2, clip=1.0, pipeline="terapipe", slices=[3, 4])


METHODS = {1: [(1, 1, 1)], 2: [(2, 1, 1)], 4: [(2, 1, (1, 1, 2)), (2, 1, (2, 1, 1)), (2, 2, 1)], 8: [(2, 2, 2)]}


@pytest.mark.parametrize(("method", "recompute"), [("zero1", "none"), ("zero2", "attention"), ("zero3", "block")])
def test_zero_and_recompute(world, case, method, recompute):
    for data, pipeline, tensor in in_turn(METHODS, world.size, case):
        shape = dataclasses.replace(fitting(DEEPSEEK, pipeline), dropout=0.3)
        ranks = world.size // pipeline
        for expert in {ranks, max(1, ranks // 2)}:
            with Grid(data, pipeline, tensor, expert=expert) as grid:
                model = made(grid, shape, recompute=recompute)
                check_strategy(method, model, grid, shape, 2, serial(shape, 1.0))


SEQUENCES = {2: [((1, 2, 1), 1, 1), ((1, 1, 2), 1, 1)], 4: [((1, 2, 2), 1, 1), ((2, 2, 1), 1, 1), ((1, 2, 1), 1, 2)]}


@pytest.mark.ranks(*SEQUENCES)
@pytest.mark.parametrize("documents", [False, True])
def test_ranks_that_share_sequences(world, case, documents):
    for place in in_turn(SEQUENCES, world.size, case):
        for expert in {world.size, world.size // 2}:
            with Grid(*place, expert=expert) as grid:
                check(grid, fitting(DEEPSEEK, 1), count=2, clip=1.0, documents=documents)


@pytest.mark.ranks(1, 2)
def test_a_step_that_is_left_out(world):
    """Neither its load nor what would have changed the biases counts in the next one's."""
    shape = fitting(DEEPSEEK, 1)
    with Grid(world.size, expert=world.size) as grid:
        found = []
        for left_out in (0, 2):
            model = made(grid, shape)
            trainer = Trainer(model, grid, make_optimizer(model.parameters(), 0.0), 2)
            for _ in range(left_out):
                trainer.forward_backward(microbatches(grid, batches(shape)[1], 0, 2))
                assert "experts" not in trainer.report()
            trainer.step(microbatches(grid, batches(shape)[0], 0, 2))
            biases = [p.tolist() for name, p in model.named_parameters() if name.endswith("router.bias")]
            found.append((trainer.report()["experts"], biases))
        assert found[0] == found[1]
        assert len(found[0][1]) == shape.layers - shape.dense_layers


@pytest.mark.ranks(1, 2)
def test_terms_of_a_scaled_loss(world):
    """What is told of them in float16 is not scaled."""
    shape, terms = fitting(MIXTRAL, 1), []
    with Grid(world.size) as grid:
        for precision in (Precision(), Precision(torch.float16, torch.float32, torch.float32, loss_scale=256.0)):
            model = Mixtral(grid, shape, key=RngKey(3), dtype=torch.float32)
            optimizer = make_optimizer(model.parameters(), 0.0)
            strategy = make(DataParallelConfig("ddp"), model, grid, optimizer, precision)
            trainer = Trainer(model, grid, optimizer, 1, strategy=strategy)
            trainer.step(microbatches(grid, batches(shape)[0], 0, 1))
            terms.append([trainer.report()[term] for term in ("aux_loss", "z_loss")])
    assert terms[1] == pytest.approx(terms[0], rel=5e-2)
    assert min(terms[0]) > 0
