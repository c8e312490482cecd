"""The programs of hpctrain/pipeline/README.md: the network of branches prints the same digits on every number of ranks;
the recurrent one learns."""

import os
import re
import shutil
import sys

import pytest
from running import warm
from test_parallelize_scripts import ROOT, output_of

TEXT = (ROOT / "hpctrain/pipeline/README.md").read_text(encoding="utf-8")
SCRIPT, RECURRENT = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def run(script, ranks, folder):
    launcher = os.environ.get("MPIRUN", f"{shutil.which('mpirun')} --map-by :OVERSUBSCRIBE --bind-to none").split()
    file = folder / f"on_{ranks}.py"
    file.write_text(script)
    return output_of(warm([*launcher, "-n", str(ranks), sys.executable, "-m", "mpi4py", str(file)]), 240)


@pytest.mark.job
def test_losses_on_one_two_and_four_ranks(tmp_path):
    assert len([line for line in SCRIPT.splitlines() if line]) <= 30
    printed = {}
    for ranks in (1, 2, 4):
        printed[ranks] = run(SCRIPT.replace("pipeline=4", f"pipeline={ranks}"), ranks, tmp_path)
    lines = printed[1].splitlines()
    assert len(lines) == 10
    assert float(lines[-1].split()[-1]) < 0.98 * float(lines[0].split()[-1])
    assert printed[1] == printed[2] == printed[4]


@pytest.mark.job
def test_the_recurrent_network_learns(tmp_path):
    losses = [float(line.split()[-1]) for line in run(RECURRENT, 2, tmp_path).splitlines()]
    assert len(losses) == 10
    assert losses[-1] < 0.5 * losses[0]
