"""Reading tokens from checksummed HDF5 shards beside numpy's memmap of the bare numbers, in turn.

    $MPIRUN -n 1 python -m mpi4py benchmarks/hdf5.py            64 Mi tokens in 4 shards; half a minute
    $MPIRUN -n 4 python -m mpi4py benchmarks/hdf5.py            each rank reads its quarter of the samples

Samples are 1,025 tokens as int64, from the page cache. "first" reads every chunk for the first time, so that its
checksum is checked; "later" is what all epochs but the first are. Prints a JSON object for each: medians over the
rounds of all ranks' samples (or bytes of tokens) a second; `ratio` is ours over memmap's, `goal` what it should be. The
last object is the share of a training step that reading takes, in jobs/scale.toml's job, and the memory that reading
all samples added to a rank.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import pairs
from mpi4py import MPI

from hpctrain.data import ShardedTokens, pack

LENGTH = 1025
TOKENS = 2**26
GOALS = {"shuffled, later": 150 / 700, "sequential, later": 0.4}


def packed(folder):
    """The index of random bytes, packed, and the file of the same numbers without anything."""
    path = Path(folder) / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(32, 127, TOKENS - 1, np.uint8).tobytes())
    pack([str(path)], Path(folder) / "data.h5", shard_tokens=TOKENS // 4)
    tokens = ShardedTokens(Path(folder) / "data.h5").read(0, TOKENS)
    tokens.astype("<u2").tofile(Path(folder) / "bare")


def seconds(world, work):
    world.Barrier()
    start = time.perf_counter()
    work()
    return world.allreduce(time.perf_counter() - start, MPI.MAX)


def resident():
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the data are made (a temporary folder)")
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        folder = Path(world.bcast(own))
        if world.rank == 0:
            packed(folder)
        world.Barrier()
        compare(world, folder, options.rounds)
        world.Barrier()


def compare(world, folder, rounds):
    bare = np.memmap(folder / "bare", "<u2", "r")
    mine = np.random.default_rng(1).permutation(TOKENS // LENGTH)[world.rank :: world.size] * LENGTH
    share = TOKENS // world.size
    place, out = world.rank * share, np.zeros(share, np.int64)
    sample = np.zeros(LENGTH, np.int64)

    def shuffled(read):
        def work():
            for start in mine.tolist():
                read(start)

        return work

    def by_memmap(start):
        sample[:] = bare[start : start + LENGTH]

    def copy(start, count, part):
        part[:] = bare[start : start + count]

    def sweep(read):
        step = 2**16
        for start in range(0, share, step):
            read(place + start, min(step, share - start), out[start : start + step])

    before, reader = resident(), ShardedTokens(folder / "data.h5")
    shuffled(lambda start: reader.read(start, LENGTH, sample))()
    grown = resident() - before
    reader.close()
    times = {}
    for _ in range(rounds):
        ours, swept = ShardedTokens(folder / "data.h5"), ShardedTokens(folder / "data.h5")
        work = {
            ("shuffled", "memmap"): shuffled(by_memmap),
            ("shuffled", "first"): shuffled(lambda start, ours=ours: ours.read(start, LENGTH, sample)),
            ("shuffled", "later"): shuffled(lambda start, ours=ours: ours.read(start, LENGTH, sample)),
            ("sequential", "first"): lambda swept=swept: sweep(swept.read),
            ("sequential", "later"): lambda swept=swept: sweep(swept.read),
            ("sequential", "memmap"): lambda: sweep(copy),
        }
        for name, one in work.items():
            times.setdefault(name, []).append(seconds(world, one))
        ours.close()
        swept.close()
    amounts = {"shuffled": world.size * len(mine), "sequential": 2 * TOKENS / 2**30}
    for kind, amount in amounts.items():
        rates = {name: amount / statistics.median(times[kind, name]) for name in ("first", "later", "memmap")}
        for name in ("first", "later"):
            case = f"{kind}, {name}"
            result = {
                "benchmark": "hdf5", "case": f"{case}, {world.size} ranks", "peer": "numpy.memmap",
                "ours": round(rates[name], 3), "theirs": round(rates["memmap"], 3),
                "unit": "samples/s" if kind == "shuffled" else "GiB/s",
                **pairs.compared(times[kind, name], times[kind, "memmap"]),
                "goal": round(GOALS[case], 3) if case in GOALS else None,
            }  # fmt: skip
            if world.rank == 0:
                print(json.dumps(result), flush=True)
    share_of_step(world, folder, grown)


def share_of_step(world, folder, grown):
    from hpctrain.config import load_config
    from hpctrain.train.loop import train_step
    from hpctrain.train.session import build

    config = Path(__file__).parents[1] / "jobs/scale.toml"
    overrides = [f"data.path={folder}/data.h5", f"run.out={folder}", f"grid.data={world.size}"]
    session = build(load_config(config, [*overrides, f"train.batch={4 * world.size}", "train.microbatches=4"]), world)
    records = [train_step(session) for _ in range(6)][2:]
    if world.rank == 0:
        result = {
            "benchmark": "hdf5", "case": f"share of a training step, {world.size} ranks",
            "ours": round(statistics.median(r["time"]["reading"] / r["seconds"] for r in records), 5), "goal": 0.01,
            "memory_mib_added_by_reading": round(grown / 2**20, 1), "data_mib": 2 * TOKENS / 2**20,
            "hdf5": h5py.version.hdf5_version, "cores": os.cpu_count(),
        }  # fmt: skip
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
