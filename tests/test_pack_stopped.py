"""Packing that a signal or the end of a process stops."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_pack_formats import read

from hpctrain import files
from hpctrain.cli import main
from hpctrain.data import corpus, documents


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.fixture
def own_handler():
    """Of SIGTERM: no signal of a packing reaches it, and afterwards it is there again."""

    def fail(*_):
        pytest.fail("the signal was not taken over")

    before = signal.signal(signal.SIGTERM, fail)
    yield
    assert signal.signal(signal.SIGTERM, before) == fail


def test_a_signal_before_the_first_document(tmp_path, monkeypatch, own_handler):
    """Nothing is written yet: it ends at once."""

    def below(folder):
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it goes on")

    monkeypatch.setattr(corpus, "_below", below)
    with pytest.raises(SystemExit, match="143"):
        main(["pack", str(tmp_path), "-o", str(tmp_path / "d.h5")])


def test_a_signal_while_hdf5_writes(tmp_path, monkeypatch, own_handler):
    """HDF5 crashes when a handler raises there."""
    (tmp_path / "a.txt").write_text("0123456789abcde\n" * 600_000)  # more than its cache of chunks holds
    seek, sent = files.Disk.seek, []

    def signalled(self, *place):
        if not sent:
            sent.append("sent")
            signal.raise_signal(signal.SIGTERM)
            sent.append("kept")
        return seek(self, *place)

    monkeypatch.setattr(files.Disk, "seek", signalled)
    with pytest.raises(SystemExit, match="143"):
        main(["pack", str(tmp_path / "a.txt"), "-o", str(tmp_path / "d.h5")])
    assert sent == ["sent", "kept"]
    assert list(tmp_path.glob("d*")) == []


def test_a_signal_while_records_are_skipped(tmp_path, monkeypatch, own_handler):
    """All that follow, which may be many."""
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' + "{}\n" * 5)
    problem, seen = documents._problem, []

    def signalled(record, name):
        seen.append(record)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGTERM)
        return problem(record, name)

    monkeypatch.setattr(documents, "_problem", signalled)
    with pytest.raises(SystemExit, match="143"):
        main(["pack", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "d.h5"), "--field", "text"])
    assert len(seen) == 3
    assert list(tmp_path.glob("d*")) == []


def test_a_signal_that_ends_the_processes(tmp_path, monkeypatch, own_handler):
    """As they begin, for instance: no error of theirs."""
    (tmp_path / "a.txt").write_text("one")

    def broken(pieces, *_):
        yield from ()
        next(pieces)
        signal.raise_signal(signal.SIGTERM)
        raise ChildProcessError

    monkeypatch.setattr(sys.modules["hpctrain.data.pack"], "encoded", broken)
    with pytest.raises(SystemExit, match="143"):
        main(["pack", str(tmp_path / "a.txt"), "-o", str(tmp_path / "d.h5")])
    assert list(tmp_path.glob("d*")) == []


@pytest.mark.parametrize("count", [2, 3])
def test_signals_after_the_last_document(tmp_path, monkeypatch, own_handler, count):
    """What is left to do is short, but the third signal ends it all the same; `timeout` sends two."""
    (tmp_path / "a.txt").write_text("one")
    sync, synced = files.sync, []

    def signalled(path):
        synced.append(path)
        for _ in range(count if len(synced) == 1 else 0):
            signal.raise_signal(signal.SIGTERM)
        sync(path)

    monkeypatch.setattr(files, "sync", signalled)
    command = ["pack", str(tmp_path / "a.txt"), "-o", str(tmp_path / "d.h5")]
    if count == 2:
        assert main(command) == 0
        assert len(read(tmp_path / "d.h5")) == 4
    else:
        with pytest.raises(SystemExit, match="143"):
            main(command)
        assert list(tmp_path.glob("d*")) == []


def test_packing_in_a_thread(tmp_path):
    """Which cannot set handlers of signals."""
    (tmp_path / "a.txt").write_text("one")
    status = []
    command = ["pack", str(tmp_path / "a.txt"), "-o", str(tmp_path / "d.h5")]
    thread = threading.Thread(target=lambda: status.append(main(command)))
    thread.start()
    thread.join()
    assert status == [0]


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGTERM, "all are killed", pytest.param("one is killed", marks=pytest.mark.slow)],
)
def test_processes_end_with_their_parent(tmp_path, number):
    """When it is killed; and at a signal to them all, which is no error of theirs. It ends when they are killed, while
    they send as well, for which it is stopped: nobody reads."""
    (tmp_path / "a.txt").write_text("0123456789abcde\n" * 1_000_000)
    script = "import sys; from hpctrain.cli import main\nif __name__ == '__main__': sys.exit(main(sys.argv[1:]))"
    (tmp_path / "run.py").write_text(script)
    command = [sys.executable, str(tmp_path / "run.py"), "pack", str(tmp_path / "a.txt"), "-o", str(tmp_path / "d.h5")]
    command += ["--processes", "2"]
    job = subprocess.Popen(command, start_new_session=True, stderr=(tmp_path / "stderr").open("w"))
    children, deadline = f"/proc/{job.pid}/task/{job.pid}/children", time.monotonic() + 60
    started = []
    while not list(tmp_path.glob("d-*")) or len(started) < 3:
        assert time.monotonic() < deadline
        started = open(children).read().split()
        time.sleep(0.01)
    workers = started[1:]  # the first is Python's own, and ends with the others
    if number == signal.SIGKILL:
        job.kill()
    elif number == signal.SIGTERM:
        os.killpg(job.pid, number)
    else:
        job.send_signal(signal.SIGSTOP)
        waiting = 0
        while waiting < 10:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            waiting = waiting + 1 if {_state(pid) for pid in workers} == {"S"} else 0
        for pid in workers if number == "all are killed" else workers[:1]:
            os.kill(int(pid), signal.SIGKILL)
        job.send_signal(signal.SIGCONT)
    status = job.wait(60)
    if isinstance(number, str):
        assert (status, list(tmp_path.glob("d*"))) == (2, [])
        assert "processes that encode text was killed" in (tmp_path / "stderr").read_text()
    if number == signal.SIGTERM:
        assert status == 143, (tmp_path / "stderr").read_text()
        assert list(tmp_path.glob("d*")) == []
    while any(_state(pid) != "Z" for pid in started):
        assert time.monotonic() < deadline
        time.sleep(0.05)
