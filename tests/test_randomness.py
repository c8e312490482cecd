"""Numbers by name and index: slices equal the whole, and nobody makes more than a slice."""

import itertools

import numpy as np
import pytest
import torch

from hpctrain.randomness import Permutation, RngKey, fill_slice, seeded
from hpctrain.shard import Shard

KEY = RngKey(5, "test")


@pytest.mark.parametrize("shape", [(7,), (6, 5), (3, 4, 5)])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_every_slice_equals_that_part_of_the_whole(shape, chunk):
    whole = KEY.normal(0, int(np.prod(shape))).view(shape)
    ranges = [[slice(0, n), slice(0, n // 2), slice(n // 2, n), slice(1, 1)] for n in shape]
    for slices in itertools.product(*ranges):
        part = torch.empty(Shard(shape, slices).shape, dtype=torch.float64)
        fill_slice(part, Shard(shape, slices), KEY.normal, chunk)
        assert torch.equal(part, whole[slices])


def test_a_slice_is_filled_piece_by_piece():
    """Asked for a quarter of a matrix, no more than a few rows exist at once."""
    asked = []

    def numbers(start, count):
        asked.append(count)
        return KEY.uniform(start, count)

    shard = Shard((1000, 100), (slice(0, 500), slice(0, 50)))
    fill_slice(torch.empty(shard.shape), shard, numbers, chunk=1000)
    assert max(asked) == 1000
    assert sum(asked) == 500 * 100
    # by itself a rank has next to nothing beside its slice: malloc keeps what is freed, and a rank of y has whole rows
    asked.clear()
    wide = Shard((4096, 512), (slice(0, 4096), slice(384, 512)))
    fill_slice(torch.empty(wide.shape), wide, numbers)
    assert 8 * max(asked) <= 2**19


def test_streams_differ_by_seed_name_and_step():
    streams = [
        RngKey(1, "a").words(0, 8),
        RngKey(2, "a").words(0, 8),
        RngKey(1, "b").words(0, 8),
        RngKey(1, "a").words(0, 8, step=1),
    ]
    for a, b in itertools.combinations(streams, 2):
        assert not (a == b).any()
    assert (RngKey(1, "a").words(0, 8) == streams[0]).all()


def test_distributions():
    normal = KEY.normal(0, 200_000)
    assert abs(float(normal.mean())) < 0.01
    assert abs(float(normal.std()) - 1) < 0.01
    assert abs(float((normal.abs() > 2).double().mean()) - 0.0455) < 0.002
    uniform = KEY.uniform(0, 200_000)
    assert 0 < float(uniform.min()) < 1e-4
    assert abs(float(uniform.mean()) - 0.5) < 0.005
    kept = KEY.mask(3, 200_000, 0.25, step=2)
    assert abs(float(kept.double().mean()) - 0.75) < 0.005
    assert torch.equal(KEY.mask(11, 50, 0.25, step=2), kept[8:58])


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 1000, 65_537])
def test_permutation(length):
    shuffled = Permutation(length, KEY)(np.arange(length))
    assert np.array_equal(np.sort(shuffled), np.arange(length))
    if length > 100:
        assert (shuffled == np.arange(length)).mean() < 0.05
        assert abs(np.corrcoef(shuffled, np.arange(length))[0, 1]) < 0.15
        assert abs(np.corrcoef(shuffled[1:], shuffled[:-1])[0, 1]) < 0.15  # neighbours go to unrelated places


def test_permutation_of_more_than_memory_holds():
    places = np.arange(10**12, 10**12 + 1000)
    shuffled = Permutation(10**13, KEY)(places)
    assert len(set(shuffled.tolist())) == 1000
    assert shuffled.max() < 10**13


def test_generators_are_as_before(monkeypatch):
    """Also that of a GPU in use, which torch.manual_seed seeds as well."""
    gpu = {0: torch.tensor([7], dtype=torch.uint8)}
    for name, stands_in in {
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "get_rng_state": lambda device: gpu[device].clone(),
        "set_rng_state": lambda state, device: gpu.update({device: state}),
        "manual_seed_all": lambda seed: gpu.update({0: torch.tensor([seed % 256], dtype=torch.uint8)}),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stands_in)
    before = torch.get_rng_state()
    with seeded(KEY):
        drawn = torch.rand(3)
        assert gpu[0] == torch.initial_seed() % 256 != 7
    with seeded(KEY):
        assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(torch.get_rng_state(), before)
    assert gpu[0] == 7
