"""The jobs of benchmarks/matmul.py: one for each side, whose ranks sleep until they are asked for a product."""

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parents[1]
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


class Job:
    """One side's ranks, started once and asked for products."""

    def __init__(self, side, ranks, options):
        python = [sys.executable, *([] if side in ("one process", "ScaLAPACK") else ["-m", "mpi4py"])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        launcher = [str(ROOT / "jobs/mpirun.sh"), "-n", str(ranks)]
        if side == "one process":
            launcher = []
            environment["OMP_NUM_THREADS"] = "2"
        elif side == "ScaLAPACK":
            libraries = options.debian / "usr/lib/x86_64-linux-gnu"
            environment = {name: value for name, value in environment.items() if "MCA" not in name}
            environment["LD_LIBRARY_PATH"] = f"{libraries}/openblas-pthread:{libraries}"
            environment["OPAL_PREFIX"] = str(options.debian / "usr")
            # Our own launcher says so by itself.
            environment |= {} if os.getuid() else dict.fromkeys(AS_ROOT, "1")
            launcher = [str(options.debian / "usr/bin/mpirun.openmpi"), "--oversubscribe", "--bind-to", "none"]
            launcher += ["--mca", "pml", "ob1", "--mca", "btl", "self,vader", "-n", str(ranks)]
        elif side == "Heat":
            environment["PYTHONPATH"] = str(options.heat)
        environment["MATMUL_STORE"] = f"/tmp/matmul-{os.getpid()}-{ranks}"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
            log = open(options.logs / f"{side.replace(' ', '-')}-{ranks}.log", "w")
            command = [*launcher, *python, ROOT / "benchmarks/matmul_sides.py", side, str(ranks), port]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            self.ranks = [self._accept(listener) for _ in range(1 if side == "one process" else ranks)]

    def _accept(self, listener):
        """A rank, once it is ready."""
        listener.settimeout(1)
        for _ in range(60):
            try:
                rank = Connection(listener.accept()[0].detach())
                rank.recv()
                return rank
            except (TimeoutError, EOFError):
                if self.process.poll() is not None:
                    break
        self.process.terminate()
        raise OSError("its ranks did not start")

    def product(self, n, dtype, algorithm=None):
        """Seconds of the slowest rank; elements that a rank received at most, and the least there is on this grid."""
        for rank in self.ranks:
            rank.send((n, dtype, algorithm))
        seconds, elements = zip(*(rank.recv() for rank in self.ranks))
        return max(seconds), max(elements)

    def end(self):
        for rank in self.ranks:
            rank.send(None)
        self.process.wait(30)


def absent(side, options):
    """Why a peer cannot run here, or None."""
    if side == "ScaLAPACK" and not (options.debian / "usr/bin/mpirun.openmpi").exists():
        return f"no mpirun.openmpi under {options.debian}"
    if side == "Heat" and not (options.heat / "heat").exists():
        return f"no heat in {options.heat}"
    return None
