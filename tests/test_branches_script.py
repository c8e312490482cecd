"""The network of branches of hpctrain/pipeline/README.md prints the same digits on every number of ranks."""

import os
import re
import shutil
import sys

import pytest
from running import warm
from test_parallelize_scripts import ROOT, output_of

TEXT = (ROOT / "hpctrain/pipeline/README.md").read_text(encoding="utf-8")
(SCRIPT,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.job
def test_losses_on_one_two_and_four_ranks(tmp_path):
    assert len([line for line in SCRIPT.splitlines() if line]) <= 30
    launcher = os.environ.get("MPIRUN", f"{shutil.which('mpirun')} --map-by :OVERSUBSCRIBE --bind-to none").split()
    printed = {}
    for ranks in (1, 2, 4):
        file = tmp_path / f"on_{ranks}.py"
        file.write_text(SCRIPT.replace("pipeline=4", f"pipeline={ranks}"))
        printed[ranks] = output_of(warm([*launcher, "-n", str(ranks), sys.executable, "-m", "mpi4py", str(file)]), 240)
    lines = printed[1].splitlines()
    assert len(lines) == 10
    assert float(lines[-1].split()[-1]) < 0.98 * float(lines[0].split()[-1])
    assert printed[1] == printed[2] == printed[4]
