"""The run folder: who may write it, what is gone on with, and what a full disk does to it."""

import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from hpctrain.config import load_config
from hpctrain.train import lease, loop, run_folder
from hpctrain.train.lease import Lease
from hpctrain.train.run_folder import RunFolder

JOB = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "LSB_JOBID")


@pytest.fixture(autouse=True)
def no_batch_job(monkeypatch):
    for name in JOB:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path):
    return load_config(overrides=[f"run.out={tmp_path}", "run.name=a"])


def held(folder, seconds_ago=0.0, **facts):
    """The lease of somebody else, refreshed then."""
    path = folder.with_name(f".{folder.name}.lease.7")
    path.write_text(json.dumps({"token": "theirs", "host": "n7", "pid": 1, "node": "another boot", **facts}))
    then = path.stat().st_mtime - seconds_ago
    os.utime(path, (then, then))
    return path


def leases(folder):
    return sorted(path.name for path in folder.parent.glob(f".{folder.name}.lease.*"))


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(ValueError, match="run.out = .*/a cannot be written: .*File exists: .*; use another"):
        RunFolder(load_config(overrides=[f"run.out={tmp_path}/a"]))


def test_one_job_at_a_time(tmp_path):
    first = Lease(tmp_path / "a")
    said = rf"another job is writing .*/a \(process {os.getpid()} on .*, seen \d s ago\); wait for it"
    with pytest.raises(ValueError, match=said):
        Lease(tmp_path / "a")
    other = Lease(tmp_path / "b")
    first.free()
    assert Lease(tmp_path / "a").path.name == ".a.lease.2"
    assert leases(tmp_path / "a") == [".a.lease.2"]
    del other
    assert json.loads((tmp_path / ".b.lease.1").read_text())["free"]


def test_a_process_that_is_no_more(tmp_path, caplog):
    """On this node that is known, at once: killed, it could not give its lease back."""
    program = f"""
import os, pathlib
from hpctrain.train.lease import Lease
kept = Lease(pathlib.Path({str(tmp_path / "a")!r}))
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 9
    Lease(tmp_path / "a")
    assert "taken over from process" in caplog.text
    assert "its process has ended" in caplog.text


@pytest.mark.parametrize(("ago", "taken"), [(0, False), (290, False), (310, True)])
def test_a_lease_of_another_node(tmp_path, caplog, ago, taken):
    held(tmp_path / "a", ago)
    if taken:
        assert Lease(tmp_path / "a").path.name == ".a.lease.8"
        assert "taken over from process 1 on n7: not refreshed for 310 s" in caplog.text
    else:
        with pytest.raises(
            ValueError, match=r"process 1 on n7, seen \d+ s ago.* until its lease is 300 s old, or dele"
        ):
            Lease(tmp_path / "a")
        assert leases(tmp_path / "a") == [".a.lease.7"]


@pytest.mark.parametrize(
    ("theirs", "restarts", "says", "taken"),
    [
        ("Slurm job 5", 1, "RUNNING", True),  # this one, before it was requeued: whatever its dead node still holds
        ("Slurm job 5", 0, "", False),
        ("Slurm job 6", 1, "RUNNING", False),
        ("Slurm job 6", 1, "", True),
        ("PBS job 6", 1, "", False),
    ],
)
def test_a_lease_of_a_batch_job(tmp_path, monkeypatch, theirs, restarts, says, taken):
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\n[ "$*" = "--noheader --format=%T --jobs=6" ] && echo "{says}"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    held(tmp_path / "a", job=theirs, restarts=0)
    if taken:
        Lease(tmp_path / "a")
    else:
        with pytest.raises(ValueError, match=theirs):
            Lease(tmp_path / "a")


def test_of_many_that_take_over_one_does(tmp_path):
    held(tmp_path / "a", 1000)
    got, refused, start = [], [], threading.Barrier(8)

    def contend():
        start.wait()
        try:
            got.append(Lease(tmp_path / "a"))
        except ValueError as error:
            refused.append(error)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)
    assert leases(tmp_path / "a") == [got[0].path.name]


@pytest.mark.parametrize("links", [True, False])
def test_who_lost_it_writes_no_more(config, monkeypatch, links):
    """A job that slept while another took over."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.stat("/no links here"))
    folder = RunFolder(config)
    folder.begin(0)
    folder.log({"step": 1})
    held(folder.path)
    folder.log({"step": 2})  # looked at a moment ago
    monkeypatch.setattr(lease, "REFRESH", 0.0)
    with pytest.raises(RuntimeError, match=r"/a was taken over \(process 1 on n7\)"):
        folder.log({"step": 3})
    with pytest.raises(RuntimeError, match="was taken over"):
        folder.sync()


@pytest.mark.parametrize("method", ["listdir", "read_text"])
def test_a_lease_that_cannot_be_read_for_the_moment(config, monkeypatch, caplog, method):
    """Says nothing of who has the folder: training goes on, and it is looked at again."""
    folder = RunFolder(config)
    folder.begin(0)
    monkeypatch.setattr(lease, "REFRESH", 0.0)

    def fail(*_, **__):
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as server:
        server.setattr(os if method == "listdir" else type(folder.path), method, fail)
        folder.log({"step": 1})
        folder.sync()
    assert caplog.text.count("its lease is looked at again in 0 s: [Errno 116] Stale file handle") == 2
    folder.log({"step": 2})
    held(folder.path)
    with pytest.raises(RuntimeError, match=r"was taken over \(process 1 on n7\)"):
        folder.log({"step": 3})


def test_a_lease_that_somebody_deleted(config, monkeypatch):
    folder = RunFolder(config)
    folder.begin(0)
    monkeypatch.setattr(lease, "REFRESH", 0.0)
    (config.folder.parent / ".a.lease.1").unlink()
    with pytest.raises(RuntimeError, match="somebody deleted its lease"):
        folder.log({"step": 1})


def test_the_lease_is_refreshed(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "REFRESH", 0.05)
    kept = Lease(tmp_path / "a")
    os.utime(kept.path, (1, 1))
    waited = threading.Event()
    for _ in range(200):
        if kept.path.stat().st_mtime > 1:
            break
        waited.wait(0.05)
    assert kept.path.stat().st_mtime > 1


def run_of(config, *jobs, step=3):
    """A run with a checkpoint, of these jobs."""
    (config.folder / f"checkpoints/step-{step}").mkdir(parents=True)
    if jobs:
        (config.folder / "jobs").write_text("".join(f"{job}\n" for job in jobs))


def test_nothing_to_resume(config, tmp_path):
    """What there is, is said; nothing is made."""
    with pytest.raises(ValueError, match=r"no checkpoints in .*/a; no run in .* has any.*begin anew without --resume"):
        RunFolder(config, "must")
    config.run.name = "b"
    run_of(config, step=120)
    config.run.name = "a"
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"runs in .* that have some are b \(step 120\)"):
        RunFolder(config, "must")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(
    ("resume", "jobs", "mine", "resumes"),
    [
        ("must", ["Slurm job 5"], "6", True),
        ("auto", ["Slurm job 5"], "5", True),
        ("auto", ["Slurm job 4", "Slurm job 5"], "5", True),
        ("auto", ["Slurm job 5"], "6", False),  # an older run of that name
        ("auto", [], "5", False),
        ("auto", [], None, True),  # outside of a batch job
        ("auto", None, "5", False),  # no checkpoint
        ("", ["Slurm job 5"], "5", False),
    ],
)
def test_what_is_gone_on_with(config, tmp_path, monkeypatch, resume, jobs, mine, resumes):
    if mine:
        monkeypatch.setenv("SLURM_JOB_ID", mine)
    if jobs is None:
        config.folder.mkdir()
    else:
        run_of(config, *jobs)
    folder = RunFolder(config, resume)
    assert folder.resumes == resumes
    assert (folder.moved is None) == resumes
    assert (tmp_path / "a.1").exists() == (not resumes)
    if mine:
        expected = [*(jobs or []), f"Slurm job {mine}"] if resumes else [f"Slurm job {mine}"]
        assert (folder.path / "jobs").read_text().splitlines() == list(dict.fromkeys(expected))


def test_the_tasks_of_an_array_are_jobs_of_their_own(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert run_folder.batch_job() == "Slurm job 7_2"


def test_a_full_disk_costs_no_metrics(config, monkeypatch, caplog):
    """Training goes on; what could not be written is, when there is room."""
    folder = RunFolder(config)
    folder.begin(0)
    folder.log({"step": 1})
    write = os.write

    def full(file, data):
        return write(file, data[:5])

    monkeypatch.setattr(os, "write", full)
    folder.log({"step": 2})
    monkeypatch.setattr(os, "write", write)
    assert caplog.text.count("metrics.jsonl is not up to date: [Errno 28]") == 1
    folder.log({"step": 3})
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    folder.close()


def test_a_full_disk_costs_the_picture_alone(config, monkeypatch, caplog):
    """What a job has trained is exported first; it ends as it would with the picture."""
    folder = RunFolder(config)
    folder.begin(0)
    folder.log({"step": 1, "loss": 1.0, "lr": 0.1})
    (folder.path / "loss.png").mkdir()  # cannot be written
    finished = []

    def finish(session):
        finished.append((session.folder, "picture" in caplog.text))

    for name, stub in {"introduce": id, "take_steps": lambda session: "", "finish": finish}.items():
        monkeypatch.setattr(loop, name, stub)
    assert loop.train(SimpleNamespace(folder=folder)) == ""
    assert finished == [(folder, False)]
    assert "a has no picture of the losses: [Errno 21]" in caplog.text


def test_metrics_name_the_job_that_took_the_step(config, monkeypatch):
    for job in (None, "7"):
        if job:
            monkeypatch.setenv("SLURM_JOB_ID", job)
        folder = RunFolder(config)
        folder.begin(0)
        folder.log({"step": 1})
        folder.close()
        line = json.loads((folder.path / "metrics.jsonl").read_text())
        assert line == {"step": 1, **({"job": "Slurm job 7"} if job else {})}
        del folder


def test_what_an_earlier_end_exported(config, tmp_path):
    """Is no more that of the run, once a job trains on."""
    folder = RunFolder(config)
    (tmp_path / "a/model").mkdir()
    (tmp_path / "a/model/config.json").write_text("{}")
    folder.begin(config.run.steps)  # which is finished
    assert (tmp_path / "a/model/config.json").exists()
    folder.begin(3)
    assert not (tmp_path / "a/model").exists()
    assert (tmp_path / "a/model.1/config.json").exists()
