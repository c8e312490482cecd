"""The end of a program."""

import sys

import pytest

pytestmark = pytest.mark.job

WINDOWS = """
from mpi4py import MPI
import hpctrain as ht
from hpctrain.comm.windows import Window

world = MPI.COMM_WORLD
pair = world.Split(int(world.rank == 2))
first = ht.Grid(tensor=pair.size, comm=pair)
if world.rank < 2:
    Window(first.tensor.x, 8)
every = ht.Grid(tensor=3)
kept = [Window(every.tensor.x, 8)]
first.free()
kept.append(Window(every.tensor.x, 8))  # two ranks give it the handle of the one that was freed
{end}
"""


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("", 0, ""),
        ("if world.rank == 1: raise ValueError('of one rank')\nworld.Barrier()", 1, "ValueError: of one rank"),
        pytest.param(
            "if world.rank == 1: raise SystemExit(3)\nworld.Barrier()",
            3,
            "MPI_ABORT was invoked on rank 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_windows_that_are_left(start, tmp_path, end, status, said):
    """They are freed in one order; a rank that has an error ends the job."""
    script = tmp_path / "windows.py"
    script.write_text(WINDOWS.replace("{end}", end))
    ended = start(3, sys.executable, "-m", "mpi4py", str(script), cold=True).wait()
    assert ended.status == status, ended.output
    assert said in ended.output
