"""Jobs that must fail: non-zero, in seconds, with a message that helps."""

import os
import signal
import time
from pathlib import Path

import pytest

from hpctrain.launch import check_launcher

pytestmark = pytest.mark.job

SECONDS = 30  # start-up of a few ranks on two cores included


def fails(job, *texts, status=None):
    ended = job.wait(SECONDS)
    assert ended.status != 0
    for text in texts:
        assert text in ended.output, ended.output
    if status is not None:
        assert ended.status == status, ended.output
    assert ended.output.count("hpctrain: error:") <= 1, ended.output  # said once, not by every rank
    if "hpctrain: error:" in ended.output or " failed:" in ended.output:
        assert "prterun" not in ended.output  # has nothing to add
        assert "MPI_ABORT" not in ended.output
    return ended


def test_a_killed_rank(train):
    job = train(3, "grid.data=3", "run.steps=100000", cold=True)  # each of them imports everything
    job.wait_for("  loss ")
    os.kill(job.pid_of_rank(2), signal.SIGKILL)
    killed = time.monotonic()
    ended = fails(job, "prterun noticed that process rank 2")
    assert time.monotonic() - killed < 10
    assert "signal 9" in ended.output or "Killed" in ended.output


def test_an_exception_on_one_rank(train, python):
    script = str(Path(__file__).with_name("raise_in_step.py"))
    job = train(3, "grid.data=3", "run.steps=100000", program=(python, script))
    fails(job, "hpctrain: rank 1 of 3 failed:", "ArithmeticError: one rank alone")


def test_a_wrong_grid(train):
    fails(
        train(3, "grid.data=2"),
        "hpctrain: error: the grid data=2 pipeline=1 tensor=(1, 1, 1) has 2 places, but there are 3 ranks. "
        "Start 2 ranks, or use one of the nearest grids of 3: data=3 pipeline=1 tensor=(1, 1, 1)",
        status=2,
    )


def test_a_wrong_key(train):
    fails(train(2, "train.lrr=1"), "hpctrain: error: unknown key train.lrr; did you mean train.lr?", status=2)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (["train", "jobs/train.toml"], ["eval", "r", "--data", "a.h5"], "command = 'eval', and rank 0 with 'train'"),
        (["eval", "r", "--data", "a.h5"], ["eval", "r", "--data", "a.h5", "--batch=3"], "batch = 3, and rank 0 with 8"),
    ],
)
def test_ranks_that_were_started_for_different_things(start, first, second, said):
    job = start(1, "hpctrain", *first, ":", "-n", "1", "hpctrain", *second)
    fails(job, f"hpctrain: error: rank 1 was started with {said}; start all ranks alike", status=2)


def test_a_vocabulary_too_small(train):
    fails(train(2, "grid.data=2", "model.vocabulary=100"), "use model.vocabulary=257 or more", status=2)


def test_data_that_are_not_those_of_the_text(train, tmp_path):
    """Two ranks and two sources that were given by the same hand: neither is left out in silence."""
    from hpctrain.data import pack

    (tmp_path / "other.txt").write_text("something else\n" * 100)
    pack([str(tmp_path / "other.txt")], tmp_path / "data.h5")
    said = f"data.path = {tmp_path}/data.h5 was not packed from data.text = {tmp_path}/text.txt as it is now"
    given = f"data.path={tmp_path}/data.h5", f"data.text={tmp_path}/text.txt"
    fails(train(2, "grid.data=2", *given), said, "leave data.text out", status=2)


def test_text_that_is_not_utf8(train, text):
    text.write_bytes("Größe\n".encode("latin-1"))
    fails(train(2, "grid.data=2"), f"{text} is not UTF-8 text: byte 2 cannot be decoded", status=2)


def test_missing_text(train, text):
    text.unlink()
    fails(train(2, "grid.data=2"), f"{text} does not exist; name files, directories or python-stdlib", status=2)


@pytest.mark.parametrize("which", ["index", "shard"])
def test_a_truncated_data_file(train, text, tmp_path, which):
    from hpctrain.data import pack

    pack([str(text)], tmp_path / "data.h5")
    (shard,) = tmp_path.glob("data-*.h5")
    broken = tmp_path / "data.h5" if which == "index" else shard
    os.truncate(broken, broken.stat().st_size // 2)
    fails(train(2, "grid.data=2", f"data.path={tmp_path}/data.h5"), str(broken), "truncated", status=2)


@pytest.mark.parametrize("where", ["everywhere", "where nobody looks at first"])
def test_a_corrupt_chunk_ends_the_job(train, tmp_path, where):
    """All ranks refuse at once what the first look at 16 places finds; a checksum that fails later, on the rank that
    reads it, ends the job."""
    import h5py
    import numpy as np

    from hpctrain.data import pack

    (tmp_path / "long.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(40_000)))
    pack([str(tmp_path / "long.txt")], tmp_path / "data.h5")
    (shard,) = tmp_path.glob("data-*.h5")
    with h5py.File(shard) as file:
        tokens = file["tokens"]
        length, size = tokens.chunks[0], len(tokens)
        starts = np.linspace(0, size - 256, 16, dtype=int)
        seen = {int(start + end) // length for start in starts for end in (0, 255)} if where != "everywhere" else set()
        chunks = [tokens.id.get_chunk_info(number).byte_offset for number in range(-(-size // length))]
    content = bytearray(shard.read_bytes())
    for number, place in enumerate(chunks):
        content[place] ^= number not in seen
    shard.write_bytes(content)
    assert len(seen) < len(chunks) / 2
    said = ("hpctrain: error:", 2) if where == "everywhere" else ("failed:", None)
    fails(train(2, "grid.data=2", f"data.path={tmp_path}/data.h5"), f"{shard} is corrupt", said[0], status=said[1])


def test_a_folder_that_cannot_be_made(train, tmp_path):
    (tmp_path / "file").write_text("in the way")
    fails(train(2, "grid.data=2", f"run.out={tmp_path}/file"), f"{tmp_path}/file", "hpctrain: error:", status=2)


def test_a_loss_that_is_not_finite(train):
    fails(
        train(2, "grid.data=2", "train.lr=1e30", "train.warmup=0", "train.clip=0.0", "run.steps=50"),
        "hpctrain: error: step ",
        "are not both finite; learning rate 9.99e+29, gradient norms of the steps before: ",
        "Use a smaller train.lr, a longer train.warmup, a train.clip such as 1, or sanity.nonfinite=skip or =rollback",
        status=1,
    )


def test_a_loss_of_an_asynchronous_worker_that_is_not_finite(train):
    """Nobody waits for it, and all end with its line."""
    server = ["data_parallel.method=parameter_server", "data_parallel.staleness=1"]
    fails(
        train(2, "grid.data=2", *server, "train.lr=1e30", "train.warmup=0", "train.clip=0.0", "run.steps=50"),
        "hpctrain: error: worker 0, step ",
        "are not both finite; learning rate 9.99e+29, gradient norms of the steps before: ",
        "Use a smaller train.lr, a longer train.warmup, or a train.clip such as 1\n",
        status=1,
    )


def test_launcher_and_library_of_different_makes(python, tmp_path):
    """Each process would train alone and believe itself rank 0."""
    import subprocess

    environment = {**os.environ, "PMI_SIZE": "4"}
    config = tmp_path / "config.toml"
    config.write_text("")
    ended = subprocess.run(
        ["hpctrain", "train", str(config)], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert ended.returncode != 0
    assert "the launcher started 4 ranks, but MPI sees one" in ended.stderr


def test_srun_without_the_pmi_of_the_library(monkeypatch):
    """Likewise; but what a shell of the step has started may be alone, or a rank of an mpirun's."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("SLURM_TASK_PID", str(os.getpid()))
    message = "the launcher started 8 ranks, but MPI sees one: .*srun --mpi=list.*, unset SLURM_TASK_PID"
    with pytest.raises(RuntimeError, match=message):
        check_launcher(1)
    check_launcher(8)
    monkeypatch.setenv("SLURM_TASK_PID", str(os.getppid()))
    check_launcher(1)
