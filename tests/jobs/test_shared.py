"""A checkout that one user has set up, and that another may only read: it serves in a folder of that user's own."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from checkout import copy
from running import SMALL

pytestmark = pytest.mark.job

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


@pytest.fixture
def shared():
    """(a copy of the checkout, the home of a user who may only read it); below a folder that everybody can enter."""
    if os.getuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("takes root and setpriv (util-linux), to become another user")
    python = next(filter(serves_others, (sys.executable, "/usr/bin/python3")), None)
    if python is None:
        pytest.skip(f"other users can read neither {sys.executable} nor another Python of its version")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        checkout, home = copy(folder / "checkout", python=python), folder / "home"
        home.mkdir()
        shutil.chown(home, 65534, 65534)
        reads = [*NOBODY, checkout / ".venv/bin/python", "-c", "import torch"]
        if subprocess.run(reads, check=False, capture_output=True).returncode:
            pytest.skip("other users cannot read the packages of this environment")
        yield checkout, home


def serves_others(python):
    script = 'readlink -f "$0" >/dev/null && "$0" -c "import sys; print(*sys.version_info[:2])"'
    done = subprocess.run([*NOBODY, "sh", "-c", script, python], capture_output=True, text=True)
    return done.stdout.split() == [str(number) for number in sys.version_info[:2]]


def contents(folder):
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.slow
def test_another_user(shared):
    checkout, home = shared
    before = contents(checkout)
    (home / "text.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(400)))
    others = ("HPCTRAIN_", "SLURM_", "PYTHON", "VIRTUAL_", "MPIRUN", "XDG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    ours = str(Path(sys.executable).parent)  # whose mpirun is no site's
    kept["PATH"] = ":".join(folder for folder in os.environ["PATH"].split(":") if folder != ours)

    def run(script, **variables):
        return subprocess.run(
            [*NOBODY, "bash", "-c", f"set -euo pipefail\n{script}"], cwd=home, capture_output=True, text=True,
            timeout=120, env={**kept, "HOME": str(home), **variables},
        )  # fmt: skip

    words = " ".join([*SMALL, "grid.data=2", "grid.pipeline=1", "grid.tensor=1", "run.name=mine"])
    done = run(f"""
        source {checkout}/jobs/env.sh
        hpctrain init mine
        cd mine
        source jobs/env.sh
        test "$MPIRUN" = {home}/mine/jobs/mpirun.sh
        $MPIRUN -n 2 hpctrain train jobs/train.toml data.text=../text.txt {words}
        hpctrain report runs/mine
    """)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((home / "mine/runs/mine/metrics.jsonl").read_text().splitlines()) == 3
    assert (home / "mine/runs/mine/report.html").stat().st_uid == 65534
    done = run(f"source {checkout}/jobs/env.sh", HPCTRAIN_EXTRAS="formats")
    assert done.returncode == 1
    assert f"env.sh: {checkout} has no formats packages for this machine" in done.stderr
    assert f"HPCTRAIN_EXTRAS=formats bash {checkout}/jobs/env.sh" in done.stderr
    assert contents(checkout) == before
