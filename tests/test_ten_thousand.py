"""What 10,000 ranks would cost the busiest of them stays below its limits."""

import json
import subprocess
import sys

import pytest
from running import ROOT, warm

PARTS = sorted(path.stem.removeprefix("ten_thousand_") for path in (ROOT / "benchmarks").glob("ten_thousand_*.py"))
RANKS = {"checkpoint": 1_000}  # a save and a resume of 10,000 take minutes: by the command


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_below_the_limits(part):
    ranks = RANKS.get(part, 10_000)
    command = warm([sys.executable, "benchmarks/ten_thousand.py", "--parts", part, "--ranks", str(ranks)])
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=460)
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    above = [row for row in rows if row["limit"] is not None and row["value"] > row["limit"]]
    assert (ended.returncode, above) == (0, []), ended.stderr
    assert {row["ranks"] for row in rows} == {ranks}
    assert any(row["limit"] is not None for row in rows)
