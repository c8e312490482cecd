"""Experts whose features several ranks divide, against a loop over tokens and their whole experts."""

import pytest
import torch
from experts_checks import EXPERTS, check, divided, mixture, tokens_on
from test_experts import counts_of

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]

KINDS = [
    {"ffn": 3, "activation": "gelu", "top_k": EXPERTS, "shared_experts": 1},  # of four ranks one has no features
    {"experts": 1, "top_k": 1, "ffn": 1},  # groups of ranks without an expert
    {},
    {"scores": "sigmoid", "balance_bias": 0.1, "experts": 6, "groups": 3, "groups_kept": 2, "scale": 2.5, "ffn": 7},
]


@pytest.mark.parametrize("dispatch", ["all_to_all", "gather", "once"])
@pytest.mark.parametrize("way", ["shared memory", "messages"])
def test_equals_one_rank(world, way, dispatch):
    for number, grid in enumerate(divided(world.size, way)):
        for options in KINDS[number % 2 :: 2]:
            check(grid, 3, 5, {"dispatch": dispatch, **options})
        check(grid, 1, 1, {"dispatch": dispatch})
        layer, serial = check(grid, 3, 7, {"dispatch": dispatch, "capacity": 0.8})
        assert counts_of(world, layer) == [*serial.counts, len(serial.dropped)]
        assert len(serial.dropped) > 0


def test_parts_of_each_rank(world):
    """Neighbours have the same experts, and other features of them."""
    for grid in divided(world.size):
        layer, parts = mixture(grid, experts=5, ffn=6).experts, grid.expert_tensor
        group, part = divmod(grid.expert.rank, parts)
        experts = {1: [5], 2: [3, 2]}[grid.expert.size // parts][group]
        features = {2: [3, 3], 3: [2, 2, 2], 4: [2, 2, 1, 1]}[parts][part]
        assert layer.up.shape == (experts, 2, features, 7)
        assert layer.down.shape == (experts, 7, features)


def test_replicas_are_refused(world):
    for grid in divided(world.size):
        layer, tokens = mixture(grid, replicate_hot=1), tokens_on(grid, 3, 4)
        x = torch.zeros(tokens.local_rows, 7 // grid.tensor.y.size + (grid.tensor.y.rank < 7 % grid.tensor.y.size))
        with pytest.raises(ValueError, match="replicate_hot sends whole experts along, got 1 where grid.expert_tensor"):
            layer(x.double(), tokens)
