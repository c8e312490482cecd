"""The figures in the texts are those in benchmarks/results, by the rule that benchmarks/figures.py states."""

import importlib
import json

import pytest
from running import ROOT


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tables")


@pytest.mark.parametrize("name", ["README.md", "benchmarks/README.md"])
def test_the_texts_hold_what_the_results_say(tables, name):
    """`python benchmarks/tables.py` writes them."""
    assert name in tables.TEXTS
    text = (ROOT / name).read_text(encoding="utf-8")
    assert tables.filled(text) == text
    assert text.count("<!-- table ") == text.count("<!-- end -->") == len(tables.MARKED.findall(text)) > 0


def test_every_table_is_shown(tables):
    shown = "".join((ROOT / name).read_text(encoding="utf-8") for name in tables.TEXTS)
    assert {name for name in tables.TABLES if f"<!-- table {name} -->" in shown} == set(tables.TABLES)


def test_every_command_names_a_program():
    text = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    named = {word for word in text.replace("`", " ").split() if word.startswith("benchmarks/") and word.endswith(".py")}
    assert len(named) > 8
    assert all((ROOT / name).is_file() for name in named)


def test_an_edited_figure_is_noticed(tables):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    row = "| data parallel | torch's DDP |"
    assert row in text
    assert tables.filled(text.replace(row, f"{row} 9.99 |")) == text


def test_lines_with_pairs_and_without(tables, tmp_path, monkeypatch):
    """An interval from the pairs; where it holds 1, no winner."""
    compared = importlib.import_module("pairs").compared
    case = "base, 2 ranks, ddp by {}, highest products"
    found = [
        {"peer": "ddp", "case": case.format("shared memory"), **compared([1.0, 1.1] * 10, [2.0, 2.2] * 10)},
        {"peer": "ddp", "case": case.format("messages"), **compared([1.0] * 20, [0.97, 1.04] * 10)},
        {"peer": "megatron", "case": case.format("messages").replace("highest", "medium"), "ratio": 1.25},
        {"peer": "deepspeed-1", "case": case.format("messages"), "absent": "no module"},
    ]
    (tmp_path / "peers.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    monkeypatch.setattr(importlib.import_module("figures"), "RESULTS", tmp_path)
    _, _, ours, noise, old = tables.TABLES["peers"]().splitlines()
    assert ours == "| 256 | data parallel | torch's DDP | shared memory | as they are | 2.00 (2.00–2.00) |"
    assert noise == "| 256 | data parallel | torch's DDP | messages | as they are | equal within noise (0.97–1.04) |"
    assert old.endswith("| messages | oneDNN's on both sides | 1.25 † |")


@pytest.mark.usefixtures("tables")
def test_the_interval_of_a_median():
    """Of n numbers evenly from 0.9 to 1.1 the median's standard error is 0.1 / sqrt(n); 95 % lie within two of it."""
    ratios = [0.9 + 0.2 * (7919 * n % 101) / 100 for n in range(101)]
    interval = importlib.import_module("pairs").interval
    low, high = interval(ratios)
    assert low == pytest.approx(0.98, abs=0.008)
    assert high == pytest.approx(1.02, abs=0.008)
    assert interval(ratios) == (low, high)
