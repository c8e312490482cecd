"""What local SGD and parameter servers are predicted to move; the formula itself is of test_traffic_replicas.py."""

import pytest

from hpctrain.cli import main
from hpctrain.config import load_config
from hpctrain.plan import predict

JOB = ["model.layers=2", "model.width=64", "model.heads=4", "train.batch=12", "model.context=32", "model.vocabulary=64"]
TABLES, BLOCK, NORM = (64 + 32) * 64, 12 * 64**2 + 13 * 64, 2 * 64
ELEMENTS = TABLES + 2 * BLOCK + NORM


def data(*settings):
    return predict(load_config(overrides=[*JOB, *settings]), "cpu-cluster").bytes["data"]


@pytest.mark.parametrize(
    ("settings", "numbers"),  # of each parameter that replicas average in a step
    [
        ([], 1),
        (["average_every=4"], 1 / 4),
        (["average_every=0"], 0),
        (["average_every=4", "average_state=true"], 3 / 4),
        (["average_every=4", "average_state=true", "train.optimizer=sgd"], 2 / 4),
        (["average_every=4", "average_state=true", "train.ema_decay=0.999"], 4 / 4),
    ],
)
def test_local_sgd_averages_now_and_then(settings, numbers):
    """Of four replicas, twice three quarters of the weights; and of two float64, the loss and the norm."""
    named = [each if "." in each.split("=")[0] else f"data_parallel.{each}" for each in settings]
    expected = 2 * 3 / 4 * (4 * numbers * ELEMENTS + 16)
    assert data("grid.data=4", "data_parallel.method=local_sgd", *named) == pytest.approx(expected)


def test_the_busiest_of_servers_and_workers():
    """One server is pushed all gradients, by each of three workers; of three servers a worker pulls all weights, and a
    server, which has a third, is pushed that and pulls the rest."""
    served, loss = ["data_parallel.method=parameter_server"], 2 * 3 / 4 * 16
    assert data("grid.data=4", *served) == pytest.approx(3 * 4 * ELEMENTS + loss)
    assert data("grid.data=4", "data_parallel.servers=3", *served) == pytest.approx(
        4 * (3 * ELEMENTS / 3 + 2 / 3 * ELEMENTS) + loss
    )
    pushes = data("grid.data=4", "data_parallel.staleness=1", *served)
    assert pushes == pytest.approx(3 * (4 * ELEMENTS + 8))  # with the number of the worker's step


def test_the_command(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text("[grid]\ndata = 2\n")
    for method in ("local_sgd", "parameter_server"):
        given = [str(job), "--machine", "frontier", f"data_parallel.method={method}"]
        assert main(["plan", *given, "--predict"]) == 0
        assert main(["plan", *given, "--ranks", "4", "-o", f"{tmp_path}/plan.toml"]) == 0
        assert f"data_parallel.method={method}" in capsys.readouterr().out
        assert load_config(tmp_path / "plan.toml").data_parallel.method == method
