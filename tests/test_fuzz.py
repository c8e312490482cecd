"""Damaged files of each format that is read are refused by name or read right: the start of benchmarks/fuzz.py."""

import json
import subprocess
import sys

import pytest
from running import ROOT, warm

NUMBER = 30  # of each format, over 300 in all; benchmarks/fuzz.py does 10,000 of each


@pytest.mark.slow
def test_damaged_files():
    command = warm([sys.executable, "benchmarks/fuzz.py", "--number", str(NUMBER)])
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    counts = {row["format"]: row for row in map(json.loads, ended.stdout.splitlines())}
    assert {
        "index",
        "shard",
        "packed bytes",
        "packed metadata",
        "packed over",
        "hugging face",
        "tokenizer",
        "toml",
    } <= set(counts)
    for row in counts.values():
        assert row.get("refused", 0) + row.get("read", 0) == NUMBER, row
    assert all(counts[name]["refused"] > NUMBER / 3 for name in ("index", "shard", "hugging face", "tokenizer", "toml"))
