"""jobs/guard.py between a shell and what starts the ranks: who hears which signal, and how it all ends."""

import os
import pty
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from running import ROOT, children

pytestmark = pytest.mark.job

TASK = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
BUSY = "slurm_load_jobs error: Socket timed out on send/recv operation"
NOT_QUEUED = "job 7_3 may not be in the queue (see squeue); the same command with --resume goes on from there\n"
RESUME = "saved; the same command with --resume goes on from there"
WARNED = """
trap 'echo warned; ((++times))' USR1
echo up
until [ "$times" = 2 ]; do sleep 0.05; done
exit 85
"""


@pytest.fixture
def guarded(tmp_path):
    """guarded(script, ...) starts a script in the place of the ranks, by supervise.sh; it has said "up"."""
    jobs = []

    def begin(
        script, program="jobs/supervise.sh", up=True, state="RUNNING", busy=0, cancelled="",
        answer="Requested operation is presently disabled", **environment,
    ):  # fmt: skip
        path = tmp_path / "ranks.sh"
        path.write_text(script)
        scontrol = tmp_path / "scontrol"
        scontrol.write_text(f"""#!/bin/sh
echo "$*" >>{tmp_path}/$1
[ "$1" != "{cancelled}" ] || kill -TERM $PPID
if [ $(wc -l <{tmp_path}/$1) -le {busy} ]; then
    echo "{BUSY}" >&2
    exit 1
fi
[ "$1 $2" = "show job" ] && exec echo "JobId=$3 JobState={state} Reason=None"
echo "{answer} for job $2" >&2
exit 1
""")  # the real one ends the job
        scontrol.chmod(0o755)
        environment = {
            **os.environ, "HPCTRAIN_LAUNCHER": "env", "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "",
            **environment,
        }  # fmt: skip
        command = [program, "bash", str(path)]
        jobs.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                stderr=(tmp_path / "stderr").open("w"), start_new_session=True,
            )
        )  # fmt: skip
        if up:
            assert jobs[-1].stdout.readline() == "up\n"
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, 9)
        job.stdout.close()


@pytest.fixture
def impatient(tmp_path):
    """supervise.sh with a guard that tells the ranks again, and ends them, after a second, and does not pause between
    its questions to Slurm."""
    shutil.copytree(ROOT / "jobs", tmp_path / "checkout/jobs")
    (tmp_path / "checkout/hpctrain").symlink_to(ROOT / "hpctrain")
    guard = tmp_path / "checkout/jobs/guard.py"
    text = guard.read_text()
    assert "AGAIN = 5.0" in text
    assert "TOO_LONG = 10.0" in text
    assert "TRIES, PAUSE = 6, 5.0" in text
    assert "time.sleep(60)" in text
    text = text.replace("TRIES, PAUSE = 6, 5.0", "TRIES, PAUSE = 6, 0.0").replace("time.sleep(60)", "time.sleep(0)")
    guard.write_text(text.replace("AGAIN = 5.0", "AGAIN = 1.0").replace("TOO_LONG = 10.0", "TOO_LONG = 1.0"))
    return str(tmp_path / "checkout/jobs/supervise.sh")


def asked(tmp_path, question):
    """The arguments of scontrol, each time."""
    return (tmp_path / question).read_text().splitlines() if (tmp_path / question).exists() else []


@pytest.mark.parametrize(
    ("slurm", "number", "said"),
    [
        ({}, signal.SIGUSR1, RESUME),
        (TASK, signal.SIGUSR1, "saved; requeueing job 7_3\n"),
        *((TASK, number, RESUME) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),  # is not to come back
    ],
)
def test_the_warning_reaches_the_ranks(guarded, impatient, slurm, number, said, tmp_path):
    """Each time, as SIGUSR1; the status is theirs. One explanation of it all."""
    job = guarded(WARNED, impatient, **slurm)
    for _ in range(2):
        if number == signal.SIGINT:  # once more by itself, after some seconds: Ctrl-C again would end the ranks
            number = job.send_signal(number)
        elif number:
            job.send_signal(number)
        assert job.stdout.readline() == "warned\n"
    output = job.stdout.read()
    assert said in output
    assert ("requeue" in output) == ("requeue" in said)
    assert asked(tmp_path, "requeue") == ["requeue 7_3"] * ("requeue" in said)  # not 7, which is the whole array
    assert job.wait(10) == 85
    assert (tmp_path / "stderr").read_text().count("are told to save and to stop after their step") == 1


@pytest.mark.parametrize(("state", "back"), [("RUNNING", True), ("CANCELLED", False), ("TIMEOUT", False)])
def test_ranks_that_end_before_the_guard_hears_why(guarded, state, back, tmp_path):
    """Slurm signals a job's processes one after another; a cancelled job is not to come back."""
    job = guarded("echo up\nexit 85\n", state=state, **TASK)
    output = job.stdout.read()
    assert ("requeueing job 7_3\n" in output, RESUME in output) == (back, not back)
    assert asked(tmp_path, "requeue") == ["requeue 7_3"] * back
    assert job.wait(10) == 85


@pytest.mark.parametrize("busy", [5, 6])
def test_a_controller_that_is_busy(guarded, impatient, busy, tmp_path):
    """Each question is tried six times; the last error is printed."""
    job = guarded("echo up\nexit 85\n", impatient, busy=busy, **TASK)
    output = job.stdout.read()
    assert job.wait(10) == 85
    errors = (tmp_path / "stderr").read_text()
    assert asked(tmp_path, "show") == ["show job 7_3"] * 6
    if busy == 6:
        assert RESUME in output
        assert f"guard.py: scontrol show job 7_3: {BUSY}\n" in errors
    else:
        assert "saved; requeueing job 7_3\n" in output
        assert asked(tmp_path, "requeue") == ["requeue 7_3"] * 6
        assert NOT_QUEUED in errors


@pytest.mark.parametrize(
    ("question", "busy", "tries"), [("show", 0, (1, 0)), ("show", 5, (1, 0)), ("requeue", 1, (2, 1))]
)
def test_a_job_that_is_cancelled_while_slurm_is_asked(guarded, impatient, question, busy, tries, tmp_path):
    """It is not to come back: no question is asked again, and none is asked that would put it back."""
    job = guarded("echo up\nexit 85\n", impatient, busy=busy, cancelled=question, **TASK)
    assert (RESUME in job.stdout.read()) == (question == "show")
    assert job.wait(10) == 85
    assert (len(asked(tmp_path, "show")), len(asked(tmp_path, "requeue"))) == tries


@pytest.mark.parametrize("busy", [0, 1])
def test_a_requeue_that_is_answered_too_late(guarded, impatient, busy, tmp_path):
    """The controller took the first try: asked again, it says that the job is in the queue already."""
    job = guarded("echo up\nexit 85\n", impatient, busy=busy, answer="Job is pending execution", **TASK)
    assert "saved; requeueing job 7_3\n" in job.stdout.read()
    assert job.wait(10) == 85
    assert (NOT_QUEUED in (tmp_path / "stderr").read_text()) == (not busy)


def test_without_slurm_s_commands(guarded, tmp_path):
    """As in a container of a job: it is saved, and nobody can put it back."""
    only = tmp_path / "only"
    only.mkdir()
    programs = {path.name: path for folder in ("/bin", "/usr/bin") for path in Path(folder).iterdir()}
    programs["python3"] = shutil.which("python3")
    for name in programs.keys() - {"scontrol"}:
        (only / name).symlink_to(programs[name])
    job = guarded("echo up\nexit 85\n", PATH=str(only), **TASK)
    assert RESUME in job.stdout.read()
    assert job.wait(10) == 85


def test_outside_of_a_batch_job_nothing_is_requeued(guarded):
    job = guarded(WARNED, "jobs/mpirun.sh", **TASK)
    for _ in range(2):
        job.send_signal(signal.SIGUSR1)
        assert job.stdout.readline() == "warned\n"
    assert job.stdout.read() == ""
    assert job.wait(10) == 85


@pytest.mark.parametrize(
    ("ranks", "status"), [("sleep 1; exit 85", 85), ("sleep 1; kill -KILL $$", 137), ("sleep 1; exit 3", 3)]
)
def test_a_storm_does_not_hide_the_status(guarded, ranks, status):
    """Hundreds of signals of all kinds, to the group as well, until after the end of the ranks."""
    job = guarded(f"trap : USR1\necho up\n{ranks}\n")
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    end = time.monotonic() + 20
    while job.poll() is None and time.monotonic() < end:
        for number in numbers:
            job.send_signal(number)
            if job.returncode is None:  # send_signal polls: a job that has ended has no group after it
                os.killpg(job.pid, number)
        time.sleep(0.001)
    assert job.returncode == status
    assert (RESUME in job.stdout.read()) == (status == 85)


def test_a_second_ctrl_c(guarded, tmp_path):
    """Within a second it is the same one: `timeout` sends its signal twice."""
    job = guarded("trap : USR1\ntrap 'echo at once; exit 5' USR2\necho up\nwhile true; do sleep 0.05; done\n")
    for _ in range(2):
        os.killpg(job.pid, signal.SIGINT)
        time.sleep(0.3)
    time.sleep(1)
    assert "again" not in (tmp_path / "stderr").read_text()
    job.send_signal(signal.SIGINT)
    assert job.stdout.read() == "at once\n"
    assert job.wait(10) == 130
    assert "SIGINT again: the ranks are ended at once, without saving" in (tmp_path / "stderr").read_text()


def test_ranks_that_are_deaf_to_the_second_ctrl_c(guarded, impatient):
    job = guarded("trap '' USR1 USR2\necho up\nwhile true; do sleep 0.1; done\n", impatient)
    job.send_signal(signal.SIGINT)
    time.sleep(1.2)
    job.send_signal(signal.SIGINT)
    assert job.wait(30) == 130


@pytest.mark.parametrize(("program", "status"), [("jobs/mpirun.sh", 138), ("jobs/supervise.sh", 85)])
def test_before_the_ranks_can_hear(guarded, program, status, tmp_path):
    """They are killed by the signal, and have saved nothing: said, and by a batch job begun once more."""
    job = guarded("echo up\nexec sleep 60\n", program, **TASK)
    job.send_signal(signal.SIGUSR1)
    output = job.stdout.read()
    assert job.wait(10) == status
    assert "nothing was saved since they were started" in (tmp_path / "stderr").read_text()
    assert ("not begun; requeueing job 7_3\n" in output) == (status == 85)
    assert asked(tmp_path, "requeue") == ["requeue 7_3"] * (status == 85)


def test_what_is_ignored_stays_so(guarded):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = guarded("trap 'exit 85' USR1\necho up\nfor n in $(seq 20); do sleep 0.05; done\nexit 4\n")
    finally:
        signal.signal(signal.SIGHUP, before)
    job.send_signal(signal.SIGHUP)
    assert job.wait(10) == 4


def test_nobody_outlives_it(guarded):
    """Killed, it takes the launcher along."""
    job = guarded("echo $$ >&1\necho up\nwhile true; do sleep 0.05; done\n", up=False)
    launcher = int(job.stdout.readline())
    assert children(job.pid) == [launcher]
    job.kill()
    job.wait()
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{launcher}"):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["Ctrl-C", "hang-up"])
def test_a_terminal(tmp_path, how):
    """mpirun stays with the terminal it reads from, and hears neither Ctrl-C nor the terminal's end. Its ranks do."""
    (tmp_path / "ranks.py").write_text("""
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(85))
print("got", input(), flush=True)
for _ in range(400):
    time.sleep(0.05)
""")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv("jobs/mpirun.sh", ["mpirun.sh", "-n", "1", "python", f"{tmp_path}/ranks.py"])
    os.write(terminal, b"a line\n")
    said = b""
    while b"got a line" not in said:
        said += os.read(terminal, 1000)
    if how == "Ctrl-C":
        os.write(terminal, b"\x03")
    else:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 85
    if how == "Ctrl-C":
        os.close(terminal)
