"""Part of ten_thousand.py: what it costs a rank to open packed data of 1,000 shards, and to read from all of them.

System calls are those that strace sees of one rank, for rank 0, rank 1 and the last; the others are a stand-in for a
communicator, which counts what goes over it.
"""

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

from hpctrain.data import ShardedTokens, pack

SHARDS = 1_000
PER_SHARD = 512  # tokens; more than one place of the digest has
MARK = "/next-rank"  # no file


class StandIn:
    """One rank of many, which all do well. `sent` is what this rank gives to a collective, or gets of one, in bytes."""

    def __init__(self, rank, size, index):
        self.rank, self.size, self.index, self.calls, self.sent = rank, size, index, 0, 0

    def bcast(self, value):
        value = self.index if value is None else value
        return self._counted(value)

    def allgather(self, value):
        return [self._counted(value)] * self.size

    def gather(self, value):
        self._counted(value)
        return [value] if self.rank == 0 else None

    def _counted(self, value):
        self.calls += 1
        self.sent += len(pickle.dumps(value))
        return value


def start(folder: Path, rank: int, ranks: int) -> tuple[ShardedTokens, StandIn]:
    """What `hpctrain train` does with its data, on one rank."""
    comm = StandIn(rank, ranks, pickle.loads((folder / "index.pickle").read_bytes()))
    tokens = ShardedTokens(folder / "data.h5", comm=comm)
    tokens.digest(comm)
    return tokens, comm


def one_rank(folder: Path, rank: int, ranks: int) -> dict:
    """Without the system calls."""
    tracemalloc.start()
    before, most = len(os.listdir("/proc/self/fd")), 0
    tokens, comm = start(folder, rank, ranks)
    opened = tracemalloc.get_traced_memory()[0]
    for place in range(0, tokens.tokens - 1, PER_SHARD):
        tokens.read(place, 1)
        most = max(most, len(os.listdir("/proc/self/fd")) - before)
    memory = tracemalloc.get_traced_memory()[0]
    return {"calls": comm.calls, "sent": comm.sent, "memory": opened, "files": most, "all": memory}


def stats(folder: Path, which: tuple[int, ...], ranks: int) -> list[int]:
    """How often each of these ranks asks the file system for a file of the data, by its name or by an open file. One
    program does what they do, one after the other, and asks for a mark before each."""
    log = folder / "strace.log"
    command = [sys.executable, __file__, str(folder), str(ranks), *map(str, which)]
    calls = "trace=%stat,%lstat,%fstat,statx,newfstatat,access,faccessat,faccessat2"
    subprocess.run(["strace", "-f", "-y", "-o", log, "-e", calls, *command], check=True, stdout=subprocess.DEVNULL)
    _, *each = log.read_text(errors="replace").split(MARK)
    assert len(each) == len(which), f"strace saw {len(each)} of {len(which)} marks"
    return [sum(bool(re.search(r"/data[^/]*\.h5[\">]", line)) for line in part.splitlines()) for part in each]


def rows(ranks):
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        folder = Path(name)
        (folder / "text.txt").write_bytes(b"a" * (SHARDS * PER_SHARD - 1))
        pack([str(folder / "text.txt")], folder / "data.h5", shard_tokens=PER_SHARD)
        tokens = ShardedTokens(folder / "data.h5")
        (folder / "index.pickle").write_bytes(pickle.dumps((tokens._index, tokens.tokenizer_digest)))
        each = (0, 1, ranks - 1)
        looked = max(stats(folder, each, ranks))
        code = f"import ten_thousand_start as t, json; print(json.dumps(t.one_rank(t.Path({name!r}), 1, {ranks})))"
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, check=True, capture_output=True, text=True
        )
        measured = json.loads(ran.stdout)
    case = f"data of {SHARDS} shards, "
    return [
        {"case": case + "stats of files at start", "value": looked, "unit": "calls", "limit": 20},
        {"case": case + "collectives at start", "value": measured["calls"], "unit": "calls", "limit": 8},
        {"case": case + "sent and received at start", "value": measured["sent"], "unit": "bytes", "limit": 1 << 20},
        {"case": case + "memory after the start", "value": measured["memory"], "unit": "bytes", "limit": 4 << 20},
        {
            "case": case + "files open at once when all are read",
            "value": measured["files"],
            "unit": "files",
            "limit": 33,
        },
        {"case": case + "memory when all were read", "value": measured["all"], "unit": "bytes", "limit": 10 << 20},
    ]


if __name__ == "__main__":
    for each in sys.argv[3:]:
        os.path.exists(MARK)
        start(Path(sys.argv[1]), int(each), int(sys.argv[2]))
