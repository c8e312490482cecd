"""Scripts with the one line added, under mpirun, print what they print without it; and what importing costs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINE = "model = ht.parallelize(model, ht.Grid(tensor=4))\n"

DIGITS = """\
import torch
from sklearn.datasets import load_digits
from torch import nn
import hpctrain as ht

class Residual(nn.Sequential):
    def forward(self, x):
        return torch.relu(x + super().forward(x))

torch.manual_seed(0)
x, y = map(torch.from_numpy, load_digits(return_X_y=True))
model = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
    Residual(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)), nn.Flatten(), nn.Linear(576, 10)).double()
model = ht.parallelize(model, ht.Grid(tensor=4))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    loss = nn.functional.cross_entropy(model(x[step::30]), y[step::30])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss:.9f}")
"""

GPT2 = """\
import torch
from transformers import GPT2Config, GPT2LMHeadModel
import hpctrain as ht

torch.manual_seed(0)
text = torch.tensor(list(open(torch.__file__, "rb").read()))  # one token a byte
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).double()
model = ht.parallelize(model, ht.Grid(tensor=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
for step in range(10):
    ids = torch.stack([text[i : i + 64] for i in torch.randint(len(text) - 64, (8,))])
    loss = model(ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss:.9f}")
"""


def output_of(command, limit):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.job
@pytest.mark.parametrize("script", [DIGITS, GPT2], ids=["digits", "gpt2"])
def test_losses_with_the_line_and_without(script, tmp_path):
    assert script.count(LINE) == 1
    assert len([line for line in script.splitlines() if line]) < 20
    with_line, without = tmp_path / "with.py", tmp_path / "without.py"
    with_line.write_text(script)
    without.write_text(script.replace(LINE, ""))
    launcher = os.environ.get("MPIRUN", f"{shutil.which('mpirun')} --map-by :OVERSUBSCRIBE --bind-to none").split()
    expected = output_of([sys.executable, str(without)], 120).splitlines()
    got = output_of([*launcher, "-n", "4", sys.executable, "-m", "mpi4py", str(with_line)], 240).splitlines()
    assert len(expected) == 10
    assert float(expected[-1].split()[-1]) < 0.8 * float(expected[0].split()[-1])
    assert sorted(got) == sorted(expected * 4)


def test_importing_layers_starts_no_mpi_and_is_quick():
    program = (
        "import sys, time, torch; start = time.perf_counter(); import hpctrain, hpctrain.layers; hpctrain.parallelize;"
        "print(time.perf_counter() - start); assert not any(name.startswith('mpi4py') for name in sys.modules)"
    )
    assert min(float(output_of([sys.executable, "-c", program], 60)) for _ in range(3)) < 0.3
