"""Between stages: layers and boxes together, as good as the best of everything; what moves besides messages."""

import itertools
import json
import math

import numpy as np
import pytest

from hpctrain.cli import main
from hpctrain.config import load_config, to_toml
from hpctrain.plan import Machine, between_stages, inside_stage, predict, search
from hpctrain.plan.between_stages import Chain
from hpctrain.plan.stage_messages import parts_on, residual
from hpctrain.scale.points import points
from hpctrain.train.inference import configuration


def random_chain(seed):
    """Up to 7 layers, 3 stages and 3 boxes; layers of any cost on each box, with memory for some cuts alone."""
    random = np.random.default_rng(seed)
    layers, stages, boxes = random.integers(3, 8), random.integers(1, 4), random.integers(1, 4)
    own = random.integers(1, 9, (boxes, layers)) / 2 if seed % 2 else random.random((boxes, layers))
    weights = random.integers(1, 5, (boxes, layers))
    time = np.full((boxes, layers + 1, layers + 1), math.inf)
    need = np.zeros((stages, boxes, layers + 1, layers + 1))
    for start, stop in itertools.combinations(range(layers + 1), 2):
        time[:, start, stop] = own[:, start:stop].sum(1)
        for stage in range(stages):
            need[stage, :, start, stop] = (stages - stage) * weights[:, start:stop].sum(1)
    message = random.random((layers + 1, boxes, boxes)) * 3
    limit = math.inf if seed % 3 == 0 else float(random.integers(2, 30))
    return Chain(time, list(need), message, int(random.integers(1, 9)), limit, same_ends=seed % 4 == 0)


def test_the_best_of_every_cut():
    none = 0
    for seed in range(200):
        chain = random_chain(seed)
        layers, stages = chain.time.shape[1] - 1, chain.stages
        cuts = ([*inner, layers] for inner in itertools.combinations(range(1, layers), stages - 1))
        every = itertools.product(cuts, itertools.product(range(len(chain.time)), repeat=stages))
        least = min((chain.seconds(*each) for each in every), default=math.inf)
        best = chain.best()
        assert (best is None) == (least == math.inf), seed
        if best is not None:
            assert chain.seconds(*best) == pytest.approx(least, rel=1e-12), seed
        none += best is None
    assert 0 < none < 100


def test_the_formula():
    """Two stages of 2 and 1 layers on boxes of 3 and 5 s a layer: 6 + 5, messages 7, three more microbatches of 6."""
    time = np.full((2, 4, 4), math.inf)
    for start, stop in itertools.combinations(range(4), 2):
        time[:, start, stop] = 3.0 * (stop - start), 5.0 * (stop - start)
    message = np.zeros((4, 2, 2))
    message[2, 0, 1] = 7.0
    chain = Chain(time, [np.zeros_like(time)] * 2, message, microbatches=4)
    assert chain.seconds([2, 3], [0, 1]) == 6 + 5 + 7 + 3 * 6
    assert chain.best() == ([1, 3], [0, 0])
    assert chain.seconds([1, 3], [0, 0]) == 3 + 6 + 3 * 6


def test_what_a_message_needs_besides():
    """Of 8 × 8 on (4,1,1) a rank has 2 × 8, on (2,2,1) 4 × 4: 2 × 4 of it there already."""
    layout = residual("agarwal", 2, 8, 8)
    assert [[(p.start, p.stop) for p in part] for part in parts_on(layout, (4, 1, 1))] == [
        [(0, 2), (0, 8)], [(2, 4), (0, 8)], [(4, 6), (0, 8)], [(6, 8), (0, 8)],
    ]  # fmt: skip
    assert [[(p.start, p.stop) for p in part] for part in parts_on(layout, (2, 2, 1))] == [
        [(0, 4), (0, 4)], [(0, 4), (4, 8)], [(4, 8), (0, 4)], [(4, 8), (4, 8)],
    ]  # fmt: skip


def test_of_a_configuration():
    """A large vocabulary makes the last stage another one than the others; one box is no better."""
    overrides = ["grid.tensor=4", "grid.pipeline=2", "model.layers=6", "model.width=512", "model.heads=8",
                 "model.vocabulary=60000", "model.tied=false", "model.context=256", "train.batch=16",
                 "train.microbatches=8"]  # fmt: skip
    config = load_config(overrides=overrides)
    cut = between_stages(config, "cpu-cluster")
    assert sum(cut.layers) == 6
    assert {math.prod(box) for box in cut.boxes} == {4}
    machine = Machine.load("cpu-cluster")
    assert cut.seconds <= predict(config, machine).seconds
    settings = [f"{name}={json.dumps(value)}" for name, value in cut.settings.items()]
    found = predict(load_config(overrides=[*overrides, *settings]), machine)
    assert found.seconds == cut.seconds
    assert found.settings["pipeline.boxes"] == cut.settings["pipeline.boxes"]
    with pytest.raises(ValueError, match="pipeline.schedule = interleaved; use 1f1b"):
        between_stages(
            load_config(overrides=[*overrides, "pipeline.schedule=interleaved", "pipeline.virtual_stages=3"]),
            "cpu-cluster",
        )


def test_what_is_printed_trains(capsys, tmp_path):
    """The settings are of a configuration; what its boxes do not fit is refused, and so is a plan of one box."""
    command = ["plan", "jobs/train.toml", "grid.tensor=4", "model.tied=false", "--machine", "frontier"]
    main([*command, "--show", "boxes", "--json"])
    shown = json.loads(capsys.readouterr().out)
    settings = [f"{name}={json.dumps(value)}" for name, value in shown["settings"].items()]
    assert [name for name in shown["settings"]] == ["grid.tensor", "pipeline.boxes", "pipeline.partition"]
    config = load_config("jobs/train.toml", ["model.tied=false", *settings])
    assert [math.prod(box) for box in config.boxes] == [4, 4]
    with pytest.raises(ValueError, match="a search is of the box grid.tensor on every stage"):
        search(config, 8, "frontier")
    with pytest.raises(ValueError, match="a plan inside a stage is of the box grid.tensor on every stage"):
        inside_stage(config, "frontier")
    assert between_stages(config, "frontier").settings == shown["settings"]
    main([*command, "--show", "boxes", "--plot", "boxes.png"])
    assert "--plot draws --show attention, got --show boxes" in capsys.readouterr().err
    for boxes, said in [
        (["2x1x1"], "pipeline.boxes must be 2, one for each stage's ranks, of 2 ranks"),
        (["2x1x1", "4x1x1"], "of 2 ranks as grid.tensor has"),
        (["2x1", "1x2x1"], 'must be as \\["2x2x1", "4x1x1"\\]'),
        (["2x1x1", "0x2x1"], "integer of at least 1, got 0"),
        (["2x1x1", "1x2x1"], "pipeline ranks 0, 1 hold the same weights, by tied embeddings"),
    ]:
        with pytest.raises(ValueError, match=said):
            load_config("jobs/train.toml", [f"pipeline.boxes={json.dumps(boxes)}"])
    with pytest.raises(ValueError, match="a study has one box"):
        points("jobs/train.toml", ["model.tied=false", *settings], ranks=[8], mode="strong", vary="tensor")
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    assert configuration(tmp_path, ["grid.data=2"], 2).boxes is None  # a model that was trained so is of any grid
    with pytest.raises(ValueError, match="megatron"):
        load_config("jobs/train.toml", ['pipeline.boxes=["2x1x1", "1x2x1"]', "tensor.algorithm=megatron"])
