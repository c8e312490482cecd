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
    ("given", "name"),
    [
        ('pipeline.boxes=["2x1x1", "2x1x1"]', "pipeline.boxes"), ("train.batch=4", "train.batch"),
        (" data_parallel.method=zero1", "data_parallel.method"), ("tensor.overlap=[]", "tensor.overlap"),
        ("precision.comm_dtype=bf16", "precision.comm_dtype"), ("run.name=other", "run.name"),
    ],
)  # fmt: skip
def test_a_setting_of_the_training_is_refused(tmp_path, given, name):
    (tmp_path / "config.toml").write_text("")
    heeded = ["grid.tensor=2", "grid.pipeline=2", "precision.compute=bf16", "data.documents=masked", "run.device=cpu"]
    assert configuration(tmp_path, heeded, 4).precision.compute == "bf16"
    with pytest.raises(ValueError, match=f"^{name} is of a training, and changes nothing of a trained model: leave"):
        configuration(tmp_path, [*heeded, given], 4)


@pytest.mark.parametrize(
    "pipeline",
    ['schedule = "terapipe"\nslices = 4', 'schedule = "ampnet"\nmax_active_keys = 3\nrecord = true',
     'schedule = "ampnet"\nmin_update_frequency = 2\nstaleness_correction = true'],
)  # fmt: skip
def test_how_it_was_pipelined_does_not_matter(tmp_path, pipeline):
    (tmp_path / "config.toml").write_text(f"[grid]\npipeline = 2\n[pipeline]\n{pipeline}\n[train]\nmicrobatches = 4\n")
    for ranks in (1, 2):
        assert configuration(tmp_path, [], ranks).pipeline.schedule == "1f1b"
