"""Jobs that commands start and wait for."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hpctrain.rank_job import ranks_command, run_ranks

MACHINE = ["-m", "hpctrain", "machine", "--ranks=1", "-o"]
LAUNCHER = """#!/bin/sh
trap 'echo ended >"{0}/ended"; exit 1' TERM
echo $$ >"{0}/new"
mv "{0}/new" "{0}/pid"
for _ in $(seq 2000); do sleep 0.01; done
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ranks_end_with_the_command(tmp_path, number):
    """Who stops `hpctrain machine` leaves no ranks behind, which another process has started, nor files."""
    launcher = tmp_path / "mpirun"
    launcher.write_text(LAUNCHER.format(tmp_path))
    launcher.chmod(0o755)
    (tmp_path / "out").mkdir()
    job = subprocess.Popen(
        [sys.executable, *MACHINE, str(tmp_path / "out/here.toml")], env={**os.environ, "MPIRUN": str(launcher)}
    )
    while not (tmp_path / "pid").exists():
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(number)
    assert job.wait(30) == 128 + number
    assert (tmp_path / "ended").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not any((tmp_path / "out").iterdir())


def test_a_signal_while_the_job_is_started(monkeypatch):
    """It has a process then, whose id nobody knows yet."""
    jobs, start = [], subprocess.Popen

    def started(*command, **options):
        jobs.append(start(*command, **options))
        os.kill(os.getpid(), signal.SIGTERM)
        return jobs[0]

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(SystemExit, match="143"):
        run_ranks(["sleep", "60"])
    assert jobs[0].returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_job_that_takes_too_long_ends():
    with pytest.raises(subprocess.TimeoutExpired):
        run_ranks(["sleep", "60"], 0.05)
    ended = run_ranks(["sh", "-c", "echo said; exit 3"], stdout=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "said\n", None)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_files_of_the_working_folder_are_not_imported(tmp_path, monkeypatch):
    launcher = tmp_path / "mpirun"
    launcher.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    launcher.chmod(0o755)
    for name in ("torch", "numpy", "mpi4py"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(ranks_command(str(launcher), 1, "hpctrain.doctor.ranks"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"size": 1' in done.stdout
