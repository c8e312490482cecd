"""Saves that are cut short or fail, at every point: a whole checkpoint is left, and what is left over is cleaned."""

import errno
import logging
import os
import signal
import subprocess
import sys

import h5py
import pytest
import torch
from checkpoint_checks import Alone, Numbers
from children import in_child, limited
from running import ROOT

from hpctrain.checkpoint import Checkpointer, Corrupt, folder, index, shards
from hpctrain.checkpoint.verify import verify
from hpctrain.shard import Shard
from hpctrain.shard_entries import Entry

EVENTS = {"open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "shutil.rmtree"}


class Count:
    """Calls `act` at the n-th of the operations by which a save changes the disk."""

    def __init__(self, number, act):
        self.left, self.act = number, act
        sys.addaudithook(lambda event, _: self.point() if event in EVENTS else None)
        fsync, write = os.fsync, h5py.Dataset.write_direct
        os.fsync = lambda handle: (self.point(), fsync(handle))
        h5py.Dataset.write_direct = lambda *a: (self.point(), write(*a))

    def point(self):
        self.left -= 1
        if self.left == 0:
            self.act()


def test_killed_at_every_point(tmp_path):
    """The third save, with older ones to prune."""
    first = Checkpointer(tmp_path, Alone(), background=False)
    for step in (1, 2):
        assert first.save(step, Numbers(step), {}) is None

    def save(number):
        Count(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        saver = Checkpointer(tmp_path, Alone(), background=False)
        assert saver.save(3, Numbers(3), {}) is None

    found = []
    for number in range(1, 1000):
        status = in_child(save, number)
        assert status in (-signal.SIGKILL, 0)
        numbers = Numbers(9)
        again = Checkpointer(tmp_path, Alone())
        told = again.resume(numbers)
        again.clean()
        found.append(told.step)
        assert numbers == Numbers(told.step), number
        assert told.step in (2, 3)
        assert not list(tmp_path.glob("*.tmp"))
        assert all(verify(folder.place(tmp_path, step)) for step in folder.steps(tmp_path))
        if status == 0:
            break
        if told.step == 3:  # for the next round, as it was
            folder.place(tmp_path, 3).rename(tmp_path / "step-3.tmp")
            folder.clean(tmp_path)
            if 1 not in folder.steps(tmp_path):  # which is not saved where there is a later one
                aside = folder.place(tmp_path, 2).rename(tmp_path / "two")
                assert first.save(1, Numbers(1), {}) is None
                aside.rename(folder.place(tmp_path, 2))
                folder.point(tmp_path, 2)
    assert status == 0
    assert found == sorted(found)
    assert found.count(2) > 25
    assert found.count(3) > 5
    assert folder.steps(tmp_path) == [3, 2]


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk(tmp_path, background):
    """HDF5 itself fails, at any size of file; the older checkpoint stays, and the next save succeeds."""

    def work(size):
        saver = Checkpointer(tmp_path, Alone(), background=background)
        assert saver.save(1, Numbers(1), {}) is None
        assert saver.finish() is None
        limited(size)
        error = saver.save(2, Numbers(2), {}) or saver.finish()
        assert error.startswith("step 2: rank 0: "), error
        assert saver.saved == 1
        assert [path.name for path in sorted(tmp_path.iterdir())] == ["latest", "step-1"]
        numbers = Numbers(9)
        assert Checkpointer(tmp_path, Alone()).resume(numbers).step == 1
        assert numbers == Numbers(1)

    for size in (100, 5000, 200_000):
        assert in_child(work, size) == 0
        folder.place(tmp_path, 1).rename(tmp_path / "step-1.tmp")


LEAVES = """
import sys, threading, time
from pathlib import Path
import h5py
from checkpoint_checks import Alone, Numbers
from hpctrain.checkpoint import Checkpointer, shards

writing, write = threading.Event(), shards.write

def slow(*args):
    with h5py._objects.phil:  # the lock of all of h5py
        writing.set()
        time.sleep(1)
    return write(*args)

shards.write = slow
Checkpointer(Path(sys.argv[1]), Alone()).save(1, Numbers(1), {})
writing.wait()
sys.exit(85)
"""


def test_an_exit_while_a_save_is_under_way(tmp_path):
    """Waits for it, as the interpreter's end would for ever for the lock of a thread that it stops."""
    command = [sys.executable, "-c", LEAVES, tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    assert subprocess.run(command, env=environment, timeout=60, check=False).returncode == 85
    assert [path.name for path in tmp_path.glob("*/*/*.h5")] == ["rank-00000.h5"]


def test_a_save_after_a_failed_one(tmp_path, monkeypatch):
    saver = Checkpointer(tmp_path, Alone(), background=False)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write", fails(OSError(errno.ENOSPC, "No space left on device")))
        assert saver.save(1, Numbers(1), {}) == "step 1: rank 0: [Errno 28] No space left on device"
    assert saver.save(2, Numbers(2), {}) is None
    assert folder.steps(tmp_path) == [2]


def fails(error):
    def call(*_, **__):
        raise error

    return call


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    saver = Checkpointer(tmp_path / "checkpoints", Alone())
    assert "checkpoints" in saver.save(1, Numbers(1), {})
    assert not saver.busy


def test_a_programming_error_is_not_taken_for_a_full_disk(tmp_path, monkeypatch):
    saver = Checkpointer(tmp_path, Alone())
    monkeypatch.setattr(shards, "write", fails(TypeError("a mistake")))
    saver.save(1, Numbers(1), {})
    with pytest.raises(TypeError, match="a mistake"):
        saver.finish()


def test_a_checkpoint_is_never_overwritten(tmp_path):
    saver = Checkpointer(tmp_path, Alone(), background=False)
    assert saver.save(1, Numbers(1), {}) is None
    assert "step-1 exists already" in saver.save(1, Numbers(2), {})
    numbers = Numbers(9)
    saver.resume(numbers)
    assert numbers == Numbers(1)


def broken(monkeypatch, error):
    monkeypatch.setattr(shards, "check_contents", fails(error))


def test_a_read_that_fails_condemns_nothing(tmp_path, monkeypatch, caplog):
    """The new checkpoint is complete, and used; the older one stays, since the new one was not read back."""
    caplog.set_level(logging.WARNING, "hpctrain")
    saver = Checkpointer(tmp_path, Alone(), keep=1, background=False)
    assert saver.save(1, Numbers(1), {}) is None
    with monkeypatch.context() as patch:
        broken(patch, OSError(errno.EIO, "Input/output error"))
        assert saver.save(2, Numbers(2), {}) is None
    assert saver.saved == 2
    assert "step-2 stays, and older ones beside it, not being verified: rank 0: [Errno 5]" in caplog.text
    assert folder.steps(tmp_path) == [2, 1]
    assert folder.bad(tmp_path) == []
    assert saver.save(3, Numbers(3), {}) is None
    assert folder.steps(tmp_path) == [3]


def test_the_older_one_is_gone_back_to(tmp_path, monkeypatch):
    """Where the new one is corrupt: `saved` is what a rollback finds."""
    saver = Checkpointer(tmp_path, Alone(), keep=1, background=False)
    assert saver.save(1, Numbers(1), {}) is None
    with monkeypatch.context() as patch:
        broken(patch, Corrupt("it is corrupt"))
        assert saver.save(2, Numbers(2), {}) == "step 2: rank 0: it is corrupt"
    assert saver.saved == 1
    assert (folder.steps(tmp_path), folder.bad(tmp_path)) == ([1], ["step-2.bad"])


def test_a_file_that_cannot_be_deleted(tmp_path, monkeypatch, caplog):
    """As the .nfs file of one that another process has open: said, and no hindrance to going on or to a new save."""
    caplog.set_level(logging.WARNING, "hpctrain")
    saver = Checkpointer(tmp_path, Alone(), keep=1, background=False)
    assert saver.save(1, Numbers(1), {}) is None
    (tmp_path / "step-2.tmp").mkdir()
    (tmp_path / "step-2.tmp/.nfs0001").touch()
    rmtree = folder.shutil.rmtree

    def silly(path):
        if list(path.rglob(".nfs*")):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        rmtree(path)

    monkeypatch.setattr(folder.shutil, "rmtree", silly)
    saver.clean()
    assert Checkpointer(tmp_path, Alone()).resume(Numbers(9)).step == 1
    assert "step-2.tmp stays: [Errno 39]" in caplog.text
    assert saver.save(2, Numbers(2), {}) is None
    (tmp_path / "step-2/ranks-00000/.nfs0002").touch()
    assert verify(tmp_path / "step-2").manifest.step == 2
    assert saver.save(3, Numbers(3), {}) is None  # of which step 2 cannot be deleted
    assert folder.steps(tmp_path) == [3]
    monkeypatch.undo()
    saver.clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-3"]


@pytest.mark.parametrize("call", ["listdir", "lstat", "open"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_what_cannot_be_read_is_not_taken_for_nothing(tmp_path, monkeypatch, call, number):
    """A job that would begin anew, or set a good checkpoint aside, while its disk is away for a moment."""
    saver = Checkpointer(tmp_path, Alone(), background=False)
    assert saver.save(1, Numbers(1), {}) is None

    def away(original):
        def call(path, *arguments, **options):
            if str(path).startswith(str(where)):
                raise OSError(number, os.strerror(number))
            return original(path, *arguments, **options)

        return call

    where = tmp_path if call == "listdir" else tmp_path / "step-1/manifest.json"
    with monkeypatch.context() as patch:
        patch.setattr(os, call, away(getattr(os, call)))
        with pytest.raises(OSError, match=f"Errno {number}"):
            Checkpointer(tmp_path, Alone()).resume(Numbers(9))
        where = tmp_path
        if call == "lstat":  # whether the step is there already cannot be told
            assert f"Errno {number}" in saver.save(2, Numbers(2), {})
    assert Checkpointer(tmp_path, Alone()).resume(Numbers(9)).step == 1
    assert folder.bad(tmp_path) == []


def test_background_saves_what_was_there_when_it_was_called(tmp_path):
    saver = Checkpointer(tmp_path, Alone(), keep=1)
    numbers = Numbers(1)
    for step in (1, 2):
        assert saver.save(step, numbers, {}) is None
        numbers.clear()
        assert saver.finish() is None
        loaded = Numbers(9)
        assert Checkpointer(tmp_path, Alone()).resume(loaded).step == step
        assert loaded == Numbers(step)
        numbers = Numbers(2)
    assert saver.take_stall() > 0 == saver.take_stall()


def test_several_files_a_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 1000)
    monkeypatch.setattr(shards, "FILES", 100)
    saver = Checkpointer(tmp_path, Alone(), background=False)
    assert saver.save(1, Numbers(1), {}) is None
    files = sorted(path.name for path in (tmp_path / "step-1/ranks-00000").glob("*.h5"))
    assert files[0] == "rank-00000-1.h5"
    assert files[-1] == "rank-00000.h5"
    assert len(files) > 5
    ((_, written),) = index.stored(verify(tmp_path / "step-1"))
    assert [file.name for file in written][:2] == ["rank-00000.h5", "rank-00000-1.h5"]
    numbers = Numbers(9)
    Checkpointer(tmp_path, Alone()).resume(numbers)
    assert numbers == Numbers(1)


def test_an_empty_shard(tmp_path):
    """Of a dim that is smaller than its axis; other ranks hold the rest."""

    class Some(Numbers):
        def to_save(self):
            none = Entry("0/float32.0", Shard((7, 5), (slice(7, 7), slice(0, 5))), torch.empty(0, 5))
            return [none, *super().to_save()]

    assert Checkpointer(tmp_path, Alone(), background=False).save(1, Some(), {}) is None
    numbers = Numbers(9)
    Checkpointer(tmp_path, Alone()).resume(numbers)
    assert numbers == Numbers()


def test_another_type_in_the_next_save(tmp_path):
    """The memory that is kept from save to save is not that of the type before."""
    saver = Checkpointer(tmp_path, Alone())
    for step, dtype in enumerate((torch.bfloat16, torch.float32), 1):
        numbers = Numbers()
        numbers.tensors = {"x": torch.full((3,), 1.001, dtype=dtype)}
        assert saver.save(step, numbers, {}) is None
        assert saver.finish() is None
    found = Numbers()
    found.tensors = {"x": torch.zeros(3)}
    saver.resume(found)
    assert found == numbers
