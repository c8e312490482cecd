"""Data opened by many ranks: one reads the index, each looks after some shards, and all hear of what is wrong."""

from pathlib import Path

import numpy as np
import pytest

from hpctrain import files
from hpctrain.comm import together
from hpctrain.data import ShardedTokens, pack, shards

pytestmark = pytest.mark.mpi
TEXT = b"forty-one letters make up this long text\n"


@pytest.fixture
def index(world, tmp_path):
    """Of 42 tokens in 14 shards, in one folder for all ranks."""
    folder = Path(world.bcast(str(tmp_path)))
    with together(world):
        if world.rank == 0:
            (folder / "text.txt").write_bytes(TEXT)
            pack([str(folder / "text.txt")], folder / "data.h5", shard_tokens=3)
    return folder / "data.h5"


def test_start_looks_once_at_each_shard(world, index, monkeypatch):
    """All ranks together, and only rank 0 at the index, however many ranks there are."""
    seen, status, read_index = [], files.status, shards.read_index
    monkeypatch.setattr(files, "status", lambda path: (seen.append(path.name), status(path))[1])
    monkeypatch.setattr(shards, "read_index", lambda path: (seen.append("index"), read_index(path))[1])
    data = ShardedTokens(index, comm=world)
    all_seen = world.allgather(seen)
    assert all(len(one) <= -(-14 // world.size) for one in all_seen[1:])
    names = sorted(name for one in all_seen for name in one)
    assert names == sorted(["index", "data.h5", *(path.name for path in index.parent.glob("data-*"))])
    start = 5 * world.rank
    assert bytes(data.read(start, 5).astype(np.uint8)) == TEXT[start : start + 5]
    data.close()


@pytest.mark.parametrize("number", [0, 5, 13])
def test_a_missing_shard_is_told_by_all_ranks(world, index, number):
    with together(world):
        if world.rank == 0:
            sorted(index.parent.glob("data-*"))[number].unlink()
    with pytest.raises(ValueError, match=f"shard .*data-.*-{number:05d}.h5 of .* is missing"):
        ShardedTokens(index, comm=world)


def test_the_index_is_refused_by_all_ranks(world, index):
    with together(world):
        if world.rank == 0:
            index.write_bytes(b"")
    with pytest.raises(ValueError, match=r"data.h5 cannot be opened as HDF5"):
        ShardedTokens(index, comm=world)


def test_the_digest_does_not_depend_on_the_ranks(world, index):
    data = ShardedTokens(index, comm=world)
    assert data.digest(world) == ShardedTokens(index).digest()
    assert len(set(world.allgather(data.digest(world)))) == 1
    with together(world):
        if world.rank == 0:
            (index.parent / "other.txt").write_bytes(TEXT.swapcase())
            pack([str(index.parent / "other.txt")], index.parent / "other.h5", shard_tokens=100)
    assert ShardedTokens(index.parent / "other.h5", comm=world).digest(world) != data.digest(world)
    data.close()
