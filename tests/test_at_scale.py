"""The benchmark that predicts scaling: its points are the best plans, and its plot shows them."""

import importlib
import json

import pytest
from running import ROOT

from hpctrain.plan import Machine, predict


@pytest.fixture
def at_scale(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = importlib.import_module("at_scale")
    monkeypatch.setattr(found, "BATCH", 16)
    monkeypatch.setattr(found, "CASES", {"weak": {2: (1024, 4, 8), 4: (1024, 9, 8)}, "large": {2: (16384, 96, 128)}})
    return found


def flops(batch, layers, width):
    """72 B s l h² (1 + s / 6h + V / 12lh)"""
    size = 1 + 2048 / (6 * width) + 51200 / (12 * layers * width)
    return 72 * batch * 2048 * layers * width**2 * size


def test_points(at_scale, tmp_path, monkeypatch):
    """The best plan is no slower than plain data parallelism; efficiency is a ratio of rates."""
    few, more = at_scale.points("frontier", "weak", [2, 4])
    machine = Machine.load("frontier")
    plain = at_scale.config(1024, 4, 8, machine)
    plain.grid.data, plain.train.microbatches, plain.train.recompute = 2, 8, "none"
    by_hand = predict(plain, machine)
    assert by_hand.fits
    assert few["low"] <= few["seconds"] <= round(by_hand.seconds, 3)
    assert sum(few["parts"].values()) == pytest.approx(few["seconds"], abs=2e-3)
    assert few["efficiency"] == 1
    assert few["rate"] * 2 * few["seconds"] == pytest.approx(flops(16, 4, 1024) / 1e12, rel=0.01)
    assert more["rate"] * 4 * more["seconds"] == pytest.approx(flops(16, 9, 1024) / 1e12, rel=0.01)
    assert more["efficiency"] == pytest.approx(more["rate"] / few["rate"], rel=2e-3)

    (tmp_path / "at_scale.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (few, more)))
    monkeypatch.setattr(at_scale, "RESULTS", tmp_path / "at_scale.jsonl")
    at_scale.plot(tmp_path / "plot.svg")
    assert "frontier" in (tmp_path / "plot.svg").read_text()


def test_what_does_not_fit_is_said(at_scale):
    (line,) = at_scale.points("frontier", "large", [2])
    assert line["absent"].startswith("no plan fits: device.memory of frontier is 59.60 GiB")
    assert "seconds" not in line


def test_published_steps(at_scale, monkeypatch):
    """The steps that machine files were calibrated on, by their ranks, as 1e12 flop/s of a device."""
    monkeypatch.setattr(at_scale, "BATCH", 8192)
    found = dict(at_scale.published("dgx-a100-selene"))
    assert found[1536] == pytest.approx(flops(2304, 80, 12288) / 1536 / 24.8 / 1e12, rel=1e-3)
    assert set(found) == {8, 128, 1536}
    (frontier,) = at_scale.published("frontier")
    assert frontier == (512, pytest.approx(flops(8192, 24, 4096) / 512 / 17.9 / 1e12, rel=1e-3))
