"""Points of a study whose widths are given, and which must fit."""

from dataclasses import replace

import pytest
from test_scale import BASE

from hpctrain import plan
from hpctrain.config import load_config
from hpctrain.scale import work
from hpctrain.scale.points import points


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("llama", {"ffn": 1376}),
        ("llama", {"ffn": 1376, "head_width": 32}),
        ("llama", {"ffn": 1378, "head_width": 6}),
        ("mixtral", {"ffn": 1376, "expert_ffn": 688, "experts": 4, "dense_layers": 1, "router": "sigmoid"}),
    ],
)
def test_widths_that_are_given_grow_as_the_model_does(config, kind, given):
    base = [f"model.kind={kind}", "model.layers=4", "model.width=512", "model.heads=8", "model.vocabulary=64"]
    base += [f"model.{name}={value}" for name, value in given.items()]
    found = points(config, base, [1, 4, 16], "weak", "tensor")
    assert [point.config.model.width for point in found] == [512, 1024, 2048]
    for name in {"ffn", "head_width", "expert_ffn"} & {*given}:
        assert [getattr(point.config.model, name) for point in found] == [n * given[name] for n in (1, 2, 4)]
    shares = [work.flops(point.config) / point.ranks for point in found]
    assert shares == pytest.approx([shares[0]] * 3, rel=0.05)
    for mode, vary in (("strong", "tensor"), ("weak", "data")):
        same = points(config, base, [1, 4], mode, vary)[1].config.model
        assert [getattr(same, name) for name in given] == [*given.values()]


def test_auto_takes_what_fits(config):
    """Replicas wait for the fewest messages; where a rank has no memory for the whole model it is divided."""
    machine = plan.Machine.load("cpu-cluster")
    link = replace(machine.link[0], latency=0.01)
    machine = replace(machine, link=(link,), peak={"fp32": 1e9}, device=replace(machine.device, launch=0.0))
    base = [*BASE, "model.width=256", "model.context=16", "model.tied=false"]

    def replicas(memory):
        small = replace(machine, device=replace(machine.device, memory=memory))
        return points(config, base, [1, 2], "strong", "auto", small)[1].config.grid_shape["replica"]

    whole, cut = (
        plan.predict(load_config(overrides=[*base, f"grid.{axis}=2"]), machine).memory_bytes
        for axis in ("data", "tensor")
    )
    assert cut < whole
    assert [replicas(memory) for memory in (whole, (whole + cut) / 2, 1.0)] == [2, 1, 2]
