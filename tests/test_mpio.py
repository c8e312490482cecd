"""Shards read through parallel HDF5, which takes an h5py that was built against it (README of h5py: HDF5_MPI=ON, on
Debian's libhdf5-openmpi-dev); elsewhere these tests say that they were skipped."""

import h5py
import numpy as np
import pytest

from hpctrain.comm import together
from hpctrain.data import ShardedTokens, pack

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        not h5py.get_config().mpi, reason=f"h5py {h5py.__version__} is built without MPI: no mpio driver to test"
    ),
]


def test_each_rank_reads_what_it_wants(world, tmp_path):
    """Different ranges, and different numbers of them, on each rank."""
    folder = world.bcast(str(tmp_path))
    text = "".join(f"{n} times {n} is {n * n}\n" for n in range(4000))
    with together(world):
        if world.rank == 0:
            (tmp_path / "text.txt").write_text(text)
            pack([f"{folder}/text.txt"], f"{folder}/data.h5", shard_tokens=30_000)
    true = np.frombuffer(text.encode(), np.uint8)
    data = ShardedTokens(f"{folder}/data.h5", comm=world)
    assert data.driver == "mpio"
    generator = np.random.default_rng(world.rank)
    for start in generator.integers(0, len(true) - 500, 5 + world.rank):
        assert np.array_equal(data.read(start, 500), true[start : start + 500])
    world.Barrier()
    data.close()
