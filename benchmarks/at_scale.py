"""Predict weak and strong scaling to 32,768 ranks on every shipped machine: seconds of a step of the best plan.

    python benchmarks/at_scale.py > benchmarks/results/at_scale.jsonl      20 minutes on one core, without MPI
    python benchmarks/at_scale.py --machines frontier --ranks 512 --cases weak          a point, seconds
    python benchmarks/at_scale.py --plot at_scale.svg                      draws the results that are there

Every step is of 8,192 sequences of 2,048 tokens, bf16 (fp32 on the CPU cluster). "weak": GPTs whose size grows with the
ranks, from 5 billion parameters on 512 to 320 billion on 32,768, so that each rank has about as much to do.
"strong": the one of 40 billion on all numbers. Every point is what `plan.search` finds, the best of all grids,
schedules, ZeRO levels and recomputation with Agarwal's products and even cuts, and its interval. `rate` is model
flop/s of a device, in 1e12; `efficiency` that rate beside the one of the fewest ranks.

Prints one JSON object a line. The plot has the rates of the published steps that machine files were calibrated on
(`planner_rows.py`) beside the predictions: other models, on the same machine.
"""

import argparse
import json
from pathlib import Path

import planner_rows

from hpctrain.config import load_config
from hpctrain.plan import Machine, names, search
from hpctrain.plan.job import read

RESULTS = Path(__file__).parent / "results/at_scale.jsonl"
BATCH, CONTEXT, VOCABULARY = 8192, 2048, 51200
# width, layers, heads by ranks; after Singh et al. (SC 2024)
MODELS = {
    512: (4096, 24, 32), 1024: (5120, 32, 40), 2048: (7168, 32, 56), 4096: (9216, 38, 72), 8192: (12288, 42, 96),
    16384: (12288, 84, 96), 32768: (16384, 96, 128),
}  # fmt: skip
KEPT = "tensor.algorithm", "pipeline.partition"  # settings that are not searched, so that a point takes seconds
CASES = {"weak": MODELS, "strong": dict.fromkeys(MODELS, MODELS[4096])}


# seconds of the published steps of just these models that machine files were calibrated on, all blocks recomputed
PUBLISHED = {("frontier", 512): 17.9, ("perlmutter-a100-40", 4096): 8.77}


def precision(machine):
    return "bf16" if "bf16" in machine.peak else "fp32"


def config(width, layers, heads, machine):
    return load_config(
        overrides=[
            f"model.width={width}", f"model.layers={layers}", f"model.heads={heads}", f"model.context={CONTEXT}",
            f"model.vocabulary={VOCABULARY}", f"train.batch={BATCH}", f"precision.compute={precision(machine)}",
        ]
    )  # fmt: skip


def plan(settings):
    """
    >>> plan({"grid.data": 8, "grid.pipeline": 4, "grid.tensor": [2, 1, 1], "train.microbatches": 16,
    ...       "pipeline.schedule": "zb-v", "data_parallel.method": "zero1", "train.recompute": "none"})
    'data 8, pipeline 4 (zb-v), tensor 2x1x1, 16 microbatches, zero1, recompute none'
    """
    grid = {axis: settings[f"grid.{axis}"] for axis in ("data", "pipeline", "tensor")}
    schedule = f" ({settings['pipeline.schedule']})" if grid["pipeline"] > 1 else ""
    return (
        f"data {grid['data']}, pipeline {grid['pipeline']}{schedule}, tensor {'x'.join(map(str, grid['tensor']))}, "
        f"{settings['train.microbatches']} microbatches, {settings['data_parallel.method']}, "
        f"recompute {settings['train.recompute']}"
    )


def points(machine, case, ranks):
    """A line of each number of ranks; where no plan fits, of what is short."""
    machine, first = Machine.load(machine), None
    for number in ranks:
        shape = CASES[case][number]
        made = config(*shape, machine)
        line = {"benchmark": "at_scale", "case": case, "machine": machine.name, "ranks": number}
        line |= {"model": f"width {shape[0]}, {shape[1]} layers"}
        try:
            best = search(made, number, machine, top=1, keep=KEPT)[0]
        except ValueError as error:
            yield line | {"absent": str(error)}
            continue
        rate = read(made)[0].flops / number / best.seconds
        first = first or rate
        yield line | {
            "seconds": round(best.seconds, 3), "low": round(best.low, 3), "high": round(best.high, 3),
            "rate": round(rate / 1e12, 4), "efficiency": round(rate / first, 3), "bound_by": best.bound_by,
            "parts": {name: round(part, 4) for name, part in best.parts.items() if part},
            "gib": round(best.memory_bytes / 2**30, 1), "plan": plan(best.settings),
        }  # fmt: skip


def published(machine):
    """Ranks and rates of the published steps on this machine, in 1e12 model flop/s of a device."""
    rows = [(planner_rows.config(row), row[5]) for row in planner_rows.ROWS if row[0] == machine]
    found = [(made.ranks, read(made)[0].flops / made.ranks / seconds / 1e12) for made, seconds in rows]
    for (name, ranks), seconds in PUBLISHED.items():
        if name == machine:
            flops = read(config(*MODELS[ranks], Machine.load(name)))[0].flops
            found.append((ranks, flops / ranks / seconds / 1e12))
    return found


def plot(path):
    """One panel a case: the rate of a device, as a part of its peak, by ranks; crosses are published steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(CASES), sharey=True)
    for panel, case in zip(panels, CASES):
        for number, name in enumerate(dict.fromkeys(line["machine"] for line in found)):
            lines = [line for line in found if (line["case"], line["machine"]) == (case, name) and "rate" in line]
            machine = Machine.load(name)
            peak = machine.peak[precision(machine)] / 1e12
            x, y = [line["ranks"] for line in lines], [line["rate"] / peak for line in lines]
            width = [[line["rate"] * (1 - line["seconds"] / line["high"]) / peak for line in lines],
                     [line["rate"] * (line["seconds"] / line["low"] - 1) / peak for line in lines]]  # fmt: skip
            panel.errorbar(x, y, width, marker="o", markersize=3, capsize=2, color=f"C{number}", label=name)
            if rows := published(name):
                ranks, rates = zip(*rows)
                panel.plot(ranks, [rate / peak for rate in rates], "x", color=f"C{number}")
        panel.set(xscale="log", xlabel="ranks", title=f"{case} scaling")
        panel.set_xticks(list(MODELS), [f"{ranks:,}" for ranks in MODELS], rotation=45)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="model flop/s / peak; crosses: published steps", ylim=(0, None))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", nargs="+", default=names(), choices=names())
    parser.add_argument("--ranks", nargs="+", type=int, default=[512, 2048, 8192, 32768], choices=list(MODELS))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--plot", metavar="FILE", help="draw the results instead")
    options = parser.parse_args()
    if options.plot:
        plot(options.plot)
        return
    for machine in options.machines:
        for case in options.cases:
            for line in points(machine, case, options.ranks):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
