"""Time every all-reduce algorithm of hpctrain beside Open MPI's own and gloo's, call by call in turn.

    $MPIRUN -n 2 python -m mpi4py benchmarks/allreduce.py                 1 KiB to 64 MiB; 2 minutes
    $MPIRUN -n 4 python -m mpi4py benchmarks/allreduce.py                 3 minutes
    $MPIRUN -n 4 python -m mpi4py benchmarks/allreduce.py --algorithms auto --sizes 65536

Float32. "shared" and "auto" sum tensors that were made to be summed, as the gradients of DataParallel are
(`comm.AllReduceBuffer`), which may lie in shared memory; the others sum any tensor. MPI's own is mpi4py's Allreduce in
place, its arguments made beforehand; "mpi" is the same through `comm.all_reduce`, with its checks and its ledger.

Prints one JSON object a line: microseconds of the slowest rank, medians; `ratio` is the median over the rounds of
theirs / ours, above 1 where ours is faster. Then, for each algorithm over messages, the model
a · messages + b · bytes sent + g · bytes added of comm/algorithms/by_messages.py: g is measured alone, a and b are
fitted to the times (least squares of relative errors), `error` is the median relative error of the fit.
"""

import argparse
import json
import math
import random
import statistics
import time
from functools import partial

import numpy as np
import pairs
import torch
import torch.distributed as dist
from gloo import gloo
from mpi4py import MPI

import hpctrain as ht
from hpctrain import comm
from hpctrain.choices import ALL_REDUCE
from hpctrain.comm.algorithms.by_messages import SEGMENT

SIZES = tuple(1024 * 4**k for k in range(9))  # bytes
LONG = 4 << 20  # a third as many rounds from this size on
MADE_TO_BE_SUMMED = ("shared", "auto")


def side(name, numel):
    """A function that takes one sum by the algorithm of this name."""
    axis = axes[name]
    if name in MADE_TO_BE_SUMMED:
        return comm.AllReduceBuffer(axis, numel, torch.zeros(1)).all_reduce
    return partial(comm.all_reduce, torch.zeros(numel), axis)


def peers(numel):
    x, y = torch.zeros(numel), torch.zeros(numel)
    message = [MPI.buffer.fromaddress(x.data_ptr(), x.nbytes), MPI.FLOAT]
    yield "Open MPI", lambda keep=x: world.Allreduce(MPI.IN_PLACE, message, MPI.SUM)
    yield "gloo", partial(dist.all_reduce, y)


def seconds(sides, nbytes, rounds):
    """Times of every round of each side, taken in turn; the slowest rank counts."""
    calls = max(1, min(8, (256 << 10) // nbytes))
    times, order, chance = {name: [] for name in sides}, list(sides.items()), random.Random(0)
    for turn in range(1 + (rounds // 3 if nbytes >= LONG else rounds)):
        chance.shuffle(order)  # the same on all ranks; nobody always comes after the same one
        for name, call in order:
            call()
            world.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            taken = world.allreduce((time.perf_counter() - start) / calls, MPI.MAX)
            if turn:
                times[name].append(taken)
    return times


def goal(name, peer, nbytes):
    if name != "auto" or peer != "Open MPI":
        return None
    return {2: 1.5, 4: 3.0}.get(world.size) if nbytes == 64 << 20 else 0.9


def terms(name, p, n):
    """Messages one after another, bytes sent one after another and bytes added, of an algorithm."""
    q = 1 << (p.bit_length() - 1)
    fold = p > q
    messages, sent, added = {
        "naive": (2 * (p - 1), 2 * (p - 1) * n, (p - 1) * n),
        "ring": (2 * (p - 1), 2 * (p - 1) / p * n, (p - 1) / p * n),
        "direct": (2 * (p - 1), 2 * (p - 1) / p * n, (p - 1) / p * n),
        "rabenseifner": (
            2 * (q.bit_length() - 1) + 2 * fold, 2 * (q - 1) / q * n + 2 * fold * n, (q - 1) / q * n + fold * n
        ),
    }[name]  # fmt: skip
    return messages * math.ceil(n / (4 * SEGMENT)), sent, added


def fitted(name, taken, gamma):
    """a and b of the model, and the median relative error; `taken` is {bytes: seconds}."""
    rows = np.array([terms(name, world.size, n) for n in taken])
    t = np.array(list(taken.values()))
    left = rows[:, :2] / t[:, None]
    a, b = np.maximum(np.linalg.lstsq(left, 1 - gamma * rows[:, 2] / t, rcond=None)[0], 0)
    errors = np.abs(rows @ [a, b, gamma] / t - 1)
    return a, b, float(np.median(errors))


def seconds_a_byte_added(numel=1 << 20):
    x, y = torch.zeros(numel), torch.zeros(numel)
    times = []
    for _ in range(9):
        world.Barrier()
        start = time.perf_counter()
        x += y
        times.append(time.perf_counter() - start)
    return world.allreduce(statistics.median(times), MPI.MAX) / x.nbytes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(ALL_REDUCE))
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.algorithms.split(","):
        axes[name] = ht.Grid(data=world.size).data
        comm.choose_all_reduce(axes[name], name)
    taken = {name: {} for name in axes}
    for nbytes in options.sizes:
        theirs = dict(peers(nbytes // 4))
        times = seconds({name: side(name, nbytes // 4) for name in axes} | theirs, nbytes, options.rounds)
        for name in axes:
            taken[name][nbytes] = statistics.median(times[name])
            for peer in theirs:
                say(
                    case=f"{name}, {label(nbytes)}, {world.size} ranks", peer=peer,
                    ours=round(1e6 * statistics.median(times[name]), 1),
                    theirs=round(1e6 * statistics.median(times[peer]), 1), unit="us",
                    **pairs.compared(times[name], times[peer]),
                    goal=goal(name, peer, nbytes),
                )  # fmt: skip
    gamma = seconds_a_byte_added()
    for name in ("naive", "ring", "direct", "rabenseifner"):
        if name in axes:
            a, b, error = fitted(name, taken[name], gamma)
            say(
                case=f"{name}, model, {world.size} ranks", a_us=round(1e6 * a, 2), b_ns=round(1e9 * b, 4),
                g_ns=round(1e9 * gamma, 4), error=round(error, 3),
            )  # fmt: skip


def say(**members):
    if world.rank == 0:
        print(json.dumps({"benchmark": "allreduce", **members}), flush=True)


def label(nbytes):
    return f"{nbytes >> 20} MiB" if nbytes >> 20 else f"{nbytes >> 10} KiB"


if __name__ == "__main__":
    world, axes = MPI.COMM_WORLD, {}
    with gloo():
        main()
