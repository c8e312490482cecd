"""Weak scaling of the data, tensor and pipeline axes against its goals: the points of `hpctrain scale`, in turn.

    python benchmarks/weak_scaling.py                       1 and 2 ranks, all three axes; 3 minutes on 2 cores
    python benchmarks/weak_scaling.py --ranks 1,2,4,8 --repeat 5 --output studies

Rounds are interleaved: in each, every point of every axis is measured once, so that all see the same minutes of a
shared machine; efficiency is the median over the rounds of model FLOP/s a rank, over that of one rank in that round.
Prints a JSON object for each axis and number of ranks, and leaves a study and its report for each axis in the folder.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from hpctrain.scale.points import points
from hpctrain.scale.report import write
from hpctrain.scale.runner import describe_study, measure
from hpctrain.scale.summary import summarise

CONFIG = Path(__file__).parents[1] / "jobs/scale.toml"
# Pipeline: 16 microbatches, so that the two stages are idle 1/17 of the time.
AXES = {
    "data": (0.90, ["train.microbatches=1"]),
    "tensor": (0.85, ["train.microbatches=1", "model.width=512", "model.layers=2"]),
    "pipeline": (0.80, ["train.batch=16", "train.microbatches=16"]),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--axes", type=lambda text: text.split(","), default=list(AXES))
    parser.add_argument("--output", type=Path, default=Path("runs/weak_scaling"))
    options = parser.parse_args()
    studies = {axis: points(CONFIG, AXES[axis][1], options.ranks, "weak", axis) for axis in options.axes}
    descriptions = {axis: describe_study(made, "weak", axis, options.steps, 1) for axis, made in studies.items()}
    if options.output.exists():
        print(f"{options.output} is there: what it holds is not measured again", file=sys.stderr)
    for rounds in range(1, options.repeat + 1):
        for axis, made in studies.items():
            measure(
                CONFIG, made, options.output / axis, rounds, options.steps, 1, descriptions[axis], say=lambda text: None
            )
    for axis in studies:
        write(options.output / axis, descriptions[axis])
        first, *rest = summarise(options.output / axis, descriptions[axis]).rows
        for row in rest:
            paired = [
                speed / row.ranks / (alone / first.ranks)
                for speed, alone in zip(row.flops_per_second, first.flops_per_second)
            ]
            result = {
                "benchmark": "weak_scaling", "case": f"{axis}, {row.ranks} ranks",
                "efficiency": None if row.oversubscribed else round(statistics.median(paired), 3),
                "rounds": [round(value, 3) for value in paired],
                "goal": AXES[axis][0] if row.ranks == 2 else None,
                "gflops": round(row.median_flops_per_second / 1e9, 1), "mfu": round(row.mfu, 3),
                "time": {part: round(seconds, 4) for part, seconds in row.seconds.items()},
            }  # fmt: skip
            if row.oversubscribed:
                result["note"] = "more ranks than cores: not scaling"
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
