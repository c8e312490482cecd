"""Programs that start warm: forked from a process that has imported torch and all else, which takes a cold one seconds.

    python tests/warm.py --serve SOCKET               says "ready", then forks until its standard input is closed
    python tests/warm.py --serve SOCKET --others      has imported other packages alone, not hpctrain, which may change
    python -IS tests/warm.py hpctrain train CONFIG    does what `hpctrain train CONFIG` would, by HPCTRAIN_WARM's server
    python -IS tests/warm.py python -m mpi4py FILE    likewise, also with -c CODE or FILE alone

The program gets the caller's environment, folder, cores, standard files and signals, and the caller ends as it does;
killed, it takes the program along. As a rank of mpirun the caller stands between the two: MPI starts in the program,
from variables alone. What `hpctrain` starts by `sys.executable`, such as the ranks of a study, is warm as well. What is
not as in a cold start, and is tested cold: the caller's process id is not the program's, all programs have one seed for
the hashes of strings, and modules are there that nobody imported.
"""

import os
import select
import signal
import socket
import sys

SOCKET = "HPCTRAIN_WARM"
RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LENGTH = 8  # bytes of a request's length
IMPORTED = """torch torch._dynamo numpy h5py scipy.optimize mpi4py safetensors.torch sklearn.datasets matplotlib.pyplot
    pytest hypothesis hypothesis.strategies transformers.models.gpt2.modeling_gpt2 tokenizers"""


def call(command):
    """Ends as the program ends that the server forks."""
    import json

    server = socket.socket(socket.AF_UNIX)
    server.connect(os.environ[SOCKET])
    request = json.dumps([command, os.getcwd(), sorted(os.sched_getaffinity(0)), dict(os.environ)]).encode()
    socket.send_fds(server, [len(request).to_bytes(LENGTH, "big")], [0, 1, 2])
    server.sendall(request)
    for number in RELAYED:
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    status = int(server.recv(16) or b"1")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(path, others=False):
    import gc
    import importlib
    import threading

    for name in IMPORTED.split():
        importlib.import_module(name)
    if not others:
        import_hpctrain()
    assert "mpi4py.MPI" not in sys.modules
    assert threading.active_count() == 1
    with open(python(path), "w") as script:
        script.write(f'#!/bin/sh\nexec "{sys.executable}" -IS "{os.path.abspath(__file__)}" python "$@"\n')
    os.chmod(python(path), 0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    gc.freeze()  # what is there is never looked at again, so that its pages stay shared
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while True:
        readable, _, _ = select.select([listener, 0], [], [])
        if 0 in readable:
            return None
        caller, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return keep(caller)
        caller.close()


def import_hpctrain():
    import importlib
    import pkgutil

    import hpctrain

    for module in pkgutil.walk_packages(hpctrain.__path__, "hpctrain."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def python(path):
    """What starts `python ...` by the server of this socket."""
    return f"{path}-python"


def keep(caller):
    """Starts the program, passes signals on to it and its status to the caller. Returns in the program."""
    import json

    length, files, _, _ = socket.recv_fds(caller, LENGTH, 3)
    with caller.makefile("rb", buffering=0) as stream:
        request = b""
        while len(request) < int.from_bytes(length, "big"):
            request += stream.read(int.from_bytes(length, "big") - len(request))
    program, folder, cores, environment = json.loads(request)
    pid = os.fork()
    if pid == 0:
        caller.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(folder)
        os.sched_setaffinity(0, cores)
        os.environ.clear()
        os.environ.update(environment)
        return program
    for file in (0, 1, 2, *files):
        os.close(file)
    ended = os.pidfd_open(pid)
    while True:
        readable, _, _ = select.select([caller, ended], [], [])
        if ended in readable:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            caller.sendall(str(status).encode())
            os._exit(0)
        number = caller.recv(1)
        os.kill(pid, number[0] if number else signal.SIGKILL)
        if not number:
            os._exit(0)


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
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
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
    if program := serve(sys.argv[2], others=sys.argv[3:] == ["--others"]):
        try:
            end(run(program) or 0)
        except SystemExit as error:
            if error.code is None or isinstance(error.code, int):
                end((error.code or 0) & 255)
            raise  # with a message


if __name__ == "__main__":
    main()
