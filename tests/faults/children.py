"""Work in a process of its own, killed or on a disk that is full."""

import os
import resource
import signal
import sys


def in_child(work, *arguments):
    """Exit status of a process of its own that does the work: negative for a signal."""
    if (pid := os.fork()) == 0:
        try:
            work(*arguments)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def limited(size):
    """A disk that takes no more than this of any file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
