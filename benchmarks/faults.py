"""Kill a rank, or mpirun, of a training job at a random moment, resume it, and compare every loss with a run that
nothing happened to.

    python benchmarks/faults.py --seeds 50          about 12 minutes on 2 cores

Prints one JSON object a seed: who was killed after how many seconds, from which step the job went on, and whether all
losses are the same to the bit. Exits with 1 when any differs.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = [
    "model.layers=2", "model.width=8", "model.heads=2", "model.context=8", "model.dropout=0.1", "train.batch=4",
    "train.warmup=2", "run.steps=200", "run.eval_batches=1", "run.checkpoint_every=10", "grid.data=2",
]  # fmt: skip


def start(folder, name, *more):
    launcher = os.environ.get("MPIRUN", str(ROOT / "jobs/mpirun.sh"))
    command = [
        launcher,
        "-n",
        "2",
        "hpctrain",
        "train",
        str(folder / "config.toml"),
        *SETTINGS,
        f"run.name={name}",
        *more,
    ]
    log = (folder / f"{name}.log").open("a")
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def losses(folder, name):
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_step(folder, name, job):
    """Until the job has taken a step."""
    path = folder / name / "metrics.jsonl"
    while job.poll() is None and not (path.exists() and path.stat().st_size):
        time.sleep(0.01)


def wait_for_end(folder, name):
    """Until the last process of a killed job is gone."""
    for lease in folder.glob(f".{name}.lease.*"):
        while Path(f"/proc/{json.loads(lease.read_text())['pid']}").exists():
            time.sleep(0.05)


def kill_and_resume(folder, seed):
    generator, name = random.Random(seed), f"seed-{seed}"
    job = start(folder, name)
    wait_for_step(folder, name, job)
    after = generator.uniform(0, 2)
    time.sleep(after)
    ranks = [rank for mpirun in children(job.pid) for rank in children(mpirun)] if job.poll() is None else []
    who = generator.choice(["mpirun", *(f"rank {number}" for number in range(len(ranks)))])
    victim = job.pid if who == "mpirun" else ranks[int(who.split()[1])]
    if job.poll() is None:
        os.kill(victim, signal.SIGKILL)
    status = job.wait(60)
    wait_for_end(folder, name)
    resumed = start(folder, name, "--resume=auto").wait(120)
    steps = re.findall(r"resumed after step (\d+)", (folder / f"{name}.log").read_text())
    return {
        "killed": who,
        "after": round(after, 3),
        "status": status,
        "resumed": resumed,
        "from": int(steps[-1]) if steps else 0,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=50, help="how many")
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(400)))
        (folder / "config.toml").write_text(
            f'[run]\nout = "{folder}"\n[data]\npath = "{folder}/data.h5"\ntext = ["{folder}/text.txt"]\n'
        )
        if start(folder, "whole").wait(120):
            sys.exit((folder / "whole.log").read_text())
        whole = losses(folder, "whole")
        for seed in range(options.first, options.first + options.seeds):
            told = kill_and_resume(folder, seed)
            same = told["resumed"] == 0 and losses(folder, f"seed-{seed}") == whole
            failed += not same
            print(
                json.dumps({"benchmark": "faults", "seed": seed, **told, "steps": len(whole), "same": same}), flush=True
            )
            if not same:
                print((folder / f"seed-{seed}.log").read_text(), file=sys.stderr)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
