"""Memory of what a training keeps beside weights, gradients and moments: an average of the weights, copies to save."""

import pytest

from hpctrain.config import load_config
from hpctrain.plan import predict

JOB = ["model.layers=2", "model.width=64", "model.heads=4", "train.batch=12", "model.context=32", "model.vocabulary=64"]
ELEMENTS = (64 + 32) * 64 + 2 * (12 * 64**2 + 13 * 64)  # but for the last norm
SAVED = 4 * (1 + 2) * ELEMENTS  # weights and both moments
AVERAGE = "train.ema_decay=0.999"
BEHIND, AT_ONCE = "checkpoint.background=true", "checkpoint.background=false"


def prediction(*settings, machine="cpu-cluster"):
    return predict(load_config(overrides=[*JOB, *settings]), machine)


def grown(before, after, *settings, **how):
    """Bytes of a rank, but for what the allocator adds."""
    one, two = (prediction(each, *settings, **how).memory_bytes for each in (before, after))
    return (two - one) / 1.05


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], SAVED),
        ([AVERAGE], SAVED + 4 * ELEMENTS),
        (["train.optimizer=sgd"], SAVED * 2 / 3),
        (["train.optimizer=sgd", "train.momentum=0"], SAVED / 3),
        (["precision.compute=fp64"], 2 * SAVED),
        (["grid.data=4"], SAVED / 4),
        (["grid.data=[2,2,1]"], SAVED / 4),
        (["grid.data=4", "data_parallel.method=zero2"], SAVED / 4),
        (["grid.data=4", "precision.comm_dtype=bf16"], SAVED),  # the first replica saves all
        (["grid.data=4", "data_parallel.method=local_sgd"], SAVED),  # its own
        (["grid.data=4", "data_parallel.method=parameter_server", "data_parallel.servers=2"], SAVED / 2),
    ],
)
def test_copies_to_save(settings, expected):
    """Of processors, whose memory is the host's, where a checkpoint is written while training goes on."""
    assert grown(AT_ONCE, BEHIND, *settings) == pytest.approx(expected)
    if settings in ([], [AVERAGE]):
        assert grown(AT_ONCE, BEHIND, *settings, machine="frontier") == 0


def test_runs_that_save_nothing():
    assert grown(AT_ONCE, BEHIND, "run.checkpoint_minutes=0") == 0
    assert grown(AT_ONCE, BEHIND, "run.checkpoint_minutes=0", "run.checkpoint_every=5") == pytest.approx(SAVED)


def test_the_average_of_the_weights():
    """A number of each weight more, which ZeRO divides; an update reads the weights once more, and reads and writes the
    average, beside the gradient, which is read twice, and weights and moments, which are read and written."""
    assert grown("train.ema_decay=0", AVERAGE, AT_ONCE) == pytest.approx(4 * ELEMENTS)
    divided = grown("train.ema_decay=0", AVERAGE, AT_ONCE, "grid.data=4", "data_parallel.method=zero1")
    assert divided == pytest.approx(ELEMENTS)
    plain, average = (prediction(*each, "train.clip=0").parts["optimizer"] for each in ([], [AVERAGE]))
    assert average / plain == pytest.approx((2 + 6 + 3) / (2 + 6))
