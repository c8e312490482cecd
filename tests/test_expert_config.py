"""grid.expert: which grids and models it is for."""

import pytest

from hpctrain import models
from hpctrain.config import load_config

GRID = ["grid.data=3", "grid.pipeline=2", "grid.tensor=2"]


@pytest.mark.parametrize(
    ("has_experts", "overrides", "message"),
    [
        (
            False, ["grid.expert=2"],
            "grid.expert = 2 spreads the experts of a mixture, which model.kind = gpt2 has not got; use grid.expert=1",
        ),
        (
            True, ["grid.expert=4"],
            "grid.expert must divide the 6 ranks of a pipeline stage, data × tensor: 1, 2, 3 or 6, got 4",
        ),
        (
            True, ["grid.expert=3", "grid.expert_tensor=2"],
            "grid.expert_tensor must divide grid.expert = 3, whose ranks divide each expert: 1 or 3, got 2",
        ),
        (
            True, ["grid.expert=2", "grid.expert_tensor=2", "experts.replicate_hot=1"],
            "experts.replicate_hot = 1 sends whole experts along, which grid.expert_tensor = 2 divides; use 0, or "
            "grid.expert_tensor=1",
        ),
        (True, ["grid.expert=0"], "grid.expert must be at least 1, got 0"),
        (
            True, ["grid.expert=3", "data_parallel.method=local_sgd"],
            "data_parallel.method = local_sgd has all weights on every replica, got grid.expert = 3; use 1, or another "
            "method",
        ),
        (
            True, ["grid.expert=3", "data_parallel.method=parameter_server"],
            "data_parallel.method = parameter_server has all weights on every replica, got grid.expert = 3; use 1, or "
            "another method",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(monkeypatch, has_experts, overrides, message):
    monkeypatch.setattr(type(models.get("gpt2")), "experts", has_experts)
    with pytest.raises(ValueError) as refused:
        load_config(overrides=[*GRID, *overrides])
    assert str(refused.value) == message


@pytest.mark.parametrize("expert", [1, 2, 3, 6])
def test_divisors_of_data_and_tensor(monkeypatch, expert):
    monkeypatch.setattr(type(models.get("gpt2")), "experts", True)
    assert load_config(overrides=[*GRID, f"grid.expert={expert}"]).grid.expert == expert
