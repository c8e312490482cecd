"""What could not be read is not published."""

import logging
import re

import pytest
import torch
from checkpoint_checks import SHARDS, Alone, Numbers

from hpctrain.checkpoint import Checkpointer, folder, index
from hpctrain.shard import Shard
from hpctrain.shard_entries import Entry


def test_nothing_is_pruned_unless_the_newest_can_be_read_back(tmp_path, monkeypatch):
    saver = Checkpointer(tmp_path, Alone(), keep=1, background=False)
    assert saver.save(1, Numbers(1), {}) is None
    publish = folder.publish

    def and_damage(root, step):
        path = publish(root, step)
        content = bytearray((path / SHARDS).read_bytes())
        place = content.find(Numbers(2).tensors["3/int64.2"].numpy().tobytes()[:64])
        content[place] ^= 1
        (path / SHARDS).write_bytes(content)
        return path

    with monkeypatch.context() as patch:
        patch.setattr(folder, "publish", and_damage)
        assert "rank-00000.h5 is corrupt" in saver.save(2, Numbers(2), {})
    assert folder.steps(tmp_path) == [1]
    assert (tmp_path / "step-2.bad").exists()
    assert saver.save(3, Numbers(3), {}) is None
    assert folder.steps(tmp_path) == [3]


@pytest.mark.parametrize("what", ["a rank's manifest", "a table", "the manifest"])
def test_nothing_is_published_that_is_too_large_to_be_read(tmp_path, monkeypatch, what):
    """The save fails and says why; the older one stays."""
    saver = Checkpointer(tmp_path, Alone(), keep=1, background=False)
    assert saver.save(1, Numbers(1), {}) is None
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "step-1").rglob("*.*") if path.is_file()}
    most = {"a rank's manifest": sizes["rank-00000.json"] - 1, "a table": sizes["holders.bin"] - 1,
            "the manifest": 100_000}[what]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(index, "LARGEST", most)
        error = saver.save(2, Numbers(2), {"note": "x" * (most if what == "the manifest" else 0)})
    assert "more than the" in error
    assert f"{most} that are read again" in error
    assert folder.steps(tmp_path) == [1]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["latest", "step-1"]
    assert Checkpointer(tmp_path, Alone()).resume(Numbers(9)).step == 1


UNREADABLE = {
    "name": ({"a tensor's\nname": torch.ones(3)}, "step 1: .* is not the name of a tensor"),
    "dims": ({"x": torch.ones([1] * 33)}, "step 1: rank 0: "),
    "type": ({"x": torch.ones(3, dtype=torch.complex32)}, "step 1: x has the unknown type 'complex32'"),
    "number": ({"x": torch.tensor(1j)}, "step 1: x is a complex64 without dims"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_nothing_is_published_that_would_be_refused(tmp_path, what):
    numbers = Numbers()
    numbers.tensors, message = UNREADABLE[what]
    saver = Checkpointer(tmp_path, Alone(), background=False)
    assert re.match(message, saver.save(1, numbers, {}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("by", [-1, 1])
def test_nothing_is_published_that_is_not_there_once(tmp_path, by):
    """A row that no rank saves, or two do."""

    class Wrong(Numbers):
        def to_save(self):
            part = Shard((8, 5), (slice(0, 7), slice(0, 5)))
            twice = Entry("x", Shard((8, 5), (slice(6, 8), slice(0, 5))), torch.ones(2, 5))
            return [Entry("x", part, torch.ones(7, 5)), *[twice] * (by + 1 > 0)]

    error = Checkpointer(tmp_path, Alone(), background=False).save(1, Wrong(), {})
    assert f"the files hold {35 if by < 0 else 45} of the 40 elements of x" in error
    assert list(tmp_path.iterdir()) == []


def test_no_link_to_a_complete_checkpoint(tmp_path, monkeypatch, caplog):
    """It is a checkpoint all the same; a save that is done must not be reported as failed."""
    caplog.set_level(logging.WARNING, "hpctrain")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "point", full)
    saver = Checkpointer(tmp_path, Alone(), background=False)
    assert saver.save(1, Numbers(1), {}) is None
    assert saver.saved == 1
    assert "does not point to step-1: [Errno 28]" in caplog.text
    assert Checkpointer(tmp_path, Alone()).resume(Numbers(9)).step == 1
