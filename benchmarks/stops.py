"""Stop a training of slow steps at random moments, by every signal and at every process of it, resume it each time, and
compare every loss with a run that nothing happened to.

    python benchmarks/stops.py --moments 20                        all kinds: some 2 hours on 2 cores
    python benchmarks/stops.py --moments 1 --kinds TERM:script,INT:group,HUP:mpirun
    python benchmarks/stops.py --moments 1 --kinds TERM:script,INT:group,HUP:mpirun --one-run    a minute less

Each kind is a signal and whom it is sent to: `script` (bash jobs/train.sbatch), `group` (its process group), `mpirun`,
`rank`, `timeout` (which runs the script), `scancel` (TERM; where a Slurm answers). One run a kind, or one in all, is
stopped at so many moments, in the steps and between, then finished. Prints one JSON object a stop: the status, the last
step in the metrics, the newest checkpoint; and one a run: whether all losses are the same to the bit. Exits with 1 if
anything is not as it must be: status 85 (of a cancelled job: CANCELLED), the last step saved, the losses the same.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = [
    "model.layers=2", "model.width=8", "model.heads=2", "model.context=8", "model.dropout=0.1", "train.batch=4",
    "train.warmup=2", "run.eval_batches=2", "run.eval_every=5", "run.sample=0", "grid.data=2", "grid.pipeline=1",
    "grid.tensor=1", "train.microbatches=1",
]  # fmt: skip
KINDS = [f"{name}:{whom}" for whom in ("script", "group", "mpirun", "rank") for name in ("INT", "TERM", "HUP", "USR1")]
KINDS += ["TERM:timeout", "INT:timeout", "TERM:scancel"]
# found by the ranks' Python on its path before anything else: a step of the wanted seconds
SLOW = """
import os, sys, time
if os.environ.get("STEP_SECONDS") and "train" in sys.orig_argv:
    from hpctrain.train.trainer import Trainer
    step = Trainer.forward_backward
    def slowly(*arguments):
        end = time.monotonic() + float(os.environ["STEP_SECONDS"])
        while time.monotonic() < end:
            time.sleep(0.02)
        return step(*arguments)
    Trainer.forward_backward = slowly
"""


def command(folder, name, steps):
    script = ["bash", str(ROOT / "jobs/train.sbatch"), str(folder / "config.toml"), *SETTINGS]
    return [*script, f"run.name={name}", f"run.steps={steps}", "--resume=auto"]


def start(folder, name, steps, seconds=0.0, before=()):
    environment = {**os.environ, "PYTHONPATH": str(folder / "slow"), "STEP_SECONDS": str(seconds or "")}
    log = (folder / f"{name}.log").open("w")
    return subprocess.Popen(
        [*before, *command(folder, name, steps)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        env=environment, start_new_session=True,
    )  # fmt: skip


def records(folder, name):
    path = folder / name / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def losses(folder, name):
    return [(r["step"], r["loss"], r["grad_norm"], r.get("val_loss")) for r in records(folder, name)]


def newest(folder, name):
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in (folder / name / "checkpoints").glob("step-*"))
    return max((int(match[1]) for match in found if match), default=None)


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_step(folder, name, before, ended):
    while len(records(folder, name)) <= before:
        if ended():
            sys.exit(f"the job ended by itself:\n{(folder / f'{name}.log').read_text()}")
        time.sleep(0.05)


def stop(folder, name, kind, generator, options):
    """One job, started, stopped in its steps, and ended: (moment in seconds, its status)."""
    number, whom = kind.split(":")
    number = getattr(signal, f"SIG{number}")
    before, moment = len(records(folder, name)), generator.uniform(0, 2 * options.seconds)
    if whom == "scancel":
        return moment, cancelled(folder, name, before, moment, options)
    if whom == "timeout":  # counts from the start, which takes seconds of its own
        moment += 10 + 2 * options.seconds
        by = ["timeout", f"--signal={number.name}", f"{moment:.2f}"]
        job = start(folder, name, options.steps, options.seconds, by)
        job.wait(300)
        log = (folder / f"{name}.log").read_text()
        said = re.search(r"^stopped by ", log, re.MULTILINE)
        return moment, 85 if job.returncode == 124 and said else job.returncode  # timeout hides the status
    job = start(folder, name, options.steps, options.seconds)
    wait_for_step(folder, name, before, lambda: job.poll() is not None)
    time.sleep(moment)
    (mpirun,) = children(job.pid)
    victim = {"mpirun": mpirun, "rank": generator.choice(children(mpirun))}.get(whom, job.pid)
    (os.killpg if whom == "group" else os.kill)(victim, number)
    return moment, job.wait(300)


def cancelled(folder, name, before, moment, options):
    words = command(folder, name, options.steps)[1:]
    exports = f"--export=ALL,PYTHONPATH={folder}/slow,STEP_SECONDS={options.seconds}"
    job = subprocess.run(
        ["sbatch", "--parsable", "--ntasks=2", exports, f"--output={folder}/{name}.log", *words],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip

    def state():
        facts = subprocess.run(["scontrol", "show", "job", job], check=True, capture_output=True, text=True).stdout
        return re.search(r"JobState=(\w+)", facts)[1]

    wait_for_step(folder, name, before, lambda: state() not in ("PENDING", "CONFIGURING", "RUNNING"))
    time.sleep(moment)
    subprocess.run(["scancel", job], check=True)
    while (now := state()) in ("RUNNING", "COMPLETING"):
        time.sleep(0.2)
    log = (folder / f"{name}.log").read_text()
    return 85 if now == "CANCELLED" and re.search(r"^stopped by ", log, re.MULTILINE) else now


def about(kind):
    number, whom = kind.split(":")
    return {"benchmark": "stops", "signal": number, "to": whom}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--moments", type=int, default=20, help="how many for each kind")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of SIGNAL:WHOM, by commas")
    parser.add_argument("--one-run", action="store_true", help="stopped by all kinds in turn")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a step")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    for kind in [kind for kind in kinds if kind.endswith("scancel") and not shutil.which("sbatch")]:
        print(json.dumps({**about(kind), "skipped": "no Slurm"}), flush=True)
        kinds.remove(kind)
    options.steps = 10 * options.moments * (len(kinds) if options.one_run else 1) + 10
    for number in (signal.SIGINT, signal.SIGHUP):  # ignored in the background of a shell, and then by the jobs, too
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "slow").mkdir()
        (folder / "slow/sitecustomize.py").write_text(SLOW)
        (folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(400)))
        (folder / "config.toml").write_text(
            f'[run]\nout = "{folder}"\n[data]\npath = "{folder}/data.h5"\ntext = ["{folder}/text.txt"]\n'
        )
        if start(folder, "whole", options.steps).wait(300):
            sys.exit((folder / "whole.log").read_text())
        whole = losses(folder, "whole")
        for run in [kinds] if options.one_run else [[kind] for kind in kinds]:
            name = "-".join(run).replace(":", "-")
            generators = {kind: random.Random(f"{kind} {options.seed}") for kind in run}
            for kind in run * options.moments:
                moment, status = stop(folder, name, kind, generators[kind], options)
                last, saved = (records(folder, name) or [{"step": 0}])[-1]["step"], newest(folder, name)
                ok = status == 85 and saved == last
                bad += not ok
                told = {"moment": round(moment, 2), "status": status, "last_step": last, "saved": saved, "ok": ok}
                print(json.dumps({**about(kind), **told}), flush=True)
                if not ok:
                    print((folder / f"{name}.log").read_text(), file=sys.stderr)
            finished = start(folder, name, options.steps).wait(300)
            same = finished == 0 and losses(folder, name) == whole
            bad += not same
            told = {"stops": len(generators) * options.moments, "step_seconds": options.seconds, "finished": finished}
            print(json.dumps({"benchmark": "stops", "kinds": run, **told, "same": same}), flush=True)
            if not same:
                print((folder / f"{name}.log").read_text(), file=sys.stderr)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
