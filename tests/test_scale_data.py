"""What the points of a scaling study train on."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.config import load_config
from hpctrain.scale import runner
from hpctrain.scale.points import points

FIGURES = {"flops": 1, "step_seconds": 1.0, "tokens_per_second": 1.0, "oversubscribed": False}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """read(text of the study's file, overrides) -> the configuration of the ranks that a point of it starts."""
    started = []

    def run_ranks(command, **how):
        out, _, path, *overrides = command[command.index("hpctrain.scale.measure") + 1 :]
        started.append(load_config(path, overrides))
        Path(out).write_text(json.dumps(FIGURES))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(runner, "run_ranks", run_ranks)
    job, steps = tmp_path / "job.toml", iter(range(1, 9))  # another key of each

    def read(text, *overrides):
        job.write_text(text)
        (point,) = points(job, overrides, [1], "weak", "data")
        runner.measure(job, [point], tmp_path / "study", 1, next(steps), 1, {}, print)
        return started[-1].data

    return read


def test_a_mixture_stays(read):
    """Whether the file has it, or the command."""
    mixture = [["code.h5", 0.7], ["text.h5", 0.3]]
    assert read(f"[data]\nmixture = {json.dumps(mixture)}").mixture == mixture
    data = read("", f"data.mixture={json.dumps(mixture)}")
    assert (data.mixture, data.path, data.text) == (mixture, "", [])


def test_packed_data_stay(read):
    assert read('[data]\npath = "code.h5"').path == "code.h5"


def test_text_is_packed_once_by_its_name(read, tmp_path):
    """In the study's folder; another text of a later study there is packed beside it."""
    texts, paths = [tmp_path / "one.txt", tmp_path / "two.txt"], []
    for text in texts:
        text.write_text(f"the text of {text}")
    for text in [*texts, texts[0]]:
        data = read(f"[data]\ntext = {json.dumps([str(text)])}")
        assert data.text == [str(text)]
        paths.append(Path(data.path))
    assert {path.parent for path in paths} == {tmp_path / "study/data"}
    assert paths[0] == paths[2] != paths[1]
