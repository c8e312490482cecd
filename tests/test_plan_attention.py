"""`hpctrain plan --show attention`: literal tables of who attends to what, when."""

import json
import re

import pytest

from hpctrain.cli import main
from hpctrain.config import load_config
from hpctrain.layers.context.mask import Mask
from hpctrain.plan.attention import attention_plan, hops, text

SMALL = ["model.context=8", "model.heads=4", "model.layers=1", "model.width=16"]


def shown(*overrides, width=40):
    return text(attention_plan(load_config(overrides=[*SMALL, *overrides])), width)


def test_zigzag():
    assert shown("grid.data=[1,2,2]", width=36).splitlines() == [
        "ring 2 × Ulysses 2, as grid.data says",
        "causal attention of 8 tokens, sequence.balance = zigzag:",
        "",
        "ring 0  0ccccccccccccccccccc|1fffffffffffffff  positions 0-1 6-7",
        "ring 1  1ccccccccccccccccccc|0fffffffffffffff  positions 2-5",
        "  hop by hop, the ring rank whose keys are there and the work with them: c causal tiles, f full, m masked; . "
        "waits",
        "",
        "pairs   hop 0     hop 1     all",
        "ring 0  0: 10 1c  1: 8 1f   18, 1.000 of the mean",
        "ring 1  1: 10 1c  0: 8 1f   18, 1.000 of the mean",
        "",
        "Ulysses 0  query heads 0-1, key and value heads 0-1",
        "Ulysses 1  query heads 2-3, key and value heads 2-3",
    ]


def test_contiguous_parts_wait():
    """Ring rank 0 has nothing to do with the keys after its own."""
    lines = shown("grid.data=[1,3,1]", "sequence.balance=none", "model.context=6", width=33).splitlines()
    assert [line.split("  ")[1] for line in lines[3:6]] == [
        "0cccccccc|2...........|1...........",
        "1cccccccc|0fffffffffff|2...........",
        "2cccccccc|1fffffffffff|0fffffffffff",
    ]
    assert [line.rpartition("  ")[2] for line in lines[9:12]] == [
        "3, 0.429 of the mean",
        "7, 1.000 of the mean",
        "11, 1.571 of the mean",
    ]


def test_masks():
    """A window and documents: pairs by kind of tile, [ring rank][hop]."""
    spans = ((range(0, 2), range(6, 8)), (range(2, 6),))

    def pairs(mask):
        return [[hop.pairs for hop in rank] for rank in hops(spans, mask, 8)]

    assert pairs(Mask(causal=False)) == [[{"full": 16}, {"full": 16}], [{"full": 16}, {"full": 16}]]
    assert pairs(Mask(documents=(4, 4))) == [
        [{"causal": 6}, {"full": 4}],
        [{"causal": 6}, {"full": 4}],
    ]
    assert sum(sum(part.values()) for rank in pairs(Mask(window=2)) for part in rank) == 15


def test_more_ranks_than_tokens():
    plan = attention_plan(load_config(overrides=[*SMALL, "model.context=2", "grid.data=[1,3,1]"]))
    assert [[hop.work for hop in rank] for rank in plan.hops] == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert "positions none" in text(plan)


@pytest.mark.parametrize(
    ("overrides", "why", "heads"),
    [
        (["sequence.method=auto"], "ring 1 × Ulysses 4, by sequence.method = auto; elements", [(1, 1)] * 4),
        (["sequence.method=ring"], "ring 4 × Ulysses 1, by sequence.method = ring; elements", [(4, 4)]),
        (["grid.tensor=2"], "ring 2 × Ulysses 2, by sequence.method = auto; elements", [(1, 1)] * 2),
        (
            ["model.kind=llama", "model.kv_heads=1", "model.heads=8"],
            "ring 4 × Ulysses 1, by sequence.method = auto; elements",
            [(8, 1)],
        ),
    ],
)
def test_the_choice(overrides, why, heads):
    plan = attention_plan(load_config(overrides=[*SMALL, "grid.sequence=4", *overrides]))
    assert why in plan.choice
    assert [(q.stop - q.start, k.stop - k.start) for q, k in plan.heads] == heads


def test_a_model_without_attention():
    tiny = ["model.kind=tiny_models:spec", "model.layers=2", "model.width=8", "grid.data=[1,2,1]"]
    with pytest.raises(ValueError, match="tiny_models:spec has no attention to show"):
        attention_plan(load_config(overrides=tiny))


def test_command(capsys, tmp_path):
    out = tmp_path / "work.png"
    command = ["plan", "jobs/train.toml", *SMALL, "grid.pipeline=1", "grid.tensor=1", "--show", "attention"]
    main([*command, "grid.data=[1,2,1]", "--json", "--plot", str(out)])
    found = json.loads(capsys.readouterr().out)
    assert found["spans"] == [[[0, 2], [6, 8]], [[2, 6]]]
    assert [hop["owner"] for hop in found["hops"][1]] == [1, 0]
    assert found["heads"] == [[[0, 4], [0, 4]]]
    assert out.read_bytes().startswith(b"\x89PNG")
    for more, message in (
        (["grid.data=2"], r"got grid.data = 2 and grid.sequence = 1; use grid.data = \[replica, ring, ulysses\]"),
        (["grid.data=[1,2,1]", "--plot", "work.txt"], "--plot work.txt: the file's ending is one of .png"),
    ):
        assert main([*command, *more]) == 2
        assert re.search(message, capsys.readouterr().err)
