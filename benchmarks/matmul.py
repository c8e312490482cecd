"""Time a product of n × n matrices by every algorithm of hpctrain.matmul and by its peers, in turn.

    python benchmarks/matmul.py                            n = 1024, 2048 and 4096; 15 minutes on 2 cores
    python benchmarks/matmul.py --dtypes float32           not in float64 too; 5 minutes
    python benchmarks/matmul.py --sizes 1024 --rounds 5    a short look
    python benchmarks/matmul.py --layer --sizes 512,1024,4096 --dtypes float32    only a layer beside ht.matmul
    python benchmarks/matmul.py --debian /opt/debian --heat /opt/heat

Peers on 4 ranks: ScaLAPACK's psgemm and pdgemm (Debian's libscalapack-openmpi2.2, openmpi-bin and
libopenblas0-pthread with what they need, installed, or unpacked with dpkg -x in the folder --debian); torch's DTensor
over gloo; Heat (pip install --no-deps --target FOLDER heat). A peer that is not there is reported as absent. On 2
ranks: torch.mm of one process at 2 threads, beyond which nothing can be expected.

Last of each size, a layer: `Linear` of n features on n rows beside `ht.matmul.Agarwal` on the same grid, forward, and
forward and backward. It is the same code on other layouts, so that the ratio is to be 1.

Each side is a job of its own, whose ranks sleep on a socket until this program asks them for a product: so a side
runs alone, and all see the same minutes of a shared machine. One BLAS thread a rank. Operands and results are spread
over the ranks; numbers are float32 where a case says nothing else. Prints a JSON object a line; `ratio` is the median
over the rounds of theirs / ours in seconds, or theirs / ours in elements: above 1, ours is better.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pairs

ROOT = Path(__file__).parents[1]
SIZES = {1024: 30, 2048: 15, 4096: 8}  # rounds of each
OURS = {
    4: {"Cannon": (2, 2, 1), "Summa": (2, 2, 1), "TwoHalfD": (1, 1, 4), "Agarwal": (2, 1, 2)},
    2: {"Summa": (2, 1, 1), "Agarwal": (2, 1, 1)},
    8: {"TwoHalfD": (2, 2, 2), "Agarwal": (2, 2, 2)},  # on 2 cores for the bytes only
}
PEERS = {4: ("ScaLAPACK", "DTensor", "Heat"), 2: ("one process",)}
DTYPES = ("float32", "float64")
GOALS = {(4, 4096): 1.0, (2, 4096): 0.9}  # of the best peer on so many ranks, at this n
LENGTH = 64  # of the layer's sequences, of which a rank of z holds whole ones
BLOCK = 64  # of ScaLAPACK's block-cyclic layout; none of 128, 256, 512 and n / 2 was faster here


# Sides: each makes, for n and a dtype, a function that computes a product; the ranks call it together -------------


def ours(ranks):
    import torch
    from mpi4py import MPI

    import hpctrain as ht
    from hpctrain.shard import split

    torch.set_num_threads(1)
    grids = {box: ht.Grid(tensor=box) for box in set(OURS[ranks].values())}

    def layer(n, dtype, backward):
        grid = grids[OURS[ranks]["Agarwal"]]
        linear = ht.layers.Linear(grid, n, n, bias=False, to="inner", dtype=dtype)
        tokens = ht.layers.Tokens.of(grid, n // LENGTH, LENGTH)
        columns = split(n, grid.tensor.y.size, grid.tensor.y.rank)
        x = torch.rand(tokens.local_rows, columns.stop - columns.start, dtype=dtype)
        return forward_and_backward(lambda x, _: linear(x, tokens), x, linear.weight, backward)

    def forward_and_backward(product, a, b, backward):
        a.requires_grad_(backward)
        b.requires_grad_(backward)
        ones = torch.ones_like(product(a, b).detach())

        def run():
            c = product(a, b)
            if backward:
                torch.autograd.grad(c, (a, b), ones)

        return run

    def prepare(n, dtype, algorithm):
        algorithm, _, backward = algorithm.partition(", ")
        if algorithm == "layer":
            return layer(n, getattr(torch, dtype), bool(backward))
        grid = grids[OURS[ranks][algorithm]]
        mm = getattr(ht.matmul, algorithm)(grid.tensor)
        mm.bind(n, n, n)
        dtype = getattr(torch, dtype)
        a, b = (torch.rand(*[s.stop - s.start for s in mm.slices(name, n, n)], dtype=dtype) for name in "ab")
        if backward:
            return forward_and_backward(mm, a, b, True)
        volumes = []
        for name in ("Cannon", "Summa", "TwoHalfD", "Agarwal"):
            with contextlib.suppress(ValueError):  # not on such a grid
                volumes.append(getattr(ht.matmul, name)(grid.tensor).volume(n, n, n))

        def product():
            grid.transport.traffic.clear()
            mm(a, b)
            return grid.transport.traffic.total("received") // dtype.itemsize, min(volumes)

        return product

    return prepare, MPI.COMM_WORLD.Barrier


def one_process(ranks):
    import torch

    torch.set_num_threads(2)

    def prepare(n, dtype, _):
        a, b = (torch.rand(n, n, dtype=getattr(torch, dtype)) for _ in range(2))
        return lambda: torch.mm(a, b)

    return prepare, lambda: None


def dtensor(ranks):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    torch.set_num_threads(1)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    store = dist.FileStore(os.environ["MATMUL_STORE"], ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    def prepare(n, dtype, _):
        shape, dtype = (n // ranks, n), getattr(torch, dtype)
        a, b = (DTensor.from_local(torch.rand(shape, dtype=dtype), mesh, [Shard(0)]) for _ in range(2))
        # left to itself, DTensor splits k and takes 1.7 times as long
        return lambda: torch.matmul(a, b.redistribute(placements=[Replicate()]))

    return prepare, dist.barrier


def heat(ranks):
    import heat
    import torch

    torch.set_num_threads(1)

    def prepare(n, dtype, _):
        a, b = (heat.random.rand(n, n, dtype=getattr(heat, dtype), split=0) for _ in range(2))
        return lambda: heat.matmul(a, b)

    return prepare, heat.MPI.COMM_WORLD.Barrier


def scalapack(ranks):
    import numpy as np

    library = ctypes.CDLL("libscalapack-openmpi.so.2.2")
    context, rows, columns = ctypes.c_int(), 2, ranks // 2
    library.Cblacs_get(-1, 0, ctypes.byref(context))
    library.Cblacs_gridinit(ctypes.byref(context), b"R", rows, columns)
    one = ctypes.byref(ctypes.c_int(1))
    kinds = {"float32": (library.psgemm_, ctypes.c_float), "float64": (library.pdgemm_, ctypes.c_double)}

    def prepare(n, dtype, _):
        gemm, real = kinds[dtype]
        scale, none = (ctypes.byref(real(value)) for value in (1, 0))
        mine = n // rows, n // columns
        matrices = [np.asfortranarray(np.random.rand(*mine).astype(dtype)) for _ in range(3)]
        size = ctypes.byref(ctypes.c_int(n))
        descriptor = (ctypes.c_int * 9)(1, context.value, n, n, BLOCK, BLOCK, 0, 0, mine[0])
        a, b, c = ((matrix.ctypes.data_as(ctypes.c_void_p), one, one, descriptor) for matrix in matrices)

        def product(keep=matrices):
            gemm(b"N", b"N", size, size, size, scale, *a, *b, none, *c)

        return product

    return prepare, lambda: library.Cblacs_barrier(context, b"A")


SIDES = {"ours": ours, "one process": one_process, "DTensor": dtensor, "Heat": heat, "ScaLAPACK": scalapack}


def serve(side, ranks, address):
    """A rank: compute and time products as asked."""
    connection = Connection(socket.create_connection(address).detach())
    prepare, barrier = SIDES[side](ranks)
    connection.send("ready")
    products = {}
    while (asked := connection.recv()) is not None:
        if asked not in products:
            products.clear()
            products[asked] = prepare(*asked)
        barrier()
        start = time.perf_counter()
        elements = products[asked]()
        seconds = time.perf_counter() - start
        connection.send((seconds, elements if isinstance(elements, tuple) else (0, 0)))
    os._exit(0)  # the peers' own ways to end are theirs


# The program that asks --------------------------------------------------------------------------------------------


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
            launcher = [str(options.debian / "usr/bin/mpirun.openmpi"), "--oversubscribe", "--bind-to", "none"]
            launcher += ["--mca", "pml", "ob1", "--mca", "btl", "self,vader", "-n", str(ranks)]
        elif side == "Heat":
            environment["PYTHONPATH"] = str(options.heat)
        environment["MATMUL_STORE"] = f"/tmp/matmul-{os.getpid()}-{ranks}"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
            log = open(options.logs / f"{side.replace(' ', '-')}-{ranks}.log", "w")
            command = [*launcher, *python, __file__, "--serve", side, "--ranks", str(ranks), "--port", port]
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


def interleaved(rounds, sides):
    """Seconds of each round after two, and elements, by the names of sides (job, n, dtype, algorithm), in turn."""
    seconds, elements = {name: [] for name in sides}, {}
    for number in range(rounds + 2):
        for name, (job, *asked) in sides.items():
            took, elements[name] = job.product(*asked)
            if number >= 2:
                seconds[name].append(took)
    return seconds, elements


def report(case, peer, ours, theirs, unit, ratio, goal):
    """`ratio`: a number, None, or the members that `pairs.compared` gives."""
    line = {"benchmark": "matmul", "case": case, "peer": peer, "ours": ours, "theirs": theirs, "unit": unit}
    if not isinstance(ratio, dict):
        ratio = {"ratio": ratio and round(ratio, 3)}
    print(json.dumps({**line, **ratio, "goal": goal}), flush=True)


def compare(n, dtype, ranks, jobs, rounds):
    """Every algorithm of ours beside every peer, and the best of ours beside the best peer."""
    sides = {name: (jobs["ours"], n, dtype, name) for name in OURS[ranks]}
    sides.update({name: (job, n, dtype) for name, job in jobs.items() if name != "ours"})
    seconds, elements = interleaved(rounds, sides)
    middle = {name: statistics.median(times) for name, times in seconds.items()}

    def speed(name):
        return round(2 * n**3 / middle[name] / 1e9, 1)

    def beside(mine, peer, label, goal):
        ratio = pairs.compared(seconds[mine], seconds[peer])
        grid = "x".join(map(str, OURS[ranks][mine]))
        of = "" if dtype == "float32" else f" {dtype}"
        report(f"n={n}{of}, {ranks} ranks, {mine} {grid}", label, speed(mine), speed(peer), "GFLOP/s", ratio, goal)

    best = min(OURS[ranks], key=middle.get)
    peers = [name for name in jobs if name != "ours"]
    for mine, peer in itertools.product(OURS[ranks], peers):
        beside(mine, peer, peer, None)
    if peers:
        best_peer = min(peers, key=middle.get)
        beside(best, best_peer, f"best of all: {best_peer}", GOALS.get((ranks, n)))
    return elements


def compare_layer(n, dtype, ranks, job, rounds):
    """A layer's product beside the one of `ht.matmul` on the same grid."""
    grid = "x".join(map(str, OURS[ranks]["Agarwal"]))
    of = "" if dtype == "float32" else f" {dtype}"
    for products, what in ((1, "forward"), (3, "forward and backward")):
        more = ", backward" if products == 3 else ""
        seconds, _ = interleaved(rounds, {name: (job, n, dtype, name + more) for name in ("layer", "Agarwal")})
        speed = [round(2 * products * n**3 / statistics.median(times) / 1e9, 1) for times in seconds.values()]
        ratio = pairs.compared(seconds["layer"], seconds["Agarwal"])
        report(f"n={n}{of}, {ranks} ranks, layer {grid}, {what}", "ht.matmul.Agarwal", *speed, "GFLOP/s", ratio, 0.97)


def bytes_moved(n, ranks, elements):
    """Elements received, beside the least volume any of the four algorithms has on that grid, and the bound."""
    from hpctrain.matmul import lower_bound

    bound = lower_bound(n, n, n, ranks)
    for name, box in OURS[ranks].items():
        case = f"n={n}, {ranks} ranks, {name} {'x'.join(map(str, box))}"
        moved, least = elements[name]
        report(case, "least volume on this grid", moved, least, "elements a rank", least / moved, round(1 / 1.05, 3))
        cube = len(set(box)) == 1
        report(case, "lower bound", moved, round(bound), "elements a rank", bound / moved, 1.0 if cube else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], default=list(SIZES))
    parser.add_argument("--on", type=lambda text: [int(n) for n in text.split(",")], default=list(OURS), help="ranks")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=list(DTYPES))
    parser.add_argument("--layer", action="store_true", help="only a layer beside ht.matmul")
    parser.add_argument("--rounds", type=int, help="of every size")
    parser.add_argument("--debian", type=Path, default=Path("/"), help="where Debian's packages are unpacked")
    parser.add_argument("--heat", type=Path, default=Path("heat"), help="folder of Heat and what it imports")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="what the jobs print")
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not set(options.on) <= set(OURS):
        parser.error(f"--on must be among {', '.join(map(str, OURS))}, got {options.on}")
    if options.serve:
        return serve(options.serve, options.ranks, ("127.0.0.1", options.port))

    for ranks in [n for n in options.on if n in PEERS]:
        jobs = {"ours": Job("ours", ranks, options)}
        for peer in () if options.layer else PEERS[ranks]:
            why = absent(peer, options)
            try:
                jobs.update({} if why else {peer: Job(peer, ranks, options)})
            except OSError as error:
                why = error
            if why:
                report(f"{ranks} ranks", f"{peer}: absent, {why}", None, None, "GFLOP/s", None, None)
        for dtype, n in itertools.product(options.dtypes, options.sizes):
            rounds = options.rounds or SIZES.get(n, 10)
            if not options.layer:
                elements = compare(n, dtype, ranks, jobs, rounds)
            compare_layer(n, dtype, ranks, jobs["ours"], rounds)
        if not options.layer:
            bytes_moved(n, ranks, elements)
        for job in jobs.values():
            job.end()
    if 8 in options.on and not options.layer:
        job = Job("ours", 8, options)
        bytes_moved(1024, 8, {name: job.product(1024, DTYPES[0], name)[1] for name in OURS[8]})
        job.end()


if __name__ == "__main__":
    main()
