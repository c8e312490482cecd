"""The grid that a run folder is evaluated on: its own where that has as many ranks, otherwise replicas of the batch."""

import pytest

from hpctrain.train.inference import configuration


@pytest.mark.parametrize(
    ("trained", "overrides", "ranks", "shape"),
    [
        ("data = 2\nsequence = 2", [], 4, (2, 1, 1, 2, 1, 1, 1)),
        ("data = 2\nsequence = 2", [], 3, (3, 1, 1, 1, 1, 1, 1)),
        ("data = [1, 2, 2]\ntensor = 2", [], 2, (2, 1, 1, 1, 1, 1, 1)),
        ("pipeline = 2\nsequence = 2", ["grid.tensor=2"], 2, (1, 1, 1, 1, 2, 1, 1)),
    ],
)
def test_the_grid_of_an_evaluation(tmp_path, trained, overrides, ranks, shape):
    (tmp_path / "config.toml").write_text(f"[grid]\n{trained}\n")
    config = configuration(tmp_path, overrides, ranks)
    assert tuple(config.grid_shape.values()) == shape
