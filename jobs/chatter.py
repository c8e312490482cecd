"""What a launcher adds when ranks end: kept from standard error where the ranks have said themselves what happened.

After `hpctrain: error: ...` or a rank's traceback, Open MPI's blocks of six lines, MPICH's Abort and Slurm's exit codes
say nothing new, and push what does out of sight. Everything else is passed on as it comes, and so are these where no
rank has explained the end: one that was killed, or a program of one's own.
"""

import contextlib
import os
import re
import select
import threading

SAID = re.compile(rb"hpctrain: (error: |ended at once|rank \d+ of \d+ failed:)")  # hpctrain/launch.py, train/signals.py
RULE = re.compile(rb"-{60,}")  # begins and ends a block of Open MPI's; a zero may follow the last one
BLOCKS = (
    b"prterun detected that one or more processes exited with non-zero status",
    b"prterun has exited due to process rank",
    b"MPI_ABORT was invoked on rank",
    b"mpirun detected that one or more processes exited with non-zero status",  # these are Open MPI 4's
    b"Primary job  terminated normally, but 1 process returned",
)
LONGEST = 12  # lines of a block
LINES = (
    rb"\[\S+\] \d+ more process(es)? ha(s|ve) sent help message help-mpi-api.txt / mpi-abort",
    rb'\[\S+\] Set MCA parameter "orte_base_help_aggregate" to 0 .*',
    rb"(\[.*\] )?(PMIX|PRTE)[ _]ERROR\w*: .+ in file \S+ at line \d+",  # also amidst a block
    rb"Abort\(\d+\) on node .*: application called MPI_Abort\(.*",
    rb"srun: error: \S+ tasks? \S+ Exited with exit code \d+",
)
ENDING = (  # by which Slurm ends the other ranks; at a time limit it says more
    rb"srun: (launch/slurm: _step_signal: )?(Force )?Terminat(ing|ed) StepId=\S+",
    rb"srun: Job step aborted: Waiting up to \d+ seconds for job step to finish.",
    rb"slurmstepd\S* error: \*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ \*\*\*",
)
ENDED = (rb"srun: error: \S+ tasks? \S+ (Killed|Terminated)",)  # what it then says of them
BEGINNINGS = (b"-" * 60, b"[", b"Abort(", b"srun: ", b"slurmstepd")
PATIENCE = 2.0  # seconds without a word, after which nothing is kept back any longer


class Chatter:
    """Passes on what comes from a file, in a thread, until `finish`."""

    def __init__(self, source: int, target: int = 2):
        self._source, self._target = source, target
        self._woken, self._wake = os.pipe()
        self._said = self._ending = False
        self._held, self._block = [], []  # whole reports; the beginning of a block
        self._line, self._passed = b"", 0  # the last one, which is not whole, and how much of it was passed on
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, said: bool = False) -> None:
        """To the end of what was written until now; `said` where it is known otherwise what happened."""
        if said:
            self._said = True
        os.close(self._wake)
        self._thread.join(5)  # others may have the file, and write for ever

    def _run(self) -> None:
        while True:
            waits = self._held or self._block or self._line[self._passed :]
            ready, _, _ = select.select([self._source, self._woken], [], [], PATIENCE if waits else None)
            if ready == [self._woken]:  # select looks at one after the other, and the last word may have come meanwhile
                ready, _, _ = select.select([self._source], [], [], 0)
                if not ready:
                    break
            if ready:
                data = os.read(self._source, 65536)
                if not data:
                    break
                self._take(data)
            else:
                self._settle()
        select.select([self._woken], [], [], PATIENCE)  # what is known otherwise is known soon
        self._settle()

    def _take(self, data: bytes) -> None:
        *lines, self._line = re.split(rb"(?<=[\n\r\0])", self._line + data)
        for line in lines:
            if SAID.search(line):
                self._said = True  # it is never taken back: two threads set it
            if self._passed:
                self._pass_on(line[self._passed :])
                self._passed = 0
            else:
                self._sort(line)
        begun = self._line
        if not self._block and not any(begun[: len(word)] == word[: len(begun)] for word in BEGINNINGS):
            self._pass_on(begun[self._passed :])  # such as a bar that grows
            self._passed = len(begun)

    def _sort(self, line: bytes) -> None:
        text = line.strip(b"\0\r\n")
        if _is(text, LINES):
            (self._block or self._held).append(line)
            return
        rule = RULE.fullmatch(text)
        if self._block and not any(each.startswith(BLOCKS) for each in (*self._block, text)):
            self._pass_on(b"".join(self._block))
            self._block = []
        if self._block:
            self._block.append(line)
            if rule:
                self._held += self._block
                self._block = []
            elif len(self._block) >= LONGEST:
                self._pass_on(b"".join(self._block))
                self._block = []
        elif rule:
            self._block = [line]
        elif _is(text, ENDING):
            self._ending = True
            self._held.append(line)
        elif line == b"\0" or (self._ending and _is(text, ENDED)):
            self._held.append(line)
        else:
            self._pass_on(line)

    def _settle(self) -> None:
        """Leave out the reports, or pass them on; an incomplete one is none."""
        rest = b"".join(self._block) + self._line[self._passed :]
        self._pass_on((b"" if self._said else b"".join(self._held)) + rest)
        self._held, self._block, self._passed = [], [], len(self._line)

    def _pass_on(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            while data:
                data = data[os.write(self._target, data) :]


def _is(text: bytes, patterns: tuple) -> bool:
    return any(re.fullmatch(pattern, text) for pattern in patterns)
