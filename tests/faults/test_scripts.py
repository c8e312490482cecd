"""Scripts of one's own: where some ranks call the model and others do not, the job ends, and says where."""

import re
import sys

import pytest

CALLED_ON_ONE_RANK = """
import time, torch, hpctrain as ht
torch.manual_seed(0)
model = ht.parallelize(torch.nn.Linear(2, 2), ht.Grid(tensor=2), check_steps=STEPS)
if model.hpctrain_grid.rank == 0:
    model(torch.ones(1, 2))
else:
    time.sleep(60)
"""


@pytest.mark.parametrize("check_steps", [0, 3])
def test_a_model_called_on_one_rank_ends_the_job(start, tmp_path, check_steps):
    """No watchdog was asked for: scripts of one's own have one."""
    script = tmp_path / "script.py"
    script.write_text(CALLED_ON_ONE_RANK.replace("STEPS", str(check_steps)))
    ended = start(2, sys.executable, "-m", "mpi4py", str(script), HPCTRAIN_WATCHDOG="1.5").wait(50)
    assert ended.status != 0
    told = r"hpctrain: rank 0 of 2 \(.*\) is stuck: .* along x\+y\+z has taken \d+ s, it waits for rank 1 \("
    assert re.search(told, ended.output)


STEP_ON_ONE_RANK = """
import time, torch, hpctrain as ht
grid = ht.Grid(data=2)
model, tokens = ht.layers.Linear(grid, 2, 2, to="inner", key=ht.RngKey(0)), ht.layers.Tokens.of(grid, 1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
trainer = ht.Trainer(model, grid, optimizer, loss=lambda model, x: model(x, tokens).sum())
if grid.rank == 0:
    trainer.step([torch.ones(1, 2)])
else:
    time.sleep(60)
"""


def test_a_step_of_one_rank_ends_the_job(start, tmp_path):
    """Of a model of ht.layers, which nobody parallelized: the Trainer has the watchdog."""
    script = tmp_path / "script.py"
    script.write_text(STEP_ON_ONE_RANK)
    ended = start(2, sys.executable, "-m", "mpi4py", str(script), HPCTRAIN_WATCHDOG="1.5").wait(50)
    assert ended.status != 0
    assert re.search(r"rank 0 of 2 \(.*\) is stuck: .* along data has taken \d+ s, it waits for rank 1", ended.output)


def test_watchdog_of_no_number(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CALLED_ON_ONE_RANK.replace("STEPS", "3"))
    ended = start(2, sys.executable, "-m", "mpi4py", str(script), HPCTRAIN_WATCHDOG="ten").wait(50)
    told = "ValueError: HPCTRAIN_WATCHDOG must be a number of seconds, or 0 for no watchdog, got 'ten'"
    assert ended.status != 0
    assert told in ended.output


KILLED_DURING_DISPATCH = """
import os, signal, torch, hpctrain as ht
from hpctrain.layers.experts.dispatch_choice import InPlace, Once
grid = ht.Grid(data=2, expert=2)
layer = ht.layers.Mixture(grid, 8, 8, experts=4, top_k=2, dispatch="WAY", key=ht.RngKey(0))
tokens = ht.layers.Tokens.of(grid, 2, 4, first=2 * grid.rank)
for step in range(5):
    if step == 2 and grid.rank == 1:  # the rows have come, the results are waited for
        KIND.to_tokens = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    layer(torch.ones(8, 8), tokens).sum().backward()
    print("rank", grid.rank, "did step", step, flush=True)
"""


@pytest.mark.parametrize("way", ["all_to_all", "once"])
def test_a_rank_killed_while_tokens_are_at_their_experts_ends_the_job(start, tmp_path, way):
    script = tmp_path / "script.py"
    kind = {"all_to_all": "InPlace", "once": "Once"}[way]
    script.write_text(KILLED_DURING_DISPATCH.replace("KIND", kind).replace("WAY", way))
    ended = start(2, sys.executable, "-m", "mpi4py", str(script)).wait(50)
    assert ended.status != 0
    assert "rank 0 did step 1" in ended.output
    assert "did step 2" not in ended.output
