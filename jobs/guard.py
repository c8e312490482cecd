"""Run what starts the ranks so that a stop leaves them time to save:   guard.py [--block] COMMAND

Open MPI's mpirun kills its ranks a quarter of a second after SIGTERM, SIGINT or SIGHUP. So none of the three reaches
it: this program takes them, and whatever asks for an end is passed on as SIGUSR1, at which a training saves and ends
with status 85. Ctrl-C once more ends all ranks at once (SIGUSR2). The status is the command's.

The command has a session of its own, out of reach of the terminal and of signals to the group. With --block, for Open
MPI's mpirun, which gives its ranks a clean mask, what is sent to the command itself is kept from it and counts here;
and it stays with the terminal where it reads from one.

What the launcher adds to an end that the ranks have explained is left out (chatter.py).

With HPCTRAIN_REQUEUE=1 a job of Slurm's that saved is put back into the queue, unless it was ended by another signal
than Slurm's warning, SIGUSR1.
"""

import contextlib
import os
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # where python -I does not look
from chatter import Chatter

SAVED = 85  # hpctrain.train.signals
ENDED_AT_ONCE = 130
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN = 5.0  # seconds after which the ranks are told once more: mpirun passes on nothing until it has started them
TOO_LONG = 10.0  # seconds that they may take to end at once
TRIES, PAUSE = 6, 5.0  # of a question to Slurm, seconds between them: its controller may be busy, or away for a while
# words of answers that would be the same the next time
REFUSALS = ("Invalid job id", "disabled", "denied", "already", "pending", "Only batch")


def main(command: list[str], block: bool = False) -> int:
    """Run the command; returns its exit status."""
    requeues = os.environ.pop("HPCTRAIN_REQUEUE", "") == "1"
    # what was ignored when this began stays so, as for nohup
    heard = {s for s in (*ENDINGS, signal.SIGUSR1) if signal.getsignal(s) != signal.SIG_IGN}
    # they wait to be fetched: no moment at which one could come unseen, or end this program
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*heard, signal.SIGCHLD})
    kept = heard & set(ENDINGS) if block else set()
    said, saying = os.pipe()
    last = signal.SIGKILL if block else signal.SIGTERM
    launcher = start(command, before | kept, session=not (block and os.isatty(0)), last=last, stderr=saying)
    os.close(saying)
    chatter = Chatter(said)
    stop = Stop(launcher, only_with_ranks=block)
    while True:
        info = signal.sigtimedwait({*heard, signal.SIGCHLD}, 1.0)
        if info and info.si_signo in heard:  # it may be 0 after a stop of this process
            stop.hear(signal.Signals(info.si_signo))
        ended, status = os.waitpid(launcher, os.WNOHANG)
        if ended:
            break
        if kept and not stop.reasons and (waiting := pending(launcher) & kept):
            stop.hear(min(waiting))
        stop.go_on()
    for number in signal.sigpending() & heard:  # those that came last count, too
        stop.reasons.add(number)
    chatter.finish(stop.at_once or os.waitstatus_to_exitcode(status) == SAVED)
    return conclude(status, stop, requeues)


def start(command: list[str], mask: set, session: bool, last: int, stderr: int) -> int:
    """The process id of the command; it gets the signal `last` when this process is killed."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.dup2(stderr, 2)
        die_with(parent, last)
        if session:
            os.setsid()
        # left by a killed mpirun of the same process id, it makes mpirun say that its listener thread did not start
        left = f"{os.environ.get('TMPDIR', '/tmp')}/ompi.{os.getpid()}"
        if os.path.lexists(left):
            import shutil  # of the imports the slowest, and here the job waits

            shutil.rmtree(left, ignore_errors=True)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvp(command[0], command)
    except OSError as error:
        say(f"{command[0]}: {error.strerror}")
    finally:
        os._exit(127)


def die_with(parent: int, number: int) -> None:
    import ctypes

    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl:  # Linux
        prctl(1, int(number))
    if os.getppid() != parent:
        os._exit(127)


class Stop:
    """What the ranks have been told. Attributes: `reasons`, the signals; `at_once`, whether they are to end unsaved."""

    def __init__(self, launcher: int, only_with_ranks: bool):
        self.launcher, self.only_with_ranks = launcher, only_with_ranks
        self.reasons, self.at_once = set(), False
        self._first = self._told = 0.0
        self._repeat = False

    def hear(self, number: signal.Signals) -> None:
        now = time.monotonic()
        # `timeout` sends its signal twice, and a group's signal may come by several ways
        if number == signal.SIGINT and self.reasons and now > self._first + 1 and not self.at_once:
            say("SIGINT again: the ranks are ended at once, without saving")
            self.at_once, self._told = True, now
            os.kill(self.launcher, signal.SIGUSR2)
        if not self.reasons:
            say(
                f"{number.name}: the ranks are told to save and to stop after their step (SIGUSR1); Ctrl-C ends them "
                "at once"
            )
            self._first = now
        self.reasons.add(number)
        self._repeat = True

    def go_on(self) -> None:
        """Tell the ranks, at most once a second."""
        now = time.monotonic()
        if self.at_once:
            if now > self._told + TOO_LONG:
                os.kill(self.launcher, signal.SIGKILL)
            return
        due = self.reasons and now > self._told + (1 if self._repeat else AGAIN)
        # without ranks, at its own start and end, SIGUSR1 would kill mpirun
        if due and (not self.only_with_ranks or children(self.launcher)):
            os.kill(self.launcher, signal.SIGUSR1)
            self._told, self._repeat = now, False


def conclude(status: int, stop: Stop, requeues: bool) -> int:
    """Say how it ended; put the job back into the queue. Returns the exit status."""
    by_signal = os.WIFSIGNALED(status)
    status = 128 + os.WTERMSIG(status) if by_signal else os.WEXITSTATUS(status)
    if stop.at_once:
        return ENDED_AT_ONCE
    unheard = stop.reasons and status == 128 + signal.SIGUSR1
    if unheard:
        say("the ranks did not handle SIGUSR1 (yet): nothing was saved since they were started")
        if requeues:
            status = SAVED  # a training handles it from its first moments on: it had not begun
    if not requeues or status != SAVED:
        return status
    job = os.environ.get("SLURM_JOB_ID", "")
    if task := os.environ.get("SLURM_ARRAY_TASK_ID"):  # of an array the number may be that of the whole
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    done = "not begun" if unheard else "saved"
    # scancel's signal may also come while Slurm is asked
    if job and not stop.reasons & set(ENDINGS) and not cancelled(job) and not signal.sigpending() & set(ENDINGS):
        say(f"{done}; requeueing job {job}", file=1)
        if scontrol("requeue", job).returncode == 0:
            time.sleep(60)  # Slurm ends this job
        else:
            say(f"job {job} may not be in the queue (see squeue); the same command with --resume goes on from there")
    else:  # a cancelled job is not to come back
        say(f"{done}; the same command with --resume goes on from there", file=1)
    return status


def cancelled(job: str) -> bool:
    """Whether Slurm is ending the job: it signals process by process, and the ranks may have heard and ended first. Or
    there is no Slurm here that could put it back, as in a container, or none that answers."""
    try:
        return "JobState=RUNNING" not in scontrol("show", "job", job).stdout
    except FileNotFoundError:
        return True


def scontrol(*arguments: str):
    """What came of the command; where the controller does not answer, it is tried again, unless the job is ended."""
    import subprocess  # slow, and seldom wanted

    for left in reversed(range(TRIES)):
        done = subprocess.run(["scontrol", *arguments], check=False, capture_output=True, text=True)
        if left < TRIES - 1 and "pending" in done.stderr:  # the controller did what it was asked before, unanswered
            done.returncode = 0
        if done.returncode == 0 or not left or any(refusal in done.stderr for refusal in REFUSALS):
            break
        if signal.sigtimedwait(ENDINGS, PAUSE):
            break
    if done.returncode:
        say(f"scontrol {' '.join(arguments)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done


def pending(process: int) -> set:
    """Signals that wait at the process, for as long as it lives."""
    try:
        with open(f"/proc/{process}/status", encoding="ascii") as lines:
            mask = next((int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:")), 0)
    except OSError:
        return set()
    return {number for number in ENDINGS if mask >> (number - 1) & 1}


def children(process: int) -> list:
    try:
        with open(f"/proc/{process}/task/{process}/children", encoding="ascii") as words:
            return words.read().split()
    except OSError:
        return [process]  # not to be known here


def say(text: str, file: int = 2) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(file, f"guard.py: {text}\n".encode())


if __name__ == "__main__":
    guarded = sys.argv[1] == "--block"
    sys.exit(main(sys.argv[1 + guarded :], guarded))
