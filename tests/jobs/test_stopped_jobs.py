"""The main job with steps of two seconds, stopped by signals at random moments: status 85, the last completed step
saved, and after going on the losses of an undisturbed run, to the bit. `benchmarks/stops.py` does all kinds, often."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.job


def test_stops(warm_checkout):
    kinds = "INT:group,TERM:mpirun,HUP:rank"
    command = [sys.executable, "benchmarks/stops.py", "--moments", "1", "--one-run", "--kinds", kinds]
    ended = subprocess.run(command, cwd=warm_checkout, capture_output=True, text=True, timeout=220)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *stops, finished = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [f"{stop['signal']}:{stop['to']}" for stop in stops] == kinds.split(",")
    steps = [stop["last_step"] for stop in stops]
    assert [(stop["status"], stop["saved"]) for stop in stops] == [(85, step) for step in steps]
    assert steps[0] >= 1
    assert steps == sorted(set(steps))
    assert finished["same"]
