"""The ledger's bytes are those that leave each rank, counted by Open MPI's own monitoring beneath all calls."""

import collections
import subprocess
import sys

import pytest
from running import ROOT

# Everything that comm sends in messages of its own, then training steps by them, data parallel and in a pipeline.
PROGRAM = """
import torch
from traffic_checks import EVEN, counted

from hpctrain import Grid, comm
from hpctrain.comm import circulant

grid = Grid(tensor=4)
line, sent = grid.tensor.x, 0
for algorithm in ("naive", "ring", "direct", "rabenseifner"):
    comm.choose_all_reduce(line, algorithm)
    comm.all_reduce(torch.ones(1001), line)
    comm.all_reduce_start(torch.ones(1001, dtype=torch.bfloat16), line).wait()
counts = (1, 4, 0, 2)
mine = torch.ones(counts[line.rank], 5)
comm.all_gather_start(mine, line, counts).wait()
comm.reduce_scatter_start(torch.ones(7, 5), line, counts).wait()
comm.reduce_scatter(torch.ones(7, 50_000), line, counts)
comm.all_to_all(torch.ones(8, 3), line)
comm.scatter(comm.gather(mine, line, counts), line, counts)
comm.send_start(torch.ones(9), line, (line.rank + 1) % 4)
comm.recv(torch.ones(9), line, (line.rank - 1) % 4)
circulant.RANKS = 2  # small blocks as on many ranks
counts = (2, 2, 1, 1)
comm.all_gather_start(torch.ones(counts[line.rank], 5), line, counts).wait()
comm.reduce_scatter_start(torch.ones(6, 5, dtype=torch.bfloat16), line, counts).wait()
comm.all_to_all(torch.ones(8, 3), line)
circulant.RANKS = 16
sent += grid.transport.traffic.total("sent")
for shape in ((4, 1, 1), (2, 2, 1)):
    grid = Grid(*shape)
    for axis in grid.axes():
        comm.choose_all_reduce(axis, "ring")
    sent += sum(counted(grid, EVEN, batch=16, order=2)[1].values())
print(f"ledger {line.rank} {sent} ;", flush=True)
"""


@pytest.mark.slow
def test_the_ledger_is_what_leaves_a_rank(start, tmp_path):
    """Four ranks, to the byte, each; what MPI sends of its own, as for Python objects, is listed apart by it."""
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in version:
        pytest.skip("the messages are counted by Open MPI")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monitoring = {"enable": "2", "enable_output": "3", "filename": str(tmp_path / "count")}
    options = [word for name, value in monitoring.items() for word in ("--mca", f"pml_monitoring_{name}", value)]
    command = ["--mca", "pml", "^ucx", *options, sys.executable, str(program)]
    ended = start(4, *command, PYTHONPATH=str(ROOT / "tests")).wait()
    assert ended.status == 0, ended.output
    told = [line.split() for line in ended.output.split("\n") if line.startswith("ledger")]
    left = collections.Counter()
    for path in tmp_path.glob("count.*.prof"):
        for words in map(str.split, path.read_text().splitlines()):
            if words[:1] == ["E"]:
                left[int(words[1])] += int(words[3])
    assert {int(rank): int(sent) for _, rank, sent, _ in told} == dict(left)
    assert len(left) == 4
