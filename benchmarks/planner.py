"""What a plan says beside what is measured: every grid of 1, 2 and 4 ranks of three jobs on this machine.

    hpctrain machine -o here.toml                                    first, on a quiet machine
    python benchmarks/planner.py                                     all of it, an hour on 2 quiet cores
    python benchmarks/planner.py --job compute --ranks 2 --limit 2   only the first two grids of one job

Each job is measured on every grid once a round, so that all see the same hours of the machine. A measurement is that of
`hpctrain scale`, a median over --steps; the least of the rounds counts, as what others do to the machine only adds to a
time. Memory is the resident set of the largest rank. The plan's choice is the grid that is predicted to be the fastest.

Prints one JSON object a line: of each grid `{"benchmark": "planner", "case", "ranks", "grid", "predicted", "measured",
"memory_predicted", "memory_measured", "bytes_exact"}`; of each job and number of ranks `{"regret", "rank_correlation",
"within_10_percent", "chosen", "best"}`, where regret is the chosen grid's measured seconds over the best's, less one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hpctrain.config import Config, load_config
from hpctrain.grid_shape import all_grids
from hpctrain.plan import Machine, predict

ROOT = Path(__file__).resolve().parents[1]
JOBS = {
    "compute": ["model.layers=4", "model.width=512", "model.heads=8", "model.context=256", "train.batch=16"],
    "communication": ["model.layers=4", "model.width=512", "model.heads=8", "model.context=64", "train.batch=8",
                      "model.vocabulary=4096"],
    "long": ["model.layers=2", "model.width=256", "model.heads=8", "model.context=1024", "train.batch=4"],
}  # fmt: skip
COMMON = ["train.microbatches=2", "run.checkpoint_minutes=0", "sanity.check_every=0"]


def grids(job: list[str], ranks: int) -> list[list[str]]:
    """Overrides of every grid that the job can have."""
    found = []
    for data, pipeline, box in all_grids(ranks):
        overrides = [*COMMON, *job, f"grid.data={data}", f"grid.pipeline={pipeline}", f"grid.tensor={list(box)}"]
        try:
            load_config(overrides=overrides)
        except ValueError:
            continue
        found.append(overrides)
    return found


def measured(overrides: list[str], config: Config, folder: Path, steps: int) -> dict:
    """Figures of `hpctrain.scale.measure`."""
    launcher = os.environ.get("MPIRUN") or str(ROOT / "jobs/mpirun.sh")
    out, empty = folder / "out.json", folder / "empty.toml"
    empty.write_text("")
    data = [f"data.path={folder / 'data.h5'}", f"data.text={json.dumps([str(ROOT / 'README.md')])}"]
    command = [launcher, "-n", str(config.ranks), sys.executable, "-m", "mpi4py", "-m", "hpctrain.scale.measure"]
    subprocess.run(
        [*command, str(out), str(steps), str(empty), *overrides, *data, f"run.out={folder}"], check=True, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return json.loads(out.read_text())


def summary(rows: list[dict]) -> dict:
    """Of the grids of one job on so many ranks."""
    chosen = min(rows, key=lambda row: row["predicted"])
    best = min(rows, key=lambda row: row["measured"])
    near = [abs(row["predicted"] / row["measured"] - 1) <= 0.1 for row in rows]
    return {
        "regret": round(chosen["measured"] / best["measured"] - 1, 4),
        "rank_correlation": round(correlation(*([row[key] for row in rows] for key in ("predicted", "measured"))), 3),
        "within_10_percent": f"{sum(near)} of {len(near)}",
        "chosen": chosen["grid"],
        "best": best["grid"],
    }


def correlation(a: list[float], b: list[float]) -> float:
    """Spearman's, of lists without ties; 1 for a single value."""
    n = len(a)
    if n < 2:
        return 1.0
    place = [{value: i for i, value in enumerate(sorted(values))} for values in (a, b)]
    return 1 - 6 * sum((place[0][x] - place[1][y]) ** 2 for x, y in zip(a, b)) / (n * (n * n - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="here.toml")
    parser.add_argument("--job", choices=JOBS, action="append")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", type=int, help="only so many grids of each")
    options = parser.parse_args()
    machine = Machine.load(options.machine)
    for name in options.job or JOBS:
        for ranks in options.ranks or (1, 2, 4):
            chosen = grids(JOBS[name], ranks)[: options.limit]
            with tempfile.TemporaryDirectory() as scratch:
                rows = study(name, chosen, machine, Path(scratch), options)
            for row in rows:
                print(json.dumps(row), flush=True)
            print(json.dumps({"benchmark": "planner", "case": name, "ranks": ranks, **summary(rows)}), flush=True)


def study(name: str, chosen: list[list[str]], machine: Machine, scratch: Path, options) -> list[dict]:
    """A row for each grid."""
    configs = [load_config(overrides=overrides) for overrides in chosen]
    found = [
        [measured(overrides, config, scratch, options.steps) for overrides, config in zip(chosen, configs)]
        for _ in range(options.rounds)
    ]
    rows = []
    for config, each in zip(configs, zip(*found)):
        prediction = predict(config, machine)
        received = {axis: nbytes for axis, nbytes in each[0]["bytes_received"].items() if nbytes}
        rows.append(
            {
                "benchmark": "planner", "case": name, "ranks": config.ranks, "grid": list(config.grid_shape.values()),
                "predicted": round(prediction.seconds, 5),
                "measured": round(min(figures["step_seconds"] for figures in each), 5),
                "memory_predicted": round(prediction.memory_bytes), "memory_measured": each[0]["memory"],
                "bytes_exact": received == {axis: nbytes for axis, nbytes in prediction.bytes.items() if nbytes},
            }
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
