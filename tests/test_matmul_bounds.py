"""Lower bounds by hand, and the bytes that Open MPI itself counts."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import warm

from hpctrain.matmul import Agarwal, TwoHalfD, lower_bound

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("m", "k", "n", "ranks", "bound"),
    [
        # one long dim: cut it alone, and fetch the small matrix: 100·10 (1 - 1/4)
        (1000, 100, 10, 4, 750.0),
        (10, 1000, 100, 4, 750.0),
        # two long dims, on ranks between 10 and 1000: 2 sqrt(d1 d2 d3²/P) - (d1 d3 + d2 d3)/P
        (1000, 100, 10, 40, 2 * math.sqrt(1000 * 100 * 100 / 40) - 275),
        (100, 10, 1000, 90, 2 * math.sqrt(1000 * 100 * 100 / 90) - 11000 / 90),
        # a cube of ranks: 3 (n/2)² needed, of which 3 n²/8 are there already
        (64, 64, 64, 8, 3 * 32**2 - 3 * 64**2 / 8),
        (90, 60, 30, 48, 3 * (90 * 60 * 30 / 48) ** (2 / 3) - (5400 + 2700 + 1800) / 48),
        (7, 5, 3, 1, 0.0),
    ],
)
def test_lower_bound(m, k, n, ranks, bound):
    assert lower_bound(m, k, n, ranks) == pytest.approx(bound, rel=1e-12, abs=1e-9)


def test_regimes_meet():
    """The bound is continuous in the ranks where one regime ends: at d1/d2 and at d1 d2/d3²."""
    for ranks in (10, 1000):
        at, above = lower_bound(1000, 100, 10, ranks), lower_bound(1000, 100, 10, ranks + 1)
        assert abs(above - at) < 0.1 * at


def test_lower_bound_with_memory():
    # n³ / (2 sqrt(2) P sqrt(M)) - M = 2^30 / (2^1.5 · 2^3 · 2^5) - 2^10
    assert lower_bound(1024, 1024, 1024, 8, memory=1024) == pytest.approx(2**20.5 - 1024, rel=1e-12)
    # much memory: what the ranks need however much there is
    assert lower_bound(64, 64, 64, 8, memory=1e6) == lower_bound(64, 64, 64, 8)
    with pytest.raises(ValueError, match="memory must be more than 0, got 0"):
        lower_bound(64, 64, 64, 8, memory=0)


def test_lower_bound_refuses_nothing():
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        lower_bound(1, 1, 1, 0)


def on(algorithm, *shape):
    mm = algorithm.__new__(algorithm)
    mm.shape = shape
    return mm


@pytest.mark.parametrize("algorithm", [Agarwal, TwoHalfD])
def test_a_cube_meets_the_bound(algorithm):
    assert on(algorithm, 2, 2, 2).volume(512, 512, 512) / lower_bound(512, 512, 512, 8) == 1.0


# grid; matrices; forward and backward of TwoHalfD in the elements that Agarwal's product moves there
@pytest.mark.parametrize(
    ("shape", "sizes", "forward", "backward"),
    [
        ((1, 1, 4), (64, 64, 64), 1, 1 / 2),
        ((2, 2, 2), (64, 64, 64), 1, 1),
        ((2, 2, 2), (64, 128, 32), 1, 1),
        ((2, 2, 4), (64, 32, 32), 1, 3 / 4),
        ((3, 3, 2), (64, 64, 64), 1, 9 / 8),
        ((1, 1, 4), (64, 64, 128), 2, 1),
        ((1, 1, 4), (64, 128, 64), 1 / 2, 1 / 4),
    ],
)
def test_two_half_d_beside_agarwal(shape, sizes, forward, backward):
    lean, other = on(TwoHalfD, *shape), on(Agarwal, *shape)
    assert lean.volume(*sizes) == pytest.approx(forward * other.volume(*sizes), rel=1e-12)
    assert lean.volume_backward(*sizes) == pytest.approx(backward * other.volume_backward(*sizes), rel=1e-12)


PROGRAM = """
import sys
import torch
import hpctrain as ht

volume, kept = 0, []  # ranks agree on the grids that are gone when they make the next one
for algorithm, box in (("Cannon", (2, 2, 1)), ("Summa", (2, 2, 1)), ("Summa", (1, 4, 1)), ("TwoHalfD", (1, 1, 4)),
                       ("Agarwal", (2, 2, 1)), ("Agarwal", (1, 1, 4))):
    grid = ht.Grid(tensor=box)
    for axis in (grid.tensor.x, grid.tensor.y, grid.tensor.z):
        axis.one_node = False
    mm = getattr(ht.matmul, algorithm)(grid.tensor)
    kept.append(grid)
    a = mm.scatter_a(torch.ones(96, 64)).requires_grad_()
    b = mm.scatter_b(torch.ones(64, 32)).requires_grad_()
    for _ in range(int(sys.argv[1])):
        mm(a, b).sum().backward()
    volume += mm.volume(96, 64, 32) + mm.volume_backward(96, 64, 32)
if grid.rank == 0:
    print("volume", volume)
"""


@pytest.mark.job
def test_open_mpi_counts_the_same_bytes(tmp_path):
    """Sent and received by each rank, by Open MPI's own count of every message: with the products, less without."""
    (tmp_path / "program.py").write_text(PROGRAM)
    without, counted = monitored(tmp_path, 0), monitored(tmp_path, 1)
    for direction in ("sent", "received"):
        moved = [b - a for a, b in zip(without[direction], counted[direction])]
        assert moved == [4 * counted["volume"]] * 4, direction


def monitored(folder, count):
    launcher = os.environ.get("MPIRUN", str(ROOT / "jobs/mpirun.sh"))
    out = folder / str(count)
    out.mkdir()
    version = subprocess.run([launcher, "--version"], cwd=ROOT, capture_output=True, text=True)
    if "Open MPI" not in version.stdout:
        pytest.skip("pml_monitoring is Open MPI's own, and this MPI is another")
    settings = {
        "pml": "^ucx",  # a named one would shut the monitoring layer out
        "pml_monitoring_enable": "2",
        "pml_monitoring_enable_output": "3",
        "pml_monitoring_filename": str(out / "rank"),
    }
    options = [word for name, value in settings.items() for word in ("--mca", name, value)]
    program = [sys.executable, "-m", "mpi4py", str(folder / "program.py"), str(count)]
    command = warm([launcher, "-n", "4", *options, *program])
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]
    sent, received = [0] * 4, [0] * 4
    for profile in out.iterdir():
        for source, dest, size in re.findall(r"^[EI]\t(\d+)\t(\d+)\t(\d+) bytes", profile.read_text(), re.MULTILINE):
            sent[int(source)] += int(size)
            received[int(dest)] += int(size)
    return {"sent": sent, "received": received, "volume": float(re.search(r"volume (\S+)", ended.stdout)[1])}
