"""What a plan says beside what is measured: every grid of 1, 2 and 4 ranks of three jobs on this machine.

    python benchmarks/planner.py                                     all of it, 35 minutes on 2 cores
    python benchmarks/planner.py --jobs compute --ranks 1,2 --rounds 1 --machine here.toml

In each round the machine is measured as by `hpctrain machine`, where --machine gives no file of it, and then one MPI
job for each number of ranks measures all grids of all jobs once: what the hour does to the one, it does to the others.
The machine's file, of those figures of the rounds that count, is written to --output. A measurement is that of
`hpctrain scale`, a median over --steps; the least of the rounds counts, as what others do to the machine only adds to a
time, and the rounds of a grid lie minutes apart, as what others do lasts for a minute at times. Memory is the largest
resident set of a rank of a job that has this grid alone, after the others: what other grids leave in the heap is up to
5 % of it.
The plan's choice is the grid that is predicted to be the fastest.

Prints one JSON object a line: of each grid `{"benchmark": "planner", "case", "ranks", "grid", "predicted", "measured",
"memory_predicted", "memory_measured", "bytes_exact", "rounds"}`, of which the last are the seconds of each; of each job
and number of ranks `{"regret", "rank_correlation", "within_10_percent", "memory_within_7_percent", "chosen", "best"}`,
where regret is the chosen grid's measured seconds over the best's, less one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hpctrain.cli.machine import ROUNDS, Measuring, described
from hpctrain.config import Config, load_config
from hpctrain.grid_shape import all_grids
from hpctrain.plan import Machine, predict

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = os.environ.get("MPIRUN") or str(ROOT / "jobs/mpirun.sh")
JOBS = {  # of sizes that divide evenly: bytes are exact where they do
    "compute": ["model.layers=4", "model.width=384", "model.heads=8", "model.context=128", "train.batch=8",
                "model.vocabulary=320"],
    "communication": ["model.layers=4", "model.width=512", "model.heads=8", "model.context=32", "train.batch=4",
                      "model.vocabulary=4096"],
    "long": ["model.layers=2", "model.width=128", "model.heads=8", "model.context=1024", "train.batch=4",
             "model.vocabulary=320"],
}  # fmt: skip
LIMIT = 600  # seconds of a job
COMMON = ["train.microbatches=2", "run.checkpoint_minutes=0", "sanity.check_every=0", "comm.watchdog=0"]


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


def measured(
    cases: dict[int, list[list[str]]], rounds: int, steps: int, with_machine: bool
) -> tuple[dict[int, list[list[dict]]], str]:
    """Of each number of ranks' cases, the figures of `hpctrain.scale.measure` in each round; memory is that of a job
    of its own. And the machine file, of as many rounds in between."""
    found: dict[int, list[list[dict]]] = {ranks: [[] for _ in each] for ranks, each in cases.items()}
    of_machine: list[list[dict]] = []
    with tempfile.TemporaryDirectory() as scratch:
        out, spec, empty = (Path(scratch, name) for name in ("out.json", "spec.json", "empty.toml"))
        text = json.dumps([str(ROOT / "README.md")])
        data = [f"data.path={scratch}/data.h5", f"data.text={text}", f"run.out={scratch}"]
        empty.write_text("")
        machine = Measuring(LAUNCHER, sorted({1, *cases}), Path(scratch)) if with_machine else None

        def job(ranks: int, *worker: str):
            subprocess.run(
                [LAUNCHER, "-n", str(ranks), sys.executable, "-m", "mpi4py", *worker], check=True, timeout=LIMIT,
                env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            return json.loads(out.read_text())

        for number in range(rounds):
            if machine:
                of_machine.append([figures for _, figures in machine.a_round()])
            for ranks, each in cases.items():
                spec.write_text(json.dumps([[*case, *data, f"run.name={number}-{n}"] for n, case in enumerate(each)]))
                once = job(ranks, __file__, "--worker", str(spec), str(out), "--steps", str(steps))
                for of_case, figures in zip(found[ranks], once):
                    of_case.append(figures)
        for ranks, each in cases.items():
            for case, of_case in zip(each, found[ranks]):
                alone = job(ranks, "-m", "hpctrain.scale.measure", str(out), "1", str(empty), *case, *data)
                of_case[:] = [figures | {"memory": alone["memory"]} for figures in of_case]
    return found, described(of_machine) if machine else ""


def work(spec: str, out: str, steps: int) -> None:
    """What a rank of the MPI job does."""
    from mpi4py import MPI

    from hpctrain.launch import abort
    from hpctrain.scale.measure import measure
    from hpctrain.train.loop import train_step
    from hpctrain.train.session import build

    world, found = MPI.COMM_WORLD, []
    try:
        for case in json.loads(Path(spec).read_text()):
            session = build(load_config(overrides=case), world)
            for _ in range(2):
                train_step(session)
            found.append(measure(session, world, steps))
            session.grid.free()
            del session
        if world.rank == 0:
            Path(out).write_text(json.dumps(found))
    except BaseException:
        abort(world)


def summary(rows: list[dict]) -> dict:
    """Of the grids of one job on so many ranks."""
    chosen = min(rows, key=lambda row: row["predicted"])
    best = min(rows, key=lambda row: row["measured"])

    def within(part: float, name: str = "") -> str:
        near = [abs(row[f"{name}predicted"] / row[f"{name}measured"] - 1) <= part for row in rows]
        return f"{sum(near)} of {len(near)}"

    return {
        "regret": round(chosen["measured"] / best["measured"] - 1, 4),
        "rank_correlation": round(correlation(*([row[key] for row in rows] for key in ("predicted", "measured"))), 3),
        "within_10_percent": within(0.1), "memory_within_7_percent": within(0.07, "memory_"),
        "bytes_exact": all(row["bytes_exact"] for row in rows), "chosen": chosen["grid"], "best": best["grid"],
    }  # fmt: skip


def correlation(a: list[float], b: list[float]) -> float:
    """Spearman's, of lists without ties; 1 for a single value."""
    n = len(a)
    if n < 2:
        return 1.0
    place = [{value: i for i, value in enumerate(sorted(values))} for values in (a, b)]
    return 1 - 6 * sum((place[0][x] - place[1][y]) ** 2 for x, y in zip(a, b)) / (n * (n * n - 1))


def row(name: str, config: Config, machine: Machine, each: list[dict]) -> dict:
    """Of a grid."""
    prediction, best = predict(config, machine), min(each, key=lambda figures: figures["step_seconds"])
    received = {axis: nbytes for axis, nbytes in each[0]["bytes_received"].items() if nbytes}
    return {
        "benchmark": "planner", "case": name, "ranks": config.ranks, "grid": list(config.grid_shape.values()),
        "predicted": round(prediction.seconds, 5),
        "measured": round(best["step_seconds"], 5),
        "memory_predicted": round(prediction.memory_bytes), "memory_measured": each[0]["memory"],
        "bytes_exact": received == {axis: nbytes for axis, nbytes in prediction.bytes.items() if nbytes},
        "rounds": [round(figures["step_seconds"], 5) for figures in each],
        "parts_predicted": {part: round(taken, 5) for part, taken in prediction.parts.items() if taken},
        "parts_measured": {part: round(taken, 5) for part, taken in best["seconds"].items() if taken},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", metavar="M.toml", help="of `hpctrain machine` (measured as well)")
    parser.add_argument("--output", metavar="M.toml", default="here.toml", help="for what was measured (here.toml)")
    parser.add_argument("--jobs", type=lambda text: text.split(","), default=list(JOBS), help=f"of {', '.join(JOBS)}")
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=int, help="only so many grids of each job and number of ranks")
    parser.add_argument("--worker", nargs=2, metavar=("SPEC", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker, options.steps)
        return
    cases = {
        ranks: {name: grids(JOBS[name], ranks)[: options.limit] for name in options.jobs} for ranks in options.ranks
    }
    every = {ranks: [case for each in of_ranks.values() for case in each] for ranks, of_ranks in cases.items()}
    found, text = measured(every, options.rounds, options.steps, with_machine=not options.machine)
    if text:
        Path(options.output).write_text(text)
    machine = Machine.load(options.machine or options.output)
    for ranks, of_ranks in cases.items():
        rest = iter(found[ranks])
        for name, each in of_ranks.items():
            rows = [row(name, load_config(overrides=case), machine, next(rest)) for case in each]
            for line in rows:
                print(json.dumps(line), flush=True)
            print(json.dumps({"benchmark": "planner", "case": name, "ranks": ranks, **summary(rows)}), flush=True)


if __name__ == "__main__":
    main()
