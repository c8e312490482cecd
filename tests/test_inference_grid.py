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


@pytest.mark.parametrize(
    "pipeline",
    ['schedule = "terapipe"\nslices = 4', 'schedule = "ampnet"\nmax_active_keys = 3\nrecord = true',
     'schedule = "ampnet"\nmin_update_frequency = 2\nstaleness_correction = true'],
)  # fmt: skip
def test_how_it_was_pipelined_does_not_matter(tmp_path, pipeline):
    (tmp_path / "config.toml").write_text(f"[grid]\npipeline = 2\n[pipeline]\n{pipeline}\n[train]\nmicrobatches = 4\n")
    for ranks in (1, 2):
        assert configuration(tmp_path, [], ranks).pipeline.schedule == "1f1b"
