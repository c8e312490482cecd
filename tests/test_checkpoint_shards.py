"""Files of shards: any part of a piece that has several checksummed blocks, and damage in each of them."""

import math
import random
import tempfile
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint import pieces, shards
from hpctrain.shard import Shard
from hpctrain.shard_entries import Entry

ROWS, COLUMNS = 2500, 1031  # 9.8 MiB of float32: ten blocks, none of which ends with a row
TYPE = torch.float32


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(path, piece, numbers)"""
    folder = tmp_path_factory.mktemp("shards")
    numbers = torch.arange(ROWS * COLUMNS, dtype=TYPE).view(ROWS, COLUMNS)
    shard = Shard((ROWS, COLUMNS), (slice(0, ROWS), slice(0, COLUMNS)))
    (file,) = shards.write(folder, 0, [Entry("numbers", shard, numbers)])
    (piece,) = file.pieces["numbers"]
    assert len(piece.crc32) == 10
    return folder / file.name, piece, numbers


def parts():
    generator = random.Random(0)
    yield slice(0, ROWS), slice(0, COLUMNS)
    yield slice(ROWS - 1, ROWS), slice(COLUMNS - 1, COLUMNS)
    for _ in range(20):
        first, last = sorted(generator.sample(range(ROWS + 1), 2))
        yield slice(first, last), slice(0, COLUMNS)
        left, right = sorted(generator.sample(range(COLUMNS + 1), 2))
        yield slice(first, last), slice(left, right)


@pytest.mark.parametrize("rows_at_once", [shards.ROWS, 1 << 20])
def test_any_part(written, monkeypatch, rows_at_once):
    """Into memory that lies in a row or not, of the same type or another; in any number of steps."""
    monkeypatch.setattr(shards, "ROWS", rows_at_once)
    path, piece, numbers = written
    with shards.Reader(path) as reader:
        for part in parts():
            wanted = numbers[part]
            for out in (torch.empty(wanted.shape), torch.empty(wanted.shape[::-1]).T, wanted.double().mul(0)):
                reader.read(piece, TYPE, part, out)
                assert torch.equal(out, wanted.to(out.dtype))


def test_some_columns_of_long_rows():
    """As of replicas that lie along the first dim. Whole rows are not read for some of their columns."""
    shape = (3, 4, 700, 1100)
    numbers = torch.arange(math.prod(shape), dtype=TYPE).view(shape)
    shard = Shard(shape, tuple(slice(0, size) for size in shape))
    with tempfile.TemporaryDirectory() as folder:
        (file,) = shards.write(Path(folder), 0, [Entry("numbers", shard, numbers)])
        with shards.Reader(Path(folder) / file.name) as reader:
            for part in (
                (slice(1, 2), slice(2, 3), slice(5, 8), slice(0, 1100)),
                (slice(1, 2), slice(2, 3), slice(690, 700), slice(3, 7)),
                (slice(0, 3), slice(1, 3), slice(40, 42), slice(0, 1)),
            ):
                out, before = torch.empty(numbers[part].shape), reader.bytes
                reader.read(file.pieces["numbers"][0], TYPE, part, out)
                assert torch.equal(out, numbers[part])
                outer = out.shape[0] * out.shape[1]
                assert reader.bytes - before <= outer * 4 * 700 * 1100 + 2 * outer * pieces.BLOCK


def test_each_block_is_checked(written, tmp_path):
    """Whenever a part of it is read, and no other one."""
    path, piece, numbers = written
    whole, row = path.read_bytes(), 4 * COLUMNS
    for block in range(10):
        place = piece.start + block * pieces.BLOCK + 5000
        (tmp_path / "bad").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with shards.Reader(tmp_path / "bad") as reader:
            for first in range(0, ROWS, 100):
                part = slice(first, first + 10), slice(3, 7)
                blocks = {first * row // pieces.BLOCK, ((first + 10) * row - 1) // pieces.BLOCK}
                out = torch.empty(10, 4)
                if block in blocks:
                    with pytest.raises(pieces.Corrupt, match="bad is corrupt"):
                        reader.read(piece, TYPE, part, out)
                else:
                    reader.read(piece, TYPE, part, out)
                    assert torch.equal(out, numbers[part])


def test_a_file_that_ends_early(written, tmp_path):
    path, piece, _ = written
    (tmp_path / "short").write_bytes(path.read_bytes()[: piece.stop - 1])
    with shards.Reader(tmp_path / "short") as reader, pytest.raises(pieces.Corrupt, match="short ends at byte"):
        reader.check(piece)
