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

SEQUENCE_LINES = ["model = ht.parallelize(model, ht.Grid(data=(1, 2, 2)))\n", "    ht.sync_gradients(model)\n"]


def output_of(command, limit):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.job
@pytest.mark.parametrize("script", SCRIPTS, ids=["digits", "gpt2"])
def test_losses_with_the_line_and_without(script, tmp_path):
    assert len([line for line in script.splitlines() if line]) < 20
    expected, got = both(script, [LINE], tmp_path)
    assert sorted(got) == sorted(expected * 4)


@pytest.mark.job
def test_sequences_that_four_ranks_share(tmp_path):
    (script,) = re.findall(rf"```python\n([^`]*{re.escape(SEQUENCE_LINES[0])}[^`]*)```", TEXTS[1])
    expected, got = both(script, SEQUENCE_LINES, tmp_path)
    assert len(got) == 4 * len(expected)
    for line in got:
        assert float(line.split()[-1]) == pytest.approx(
            float(expected[int(line.split()[1][:-1])].split()[-1]), abs=3e-4
        )


def both(script, lines, tmp_path):
    """What the script prints on one rank without these lines, and on four with them."""
    with_lines, without = tmp_path / "with.py", tmp_path / "without.py"
    with_lines.write_text(script)
    for line in lines:
        assert script.count(line) == 1
        script = script.replace(line, "")
    without.write_text(script)
    launcher = os.environ.get("MPIRUN", f"{shutil.which('mpirun')} --map-by :OVERSUBSCRIBE --bind-to none").split()
    expected = output_of(warm([sys.executable, str(without)]), 120).splitlines()
    got = output_of(warm([*launcher, "-n", "4", sys.executable, "-m", "mpi4py", str(with_lines)]), 240).splitlines()
    assert len(expected) == 10
    assert float(expected[-1].split()[-1]) < 0.8 * float(expected[0].split()[-1])
    return expected, got


IMPORTS = """
import sys, time
start = time.process_time()
import torch
ready, others, calls = time.process_time(), {*sys.modules}, 0

def count(frame, event, argument):
    global calls
    calls += event == "call"

sys.setprofile(count)
import hpctrain, hpctrain.layers
hpctrain.parallelize
sys.setprofile(None)
print(calls, (time.process_time() - ready) / (ready - start), *sorted({*sys.modules} - others))
"""


def test_importing_layers_starts_no_mpi_and_is_quick():
    """A third of a second of one core, whatever else the machine does: few calls of functions, and no other packages;
    what takes long in one call is compared with importing torch."""
    from hpctrain import layers, parallelize  # noqa: F401 - bytecode is there after it

    calls, part, *modules = output_of([sys.executable, "-c", IMPORTS], 120).split()
    assert "hpctrain.layers" in modules
    assert {name.split(".")[0] for name in modules} <= {"hpctrain", "torch", *sys.stdlib_module_names}
    assert sum(name.startswith("torch.") for name in modules) < 10
    assert int(calls) < 30_000
    assert float(part) < 1
