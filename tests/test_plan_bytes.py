"""On a network of 1 GB/s without latency, what a step communicates takes a nanosecond a byte of the formula, which
`step_traffic` has and the ledger counts."""

import dataclasses
import math

import pytest

from hpctrain.config import load_config
from hpctrain.plan import Machine, predict
from hpctrain.plan import job as jobs
from hpctrain.plan.machine import Link
from hpctrain.plan.network import Network
from hpctrain.plan.passes import Box
from hpctrain.plan.prediction import received_by

CPU = Machine.load("cpu-cluster")
FLAT = dataclasses.replace(
    CPU, link=(Link("a", 1, 0.0, 1e9),), device=dataclasses.replace(CPU.device, launch=0.0),
)  # fmt: skip
JOB = ["model.layers=4", "model.width=64", "model.heads=4", "train.batch=16", "model.context=32", "model.vocabulary=64"]
TABLE, POSITIONS, BLOCK, NORM = 64 * 64, 32 * 64, 12 * 64**2 + 13 * 64, 2 * 64
WEIGHTS = TABLE + POSITIONS + 4 * BLOCK  # seconds leave the last norm out


def predicted(*settings, machine=FLAT):
    return predict(load_config(overrides=[*JOB, *settings]), machine)


def moved(axis, *settings):
    """Bytes by seconds."""
    return 1e9 * predicted(*settings).parts[axis]


@pytest.mark.parametrize(
    ("replicas", "servers", "staleness", "peers"),  # of a server: whose gradients and weights go through it
    [(4, 1, 0, 3), (64, 1, 0, 63), (4, 3, 0, 3), (4, 2, 1, 2)],
)
def test_a_server_has_its_part_of_all_others(replicas, servers, staleness, peers):
    options = [f"servers={servers}", f"staleness={staleness}", "method=parameter_server"]
    settings = [f"grid.data={replicas}", "train.batch=64", *(f"data_parallel.{each}" for each in options)]
    assert moved("data", *settings) == pytest.approx((4 + 4) * peers / servers * WEIGHTS)
    updates = replicas - servers if staleness else 1  # of a step: at every push, or one
    assert predicted(*settings).parts["optimizer"] == pytest.approx(updates * predicted().parts["optimizer"] / servers)


def test_a_server_takes_each_bucket_once():
    """From all others, and sends them each bucket of weights: each passes 63 hops."""
    bucket = 1 << 14
    machine = dataclasses.replace(
        FLAT, link=(Link("a", 1, 1e-6, 1e9),), software=dataclasses.replace(FLAT.software, bucket=float(bucket))
    )
    settings = ["grid.data=64", "train.batch=64", "data_parallel.method=parameter_server"]
    latency = 2 * math.ceil(4 * WEIGHTS / bucket) * 63e-6
    seconds = predicted(*settings, machine=machine).parts["data"]
    assert seconds == pytest.approx(latency + (4 + 4) * 63 * WEIGHTS / 1e9)


@pytest.mark.parametrize("sharing", ["2,1", "1,2"])
def test_local_sgd_sums_in_a_replica_and_averages_over_them(sharing):
    settings = [f"grid.data=[4,{sharing}]", "data_parallel.method=local_sgd", "data_parallel.average_every=4"]
    assert moved("data", *settings) == pytest.approx(2 * 3 / 4 * 4 * WEIGHTS / 4)
    scalars = 8  # the loss; and what seconds leave out
    assert moved("sequence", *settings) == pytest.approx(predicted(*settings).bytes["sequence"] - 4 * NORM - scalars)


def test_rows_that_a_mixture_makes_whole():
    """Each of two ranks over y sends the other one half of its tokens' features, there and back."""
    settings = ["model.kind=mixtral", "model.experts=4", "grid.tensor=[1,2,1]"]
    job, choice = jobs.read(load_config(overrides=[*JOB, *settings]))
    box = Box(job, FLAT, Network(FLAT), choice)
    assert 1e9 * box.mixture.rows == pytest.approx(2 * 4 * (16 * 32 / 2 * 64) / 2)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("overlap", ['["weight_gradient"]', "[]"])
@pytest.mark.parametrize(("algorithm", "z"), [("agarwal", 2), ("agarwal", 4), ("two_half_d", 2)])
def test_what_moves_over_z(algorithm, z, overlap, microbatches):
    """Of blocks, tables and the head; seconds leave out sums of norms and biases, the loss and the norm."""
    settings = [f"grid.tensor=[1,1,{z}]", f"tensor.algorithm={algorithm}", f"tensor.overlap={overlap}",
                f"train.microbatches={microbatches}"]  # fmt: skip
    vectors = 4 * (2 * 2 + 9) * 64 + NORM
    left_out = 2 * (z - 1) / z * (4 * vectors + 2 * 8)
    assert moved("tensor", *settings) == pytest.approx(predicted(*settings).bytes["tensor"] - left_out)


@pytest.mark.parametrize(
    ("schedule", "settings", "elements"),
    [
        ("1f1b", [], TABLE),
        ("interleaved", [], TABLE),
        ("1f1b", ["precision.comm_dtype=bf16"], TABLE),
        ("1f1b", ["grid.data=[1,2,1]", "data_parallel.method=zero1"], TABLE / 2),
        ("1f1b", ["grid.data=2", "data_parallel.method=local_sgd"], TABLE),
        ("zb-v", [], 0),  # whose first rank has both ends
    ],
)
def test_ends_exchange_the_gradient_of_a_tied_table(schedule, settings, elements):
    """Both at once, in the type in which gradients are kept, on the pipeline's axis."""
    pipeline = [*settings, "grid.pipeline=2", "train.microbatches=2", f"pipeline.schedule={schedule}"]
    tied, untied = ([*pipeline, f"model.tied={each}"] for each in ("true", "false"))
    assert moved("bubble", *tied) - moved("bubble", *untied) == pytest.approx(4 * elements)
    assert moved("data", *tied) == moved("data", *untied)
    received = [predicted(*each).bytes["pipeline"] for each in (tied, untied)]
    assert received[0] - received[1] == pytest.approx(4 * elements)


def test_two_copies_of_the_model_exchange_all_gradients():
    """Which are all that a rank waits for; of a tied table each rank has one, as it has both ends."""
    pipeline = ["grid.pipeline=2", "train.microbatches=2", "pipeline.schedule=dualpipe"]
    tied, untied = ([*pipeline, f"model.tied={each}"] for each in ("true", "false"))
    assert moved("bubble", *tied) == pytest.approx(4 * WEIGHTS)
    assert moved("bubble", *untied) == pytest.approx(4 * (WEIGHTS + TABLE))
    received = [predicted(*each).bytes["pipeline"] for each in (tied, untied)]
    assert received[1] - received[0] == 4 * TABLE


def test_a_pipeline_on_a_node_sends_nothing_between_nodes():
    """Its ends exchange a table, and the last rank sends the first one activations."""
    slow = dataclasses.replace(FLAT, node=4, link=(*FLAT.link, Link("b", 4, 1e-3, 1e6)))
    job = ["model.layers=8", "grid.pipeline=4", "train.microbatches=4", "pipeline.schedule=interleaved"]
    assert predicted(*job, machine=slow).seconds == predicted(*job).seconds
    assert predicted(*job, "grid.tensor=2", machine=slow).seconds > 2 * predicted(*job, "grid.tensor=2").seconds


@pytest.mark.parametrize(
    "uneven",
    [
        ["pipeline.partition=[1,1,5,1]", "grid.tensor=2"],
        ["model.kind=mixtral", "model.experts=4", "model.dense_layers=4", "model.router=sigmoid", "grid.data=2",
         "grid.expert=2"],
    ],
)  # fmt: skip
def test_the_rank_that_receives_the_most_of_an_uneven_cut(uneven):
    settings = ["model.layers=8", "grid.pipeline=4", *uneven]
    job, choice = jobs.read(load_config(overrides=[*JOB, *settings]))
    each = [sum(received_by(job, choice, rank).values()) for rank in range(4)]
    assert each.index(max(each)) == 2
    assert sum(predicted(*settings).bytes.values()) == each[2]
