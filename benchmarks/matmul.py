"""Time a product of n × n matrices by every algorithm of hpctrain.matmul and by its peers, in turn.

    python benchmarks/matmul.py                            n = 1024, 2048 and 4096; 15 minutes on 2 cores
    python benchmarks/matmul.py --dtypes float32           not in float64 too; 5 minutes
    python benchmarks/matmul.py --sizes 1024 --rounds 5    a short look
    python benchmarks/matmul.py --layer --sizes 512,1024,4096 --dtypes float32    only a layer beside ht.matmul
    python benchmarks/matmul.py --debian /opt/debian --heat /opt/heat

Peers on 4 ranks: ScaLAPACK's psgemm and pdgemm (Debian's libscalapack-openmpi2.2, openmpi-bin and
libopenblas0-pthread with what they need, installed, or unpacked with dpkg -x in the folder --debian); torch's DTensor
over gloo; Heat (pip install --no-deps --target FOLDER heat; it wants torchvision). A peer that is not there is reported
as absent. On 2 ranks: torch.mm of one process at 2 threads, beyond which nothing can be expected.

Last of each size, a layer: `Linear` of n features on n rows beside `ht.matmul.Agarwal` on the same grid, forward, and
forward and backward. It is the same code on other layouts, so that the ratio is to be 1.

Each side is a job of its own, whose ranks sleep on a socket until this program asks them for a product: so a side
runs alone, and all see the same minutes of a shared machine. One BLAS thread a rank. Operands and results are spread
over the ranks; numbers are float32 where a case says nothing else. Prints a JSON object a line; `ratio` is the median
over the rounds of theirs / ours in seconds, or theirs / ours in elements: above 1, ours is better.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path

import pairs
from matmul_jobs import Job, absent
from matmul_sides import GRIDS

SIZES = {1024: 30, 2048: 15, 4096: 8}  # rounds of each
PEERS = {4: ("ScaLAPACK", "DTensor", "Heat"), 2: ("one process",)}
DTYPES = ("float32", "float64")
GOALS = {(4, 4096): 1.0, (2, 4096): 0.9}  # of the best peer on so many ranks, at this n


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
    sides = {name: (jobs["ours"], n, dtype, name) for name in GRIDS[ranks]}
    sides.update({name: (job, n, dtype) for name, job in jobs.items() if name != "ours"})
    seconds, elements = interleaved(rounds, sides)
    middle = {name: statistics.median(times) for name, times in seconds.items()}

    def speed(name):
        return round(2 * n**3 / middle[name] / 1e9, 1)

    def beside(mine, peer, label, goal):
        ratio = pairs.compared(seconds[mine], seconds[peer])
        grid = "x".join(map(str, GRIDS[ranks][mine]))
        of = "" if dtype == "float32" else f" {dtype}"
        report(f"n={n}{of}, {ranks} ranks, {mine} {grid}", label, speed(mine), speed(peer), "GFLOP/s", ratio, goal)

    best = min(GRIDS[ranks], key=middle.get)
    peers = [name for name in jobs if name != "ours"]
    for mine, peer in itertools.product(GRIDS[ranks], peers):
        beside(mine, peer, peer, None)
    if peers:
        best_peer = min(peers, key=middle.get)
        beside(best, best_peer, f"best of all: {best_peer}", GOALS.get((ranks, n)))
    return elements


def compare_layer(n, dtype, ranks, job, rounds):
    """A layer's product beside the one of `ht.matmul` on the same grid."""
    grid = "x".join(map(str, GRIDS[ranks]["Agarwal"]))
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
    for name, box in GRIDS[ranks].items():
        case = f"n={n}, {ranks} ranks, {name} {'x'.join(map(str, box))}"
        moved, least = elements[name]
        report(case, "least volume on this grid", moved, least, "elements a rank", least / moved, round(1 / 1.05, 3))
        cube = len(set(box)) == 1
        report(case, "lower bound", moved, round(bound), "elements a rank", bound / moved, 1.0 if cube else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], default=list(SIZES))
    parser.add_argument("--on", type=lambda text: [int(n) for n in text.split(",")], default=list(GRIDS), help="ranks")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=list(DTYPES))
    parser.add_argument("--layer", action="store_true", help="only a layer beside ht.matmul")
    parser.add_argument("--rounds", type=int, help="of every size")
    parser.add_argument("--debian", type=Path, default=Path("/"), help="where Debian's packages are unpacked")
    parser.add_argument("--heat", type=Path, default=Path("heat"), help="folder of Heat and what it imports")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="what the jobs print")
    options = parser.parse_args()
    if not set(options.on) <= set(GRIDS):
        parser.error(f"--on must be among {', '.join(map(str, GRIDS))}, got {options.on}")

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
        bytes_moved(1024, 8, {name: job.product(1024, DTYPES[0], name)[1] for name in GRIDS[8]})
        job.end()


if __name__ == "__main__":
    main()
