"""Figures of a machine as they are in a step, from steps of small models."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_plan_learn import figures, written
from test_plan_nodes import several

from hpctrain.cli import machine as command
from hpctrain.cli import main
from hpctrain.config import load_config
from hpctrain.plan import Machine, in_training
from hpctrain.plan.estimator import Estimator
from hpctrain.plan.job import read


def test_operations_among_others_in_training(tmp_path):
    """Steps of which all operations take 1.2 times as long and the update 1.5 times, weights that no cache holds are
    read at 1 GB/s, and four ranks wait in exchanges a tenth of the root of what they computed before."""
    once = figures(1), figures(2), figures(4)
    plain = Machine.load(written(tmp_path, *(each | {"delay": 0.0} for each in once)))

    def taken(overrides, machine, **figures):
        job, choice = read(load_config(overrides=overrides))
        return Estimator(job, replace(machine, device=replace(machine.device, **figures))).estimate(choice)

    def alone(ranks):
        for job in in_training.jobs(1):
            warm, cold = (taken(job, plain.crowded(ranks), cache=0.0, cold_bandwidth=rate) for rate in (0.0, 1e9))
            parts = warm.parts
            yield 0.2 * parts["compute"] + cold.parts["compute"] + 1.5 * parts["optimizer"] + parts["reading"]

    alone = {ranks: [*alone(ranks)] for ranks in (1, 2, 4)}
    nobody = [
        each | {"alone": alone[n := each["ranks"]], "together": [0.0] * len(in_training.jobs(n))} for each in once
    ]
    found = in_training.in_training(nobody)
    assert [each["delay"] for each in found] == [0, 0, 0]
    machine = Machine.load(written(tmp_path, *found))
    for ranks in (1, 2, 4):
        before, after = plain.crowded(ranks), machine.crowded(ranks)
        assert after.peak_of("fp32", "highest") * after.device.product == pytest.approx(1e10 / 1.2, rel=1e-3)
        assert after.device.cold_bandwidth == pytest.approx(1e9, rel=1e-3)
        for name in ("operands", "bandwidth", "norms", "activations"):
            assert getattr(after.device, name) == pytest.approx(getattr(before.device, name) / 1.2, rel=1e-3)
        for name in ("launch", "score", "long_score"):
            assert getattr(after.device, name) == pytest.approx(1.2 * getattr(before.device, name), rel=1e-2)
        assert after.device.attention == pytest.approx(before.device.attention, rel=1e-2)  # of a product's rate
        assert after.device.state_bandwidth == pytest.approx(before.device.state_bandwidth / 1.5, rel=1e-3)
    together = {
        ranks: [taken(job, machine.crowded(ranks), delay=0.1).seconds for job in in_training.jobs(ranks)]
        for ranks in (1, 2, 4)
    }
    found = in_training.in_training([each | {"together": together[each["ranks"]]} for each in nobody])
    assert [each["delay"] for each in found] == pytest.approx([0.0, 0.1, 0.1], rel=0.02)


def test_steps_that_tell_nothing():
    """Of weights and of the update, where few rows take no longer; of operations, where no step takes any time."""
    two = figures(2) | {"together": [0.0] * 6}
    (found,) = in_training.in_training([two | {"alone": [9.0, 1e-3, 1e-3]}])
    assert found["cold"] == 0 < found["slower"]
    assert found["state"] == two["state"]
    with pytest.raises(ValueError, match="steps of 2 ranks took no longer than an update"):
        in_training.in_training([two | {"alone": [0.0] * 3}])


def test_ranks_of_two_nodes_do_not_share_cores():
    steps = {"alone": [9.0] * 3, "together": [9.0] * 6}
    two, four = in_training.in_training([figures(2) | steps, several(4, 2) | {"cores": 2} | steps])
    assert four["slower"] == pytest.approx(two["slower"])


def test_ranks_over_which_no_model_is_divided():
    """Wait for one another at a step's end alone."""
    alone = figures(11, cores=16) | {"alone": [9.0] * 3}
    quick, slow = (in_training.in_training([alone | {"together": [taken] * 3}])[0] for taken in (0.1, 99.0))
    assert quick["delay"] == 0 < slow["delay"]


def test_jobs_of_any_number_of_ranks():
    for ranks in (1, 2, 3, 4, 6, 7, 16, 24, 128):
        assert {load_config(overrides=job).ranks for job in in_training.jobs(ranks)} == {ranks}


def test_what_counts_of_rounds(tmp_path, monkeypatch):
    """Of each figure by itself, as others slowed products in one round, and reading in another: the best, and where
    ranks share cores the median."""
    usual = [figures(n) | {"alone": [9.0] * 3, "together": [9.0] * len(in_training.jobs(n))} for n in (2, 4)]
    late = {"reading": [(100, 1.0), (1100, 1.0)]}
    changed = [
        [{"elements": 1e9}, {"elements": 1e9}],
        [{"elements": 1e9, "tables": 5e8}, {"elements": 4e9, "tables": 3e9}],
        [late, late],
    ]
    left = [json.loads(json.dumps(each | change)) for changes in changed for each, change in zip(usual, changes)]
    monkeypatch.setattr(command, "launcher_path", lambda: "mpirun")
    monkeypatch.setattr(command.cores, "find", lambda: SimpleNamespace(count=2))
    monkeypatch.setattr(command, "_measured", lambda *_: left.pop(0))
    monkeypatch.setattr(command, "_steps", lambda *_: {})
    monkeypatch.setattr(command, "_memory", lambda *_: {"reserved": 2e8})
    main(["machine", "--ranks", "2,4", "--rounds", "3", "-o", str(tmp_path / "found.toml")])
    assert not left
    expected = written(tmp_path, *in_training.in_training(usual))
    read = [Machine.load(path) for path in (expected, tmp_path / "found.toml")]
    assert replace(read[0], name="", description="") == replace(read[1], name="", description="")


def test_ranks_that_take_too_long(tmp_path, monkeypatch, capsys):
    """Said as any other mistake; more ranks may take longer."""
    launcher = tmp_path / "launcher"
    launcher.write_text("#!/bin/sh\nexec sleep 60\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(command, "launcher_path", lambda: str(launcher))
    monkeypatch.setattr(command, "_memory", lambda *_: {})
    monkeypatch.setattr(command, "LIMIT", 0.05)
    monkeypatch.setattr(command, "EACH", 0.05)
    assert main(["machine", "--ranks", "3", "-o", str(tmp_path / "found.toml")]) == 2
    assert "measuring 3 ranks took longer than 0.2 s; measure fewer by --ranks" in capsys.readouterr().err
    assert not (tmp_path / "found.toml").exists()


def test_no_rounds_are_refused(capsys):
    assert main(["machine", "--rounds", "0"]) == 2
    assert "--rounds must be a positive number, got 0" in capsys.readouterr().err
