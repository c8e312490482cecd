"""How fast checkpoints are written and read, beside torch.distributed.checkpoint and dd with fsync on the same disk.

    $MPIRUN -n 2 python -m mpi4py benchmarks/checkpoint.py                  256 MiB a rank on /tmp; a minute
    $MPIRUN -n 1 python -m mpi4py benchmarks/checkpoint.py --mib 512 --folder /scratch

Every rank holds its rows of matrices of 4 MiB. In turn, round by round: ours blocking and in the background, torch's
DCP over gloo (which syncs its files as well, but hashes nothing), dd conv=fsync of as many bytes, and SHA-256 alone of
as many, which every save of ours must take; then all load what they saved, ours with every byte checked. Prints one
JSON object a line, medians over the rounds of the slowest rank; "stall" is the time that a save in the background keeps
training from going on.
"""

import argparse
import hashlib
import json
import logging
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

import pairs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mpi4py import MPI
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hpctrain import shard
from hpctrain.checkpoint import Checkpointer
from hpctrain.shard_entries import Entry

SIDE = 1024  # of the matrices, float32


class Matrices:
    """`count` matrices of size SIDE a rank, cut by rows."""

    def __init__(self, world, count):
        rows = SIDE * world.size
        mine = slice(world.rank * SIDE, (world.rank + 1) * SIDE)
        self.shard = shard.Shard((rows, SIDE), (mine, slice(0, SIDE)))
        self.tensors = {f"matrix-{n}": torch.rand(SIDE, SIDE) for n in range(count)}

    def to_save(self):
        return [Entry(name, self.shard, tensor) for name, tensor in self.tensors.items()]

    def to_load(self, saved):
        assert set(saved) == set(self.tensors)
        return self.to_save()

    def loaded(self):
        """Nothing is held twice."""


def timed(world, action):
    """Seconds of the slowest rank."""
    world.Barrier()
    start = time.perf_counter()
    action()
    return world.allreduce(time.perf_counter() - start, MPI.MAX)


def disk(path, nbytes):
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={nbytes >> 20}", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)


def hashed(tensors):
    sha = hashlib.sha256()
    for tensor in tensors.values():
        sha.update(tensor.numpy())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="of a rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    logging.getLogger("hpctrain").setLevel(logging.WARNING)
    root = options.folder / "hpctrain-benchmark"
    if world.rank == 0:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
    mesh = init_device_mesh("cpu", (world.size,))

    ours = Matrices(world, options.mib * (1 << 20) // (4 * SIDE**2))
    theirs = {name: DTensor.from_local(t.clone(), mesh, [Shard(0)]) for name, t in ours.tensors.items()}
    nbytes = sum(t.nbytes for t in ours.tensors.values())
    blocking = Checkpointer(root / "blocking", world, keep=100, background=False)
    background = Checkpointer(root / "background", world, keep=100)
    seconds = {name: [] for name in ("save", "stall", "background save", "dcp save", "dd", "sha", "load", "dcp load")}

    def save(checkpointer, step):
        error = checkpointer.save(step, ours, {})
        assert error is None, error

    for step in range(options.rounds + 1):
        taken = {
            "save": timed(world, lambda step=step: save(blocking, step)),
            "dcp save": timed(world, lambda step=step: dcp.save(theirs, checkpoint_id=root / f"dcp-{step}")),
            "dd": timed(world, lambda: disk(root / f"dd-{world.rank}", nbytes)),
            "sha": timed(world, lambda: hashed(ours.tensors)),
            "stall": timed(world, lambda step=step: save(background, step)),
        }
        taken["background save"] = taken["stall"] + timed(world, background.finish)
        taken["load"] = timed(world, lambda: blocking.resume(ours))
        taken["dcp load"] = timed(world, lambda step=step: dcp.load(theirs, checkpoint_id=root / f"dcp-{step}"))
        if step:  # the first round makes buffers and connections
            for name, value in taken.items():
                seconds[name].append(value)
        world.Barrier()
        if world.rank == 0:
            for path in (root / f"dcp-{step}", root / "blocking", root / "background"):
                shutil.rmtree(path)
        world.Barrier()

    median = {name: statistics.median(values) for name, values in seconds.items()}
    rate = {name: nbytes * world.size / 2**20 / value for name, value in median.items()}
    case = f"{world.size} ranks of {options.mib} MiB"
    if world.rank == 0:
        shutil.rmtree(root)
        for what, mine, peer, other, goal in [
            ("save", "save", "torch DCP", "dcp save", 0.9),
            ("save", "save", "dd conv=fsync", "dd", None),
            ("save", "save", "SHA-256 alone", "sha", None),
            ("load", "load", "torch DCP", "dcp load", 0.9),
        ]:
            ratio = pairs.compared(seconds[mine], seconds[other])
            report(f"{what}, {case}", peer, rate[mine], rate[other], "MiB/s", ratio, goal)
        ratio = pairs.compared(seconds["stall"], seconds["save"])
        report(f"stall, {case}", "blocking save", median["stall"], median["save"], "s", ratio, 10)
    dist.destroy_process_group()


def report(case, peer, ours, theirs, unit, ratio, goal):
    values = {"ours": round(ours, 4), "theirs": round(theirs, 4), "unit": unit, **ratio, "goal": goal}
    print(json.dumps({"benchmark": "checkpoint", "case": case, "peer": peer, **values}), flush=True)


if __name__ == "__main__":
    main()
