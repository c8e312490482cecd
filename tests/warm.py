"""Programs that start warm: forked from a process that has imported torch and all else, which takes a cold one seconds.

    python tests/warm.py --serve SOCKET ARGUMENTS...  collects the MPI tests that `pytest ARGUMENTS...` would run, says
                                                      "ready", then forks until its standard input is closed
    python tests/warm.py --serve SOCKET --others      has imported other packages alone, no test and not hpctrain, which
                                                      may change
    python -IS tests/warm.py hpctrain train CONFIG    does what `hpctrain train CONFIG` would, by HPCTRAIN_WARM's server
    python -IS tests/warm.py python -m mpi4py FILE    likewise, also with -c CODE or FILE alone

The program gets the caller's environment, folder, cores, niceness, standard files and signals, and the caller ends as
it does; killed, it takes the program along. As a rank of mpirun the caller stands between the two: MPI starts in the
program, from variables alone. What `hpctrain` starts by `sys.executable`, such as the ranks of a study, is warm as
well. What is not as in a cold start, and is tested cold: the caller's process id is not the program's, all programs
have one seed for the hashes of strings, and modules are there that nobody imported.
"""

import _signal as signal  # the client has imported next to nothing: enum, json and their like take as long as all else
import _socket
import marshal
import os
import sys

SOCKET = "HPCTRAIN_WARM"
RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LENGTH = 8  # bytes of a request's length
IMPORTED = """torch torch._dynamo numpy h5py scipy.optimize mpi4py safetensors.torch sklearn.datasets matplotlib.pyplot
    pytest hypothesis hypothesis.strategies transformers.models.gpt2.modeling_gpt2 tokenizers"""


def call(command):
    """Ends as the program ends that the server forks."""
    server = _socket.socket(_socket.AF_UNIX)
    server.connect(os.environ[SOCKET])
    ignored = [number for number in RELAYED if signal.getsignal(number) == signal.SIG_IGN]
    place = os.getcwd(), sorted(os.sched_getaffinity(0)), os.nice(0)
    request = marshal.dumps([command, *place, dict(os.environ), ignored])
    files = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    length = len(request).to_bytes(LENGTH, "big")
    server.sendmsg([length], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
    server.sendall(request)
    for number in {*RELAYED} - {*ignored}:
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    status = int(server.recv(16) or b"1")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(path, arguments):
    """Forks programs, passes signals on to them and their statuses to their callers. Returns in a program."""
    import gc
    import importlib
    import select
    import socket
    import threading
    import weakref

    for name in IMPORTED.split():
        importlib.import_module(name)
    if arguments != ["--others"]:
        import_hpctrain()
        collect(arguments)
    assert "mpi4py.MPI" not in sys.modules
    assert threading.active_count() == 1
    with open(python(path), "w") as script:
        script.write(f'#!/bin/sh\nexec "{sys.executable}" -IS "{os.path.abspath(__file__)}" python "$@"\n')
    os.chmod(python(path), 0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    for each in list(weakref.finalize._registry):  # of torch's operators: one by one at a program's end, for 30 ms
        each.atexit = False
    gc.freeze()  # what is there is never looked at again, so that its pages stay shared
    join_pages()
    print("ready", flush=True)
    callers, ends = {}, {}  # process ids by connection; both by what becomes readable when a process ends
    listening = True
    while listening or ends:
        readable, _, _ = select.select([*([listener, 0] if listening else []), *callers, *ends], [], [])
        for each in set(readable) & {*ends}:
            caller, pid = ends.pop(each)
            os.close(each)
            tell(caller, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            callers.pop(caller, None)
            caller.close()
        for caller in set(readable) & {*callers}:
            if not pass_on(caller, callers[caller]):
                del callers[caller]
                caller.close()
        if 0 in readable:
            listening = False
        elif listener in readable:
            caller, _ = listener.accept()
            request, files = read(caller)
            if request is None:
                caller.close()
                continue
            pid = os.fork()
            if pid == 0:
                for other in (listener, caller, *callers):
                    other.close()
                for number in ends:
                    os.close(number)
                return begin(request, files)
            for file in files:
                os.close(file)
            callers[caller] = pid
            ends[os.pidfd_open(pid)] = caller, pid
    return None


def fill_holes():
    """Of what imports have freed, which lies in pages of its own: programs take memory beyond it, page after page."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.sbrk.argtypes, libc.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
    libc.malloc_trim(0)
    end = libc.sbrk(0)
    for size in (*(1 << k for k in range(16, 10, -1)), *range(1024, 15, -16)):
        while (place := libc.malloc(size - 8)) < end:
            pass
        libc.free(place)


def join_pages():
    """Into huge ones, of which a fork copies 512 times fewer; where the kernel does not, all stays as it is."""
    import ctypes

    fill_holes()
    madvise, collapse, huge = ctypes.CDLL(None).madvise, 25, 2 << 20
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps]
    for place, access, _, _, inode, *_ in lines:
        first, last = (int(end, 16) for end in place.split("-"))
        first, last = -(-first // huge) * huge, last // huge * huge
        if access.startswith("rw") and inode == "0" and first < last:
            madvise(first, last - first, collapse)


def import_hpctrain():
    import importlib
    import pkgutil

    import hpctrain

    for module in pkgutil.walk_packages(hpctrain.__path__, "hpctrain."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def collect(arguments):
    """Imports the MPI tests, which programs that run them find there, and leaves the numbers of ranks that they name
    (`ranks_named.py`)."""
    import contextlib
    import io

    import pytest

    quiet = ["-qq", "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what was imported before
    sys.modules["mpi4py.MPI"] = None  # starts with the import, which fails now
    with contextlib.redirect_stdout(io.StringIO()) as report:
        status = pytest.main(["--only-mpi", "--collect-only", *quiet, *arguments])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(report.getvalue())
    del sys.modules["mpi4py.MPI"]


def python(path):
    """What starts `python ...` by the server of this socket."""
    return f"{path}-python"


def read(caller):
    """A caller's request and its files; None from one that was killed before it had asked."""
    import socket

    length, files, _, _ = socket.recv_fds(caller, LENGTH, 3)
    with caller.makefile("rb") as stream:
        request = stream.read(int.from_bytes(length, "big"))
    if len(length) == LENGTH and len(request) == int.from_bytes(length, "big"):
        return marshal.loads(request), files
    for file in files:
        os.close(file)
    return None, ()


def begin(request, files):
    """Puts the process into the caller's place; returns the program."""
    program, folder, cores, nice, environment, ignored = request
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    os.environ.clear()
    os.environ.update(environment)
    for number in RELAYED:  # where the server was started in the background, it ignores what the caller may not
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else usual)
    return program


def pass_on(caller, pid):
    """The caller's signal; false at its end, by which the program ends."""
    try:
        number = caller.recv(1)
    except ConnectionError:
        number = b""
    os.kill(pid, number[0] if number else signal.SIGKILL)
    return number


def tell(caller, status):
    import contextlib

    with contextlib.suppress(OSError):  # it was killed
        caller.sendall(str(status).encode())


def run(program):
    """In this process, as if it had just been started."""
    import runpy

    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    kind, *arguments = program
    sys.path[:1] = folders = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    sys.orig_argv = [sys.executable, *program]
    for folder in folders:
        if os.path.exists(file := os.path.join(folder, "sitecustomize.py")):
            runpy.run_path(file)
    if os.path.basename(kind) == "hpctrain":
        from hpctrain.cli import main

        sys.argv, sys.executable = program, python(os.environ[SOCKET])
        return main()
    if safe := arguments[0] == "-P":  # without the working folder
        del arguments[0]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        if not safe:
            sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        if not safe:
            sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")
    return None


def end(status):
    """As Python ends, without taking apart all modules."""
    import atexit

    atexit._run_exitfuncs()
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main():
    if sys.argv[1] != "--serve":
        call(sys.argv[1:])
    if program := serve(sys.argv[2], sys.argv[3:]):
        try:
            end(run(program) or 0)
        except SystemExit as error:
            if error.code is None or isinstance(error.code, int):
                end((error.code or 0) & 255)
            raise  # with a message


if __name__ == "__main__":
    main()
