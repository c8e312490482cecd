"""The READMEs' scripts with the one line added print what they print without it; and what importing costs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from running import warm

ROOT = Path(__file__).parents[1]
LINE = "model = ht.parallelize(model, ht.Grid(tensor=4))\n"

TEXTS = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "hpctrain/convert/README.md")]
SCRIPTS = [block for text in TEXTS for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if LINE in block]


def output_of(command, limit):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.job
@pytest.mark.parametrize("script", SCRIPTS, ids=["digits", "gpt2"])
def test_losses_with_the_line_and_without(script, tmp_path):
    assert script.count(LINE) == 1
    assert len([line for line in script.splitlines() if line]) < 20
    with_line, without = tmp_path / "with.py", tmp_path / "without.py"
    with_line.write_text(script)
    without.write_text(script.replace(LINE, ""))
    launcher = os.environ.get("MPIRUN", f"{shutil.which('mpirun')} --map-by :OVERSUBSCRIBE --bind-to none").split()
    expected = output_of(warm([sys.executable, str(without)]), 120).splitlines()
    got = output_of(warm([*launcher, "-n", "4", sys.executable, "-m", "mpi4py", str(with_line)]), 240).splitlines()
    assert len(expected) == 10
    assert float(expected[-1].split()[-1]) < 0.8 * float(expected[0].split()[-1])
    assert sorted(got) == sorted(expected * 4)


def test_importing_layers_starts_no_mpi_and_is_quick():
    program = (
        "import sys, time, torch; start = time.process_time(); import hpctrain, hpctrain.layers; hpctrain.parallelize;"
        "print(time.process_time() - start); assert not any(name.startswith('mpi4py') for name in sys.modules)"
    )
    assert min(float(output_of([sys.executable, "-c", program], 60)) for _ in range(3)) < 0.3
