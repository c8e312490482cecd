"""The main job with steps of two seconds, stopped by signals at random moments: status 85, the last completed step
saved, and after going on the losses of an undisturbed run, to the bit. `benchmarks/stops.py` does all kinds, often."""

import json
import subprocess
import sys

import pytest
from running import ROOT

pytestmark = pytest.mark.job


def test_stops(tmp_path):
    kinds = "INT:group,TERM:mpirun,HUP:rank"
    command = [sys.executable, "benchmarks/stops.py", "--moments", "1", "--kinds", kinds]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(told) == 6
    for stop, finished in zip(told[::2], told[1::2]):
        assert f"{stop['signal']}:{stop['to']}" in kinds
        assert (stop["status"], stop["saved"]) == (85, stop["last_step"])
        assert stop["last_step"] >= 1
        assert finished["same"]
