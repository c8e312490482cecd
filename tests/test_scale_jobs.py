"""Studies whose points are jobs of Slurm."""

from test_scale import BASE

from hpctrain.cli import main
from hpctrain.scale import point_jobs


def test_jobs_of_a_study_have_a_core_for_each_thread(tmp_path, monkeypatch):
    asked, config = [], tmp_path / "job.toml"
    config.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(point_jobs.client, "require", lambda instead: None)
    monkeypatch.setattr(point_jobs.client, "submit", lambda words, environment: asked.append(words) or "7")
    monkeypatch.setattr("hpctrain.train.preflight.preflight", lambda config: None)
    words = ["--ranks=1,2", "--weak", "--submit", "--threads=3", "-o", str(tmp_path / "study")]
    assert main(["scale", str(config), *BASE, *words]) == 0
    assert [each[:2] for each in asked] == [["--ntasks=1", "--cpus-per-task=3"], ["--ntasks=2", "--cpus-per-task=3"]]
