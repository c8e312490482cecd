"""jobs/chatter.py: what launchers said in jobs that ended so, with and without a word of the ranks."""

import importlib.util
import os
import select
import time
import types

import pytest
from running import ROOT

spec = importlib.util.spec_from_file_location("chatter", ROOT / "jobs/chatter.py")
chatter = importlib.util.module_from_spec(spec)
spec.loader.exec_module(chatter)

RULE = "-" * 74
ERROR = "hpctrain: error: unknown key train.lrr; did you mean train.lr?\n"
FAILED = "hpctrain: rank 1 of 2 failed:\nTraceback (most recent call last):\n  ...\nArithmeticError: one rank alone\n"
ABORT = f"""{RULE}
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[2297,1],1]
  Errorcode: 1

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
{RULE}
"""
KILLED = f"{RULE}\nprterun noticed that process rank 0 with PID 3894 on node vm exited on\nsignal 9 (Killed).\n{RULE}\n"
TIME_LIMIT = "slurmstepd-n1: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-11-22T19:52:34 DUE TO TIME LIMIT ***\n"
TABLE = f"{RULE}\n name   value\n{RULE}\n   a       1\n{RULE}\n"
# launcher: (what the ranks said, what it added)
REPORTS = {
    "Open MPI 5, a status": (
        ERROR,
        f"""{RULE}
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-3792@1,0]
   Exit code:    2
{RULE}
""",
    ),
    "Open MPI 5, a status amidst its own errors": (
        ERROR,
        f"""{RULE}
[vm:3792] [prterun-vm-3792@0,0] PMIX ERROR: NOT-FOUND in file server/pmix_server.c at line 3146
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

[vm:3792] PRTE ERROR: Not found in file base/state_base_fns.c at line 83
   Process name: [prterun-vm-3792@1,0]
   Exit code:    2
{RULE}
""",
    ),
    "Open MPI 5, MPI_Abort": (
        FAILED,
        f"""{ABORT}{RULE}
prterun has exited due to process rank 1 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
{RULE}
\0""",
    ),
    "Open MPI 4, a status": (
        ERROR,
        f"""{RULE}
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
{RULE}
{RULE}
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[30561,1],0]
  Exit code:    2
{RULE}
""",
    ),
    "Open MPI 4, MPI_Abort": (
        FAILED,
        f"""{ABORT}[vm:09413] 2 more processes have sent help message help-mpi-api.txt / mpi-abort
[vm:09413] Set MCA parameter "orte_base_help_aggregate" to 0 to see all help / error messages
""",
    ),
    "MPICH": (
        FAILED,
        "Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1) - process 1\n",
    ),
    "srun, a status": (
        ERROR,
        """srun: error: n1: tasks 0,2-3: Exited with exit code 2
srun: launch/slurm: _step_signal: Terminating StepId=2.0
srun: error: n2: task 1: Terminated
srun: Force Terminated StepId=2.0
""",
    ),
    "srun, MPI_Abort": (
        FAILED,
        """slurmstepd-n1: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-11-22T19:52:34 ***
srun: Job step aborted: Waiting up to 4 seconds for job step to finish.
srun: error: n2: task 1: Killed
srun: error: n1: task 0: Killed
""",
    ),
}


def passed_on(pieces, said=False):
    """What comes out of it when the pieces are written one after the other."""
    source, target = os.pipe(), os.pipe()
    passing = chatter.Chatter(source[0], target[1])
    for piece in pieces:
        os.write(source[1], piece.encode())
    os.close(source[1])
    time.sleep(0.05 * said)  # the launcher is gone before its status is known
    passing.finish(said)
    os.close(target[1])
    with os.fdopen(target[0], "rb") as file:
        return file.read().decode()


@pytest.mark.parametrize("name", REPORTS)
def test_after_a_clear_error(name):
    """Nothing but the error, wherever the texts are cut, and whoever comes first; all of it where there is none."""
    error, report = REPORTS[name]
    assert passed_on([error, report]) == error
    assert passed_on([report, error]) == error
    assert passed_on(error + report) == error
    assert passed_on(["step 1\n", report + "the last words\n"], said=True) == "step 1\nthe last words\n"
    assert passed_on(["step 1\n", report]) == "step 1\n" + report


@pytest.mark.parametrize("text", [KILLED, TIME_LIMIT, TABLE, "srun: error: n1: task 0: Killed\n", f"{RULE}\nprterun"])
def test_everything_else_stays(text):
    for pieces in ([ERROR, text], text, [TABLE, text, *ERROR]):
        assert passed_on(pieces) == "".join(pieces)


def test_a_report_beside_a_table():
    """Which has the same rules."""
    error, report = REPORTS["Open MPI 5, a status"]
    assert passed_on([TABLE, error, report]) == TABLE + error
    assert passed_on([error, RULE + "\n", report, RULE + "\n"]) == error + RULE + "\n" + RULE + "\n"


def test_the_last_word_comes_while_files_are_looked_at(monkeypatch):
    """select has looked at the source already when both the last word and the end come."""

    def looked_before(files, *others):
        time.sleep(0.02 * (len(files) > 1))
        ready, *rest = select.select(files, *others)
        return files[1:] if ready == files[:2] and len(files) > 1 else ready, *rest

    monkeypatch.setattr(chatter, "select", types.SimpleNamespace(select=looked_before))
    assert passed_on([ERROR]) == ERROR


def test_nothing_waits_for_long(monkeypatch):
    """A bar that grows is seen at once, what may become a report after a while."""
    monkeypatch.setattr(chatter, "PATIENCE", 0.2)
    source, target = os.pipe(), os.pipe()
    passing = chatter.Chatter(source[0], target[1])
    seen = os.fdopen(target[0], "rb")
    for text in ("steps: 10%", "\rsteps: 20%", "\n", "[", f"1/2]\n{RULE}\n", f"prterun\n{RULE}\n", REPORTS["MPICH"][1]):
        os.write(source[1], text.encode())
        assert seen.read(len(text)).decode() == text
    os.write(source[1], (ERROR + REPORTS["MPICH"][1]).encode())
    time.sleep(0.5)
    os.write(source[1], b"more\n")
    assert seen.read(len(ERROR) + 5).decode() == ERROR + "more\n"
    passing.finish()
