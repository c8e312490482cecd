"""Search at random for what breaks: the tests that Hypothesis draws examples for, with other examples each round.

    python benchmarks/soak.py --minutes 60          all of them, without MPI and on 1, 2, 3 and 4 ranks
    python benchmarks/soak.py --seed 17 --ranks 2   one round again

Prints one JSON object a line: `{"benchmark": "soak", "seed", "ranks", "tests", "seconds", "failed"}`; ends with 1 at
the first failure, after its report.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further round begins (60)")
    parser.add_argument("--seed", type=int, help="of one round alone")
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="0 for tests without MPI")
    options = parser.parse_args()
    start = time.monotonic()
    while True:
        seed = random.randrange(2**31) if options.seed is None else options.seed
        for ranks in options.ranks:
            row, output = one_round(seed, ranks)
            print(json.dumps(row), flush=True)
            if row["failed"]:
                print(output[-8000:], file=sys.stderr)
                return 1
        if options.seed is not None or time.monotonic() - start > 60 * options.minutes:
            return 0


def one_round(seed: int, ranks: int) -> tuple[dict, str]:
    """Every such test once on so many ranks, all of which draw the same examples."""
    tests = ["-m", "pytest", "-q", "--color=no", "-m", "hypothesis", f"--hypothesis-seed={seed}", "tests"]
    command = [sys.executable, *tests]
    if ranks:
        mpirun = str(ROOT / "jobs/mpirun.sh")
        command = [mpirun, "-n", str(ranks), sys.executable, "-m", "mpi4py", *tests, "--only-mpi"]
    start = time.monotonic()
    environment = {**os.environ, "HPCTRAIN_HYPOTHESIS": "soak"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace")
    passed = re.search(r"(\d+) passed", done.stdout)
    failed = done.returncode != 0 or passed is None
    row = {"benchmark": "soak", "seed": seed, "ranks": ranks, "tests": int(passed[1]) if passed else 0}
    return {**row, "seconds": round(time.monotonic() - start, 1), "failed": failed}, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
