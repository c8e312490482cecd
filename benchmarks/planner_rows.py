"""Predictions beside published steps, the figure of a chip and a program fitted to the others of its rows.

    python benchmarks/planner_rows.py          the calibration rows, a minute

A machine file carries one number that rows decide, `device.product`: the part of the peak that products reach on a
chip, with a program. "left_out" is a prediction by the other rows of the same chip and program; "constant" the one of a
constant rate of flops fitted to all rows of the machine, this one included. "slower" is by how much the published grid
is predicted to be slower than the grid that the plan would choose, all else as published: no two rows are of one job on
two grids, so that a regret, which has both measured, cannot be had from them.

Prints one JSON object a line; then, of each machine, the change in model flop/s of a device from the row of the fewest
devices to that of the most, as a part of the former; and last the mean errors, with what is aimed at.
"""

import dataclasses
import json
import math
import statistics

from hpctrain.config import Config, load_config
from hpctrain.plan import Machine, predict, search
from hpctrain.plan.job import read

LLAMA = ("model.kind=llama", "model.ffn=11008", "model.tied=false", "data_parallel.method=zero1")
SHARDED = ("data_parallel.method=zero1", "train.recompute=none")
BLOCK = ("train.recompute=block",)
# machine; width, layers, heads; tensor, pipeline, virtual stages, data; batch, sequences of a microbatch; context,
# vocabulary; seconds; settings; source
ROWS = (
    ("dgx-a100-selene", (4096, 36, 32), (4, 1, 0, 32), (512, 16), (2048, 51200), 3.70, BLOCK, "Narayanan et al. 2021"),
    ("dgx-a100-selene", (12288, 80, 96), (8, 8, 2, 24), (2304, 2), (2048, 51200), 24.8, BLOCK, "Narayanan et al. 2021"),
    ("dgx-a100-selene", (6144, 48, 64), (8, 1, 0, 1), (4, 4), (2048, 51200), 1.42, BLOCK, "Korthikanti et al. 2022"),
    ("dgx-a100-4hdr", (3072, 30, 32), (1, 1, 0, 64), (512, 2), (2048, 51200), 3.70, BLOCK, "vTrain"),
    ("dgx-a100-4hdr", (6144, 40, 48), (4, 2, 0, 32), (1024, 8), (2048, 51200), 10.86, BLOCK, "vTrain"),
    ("dgx-a100-4hdr", (8192, 48, 64), (4, 16, 0, 8), (1536, 4), (2048, 51200), 15.59, BLOCK, "vTrain"),
    ("dgx-a100-4hdr", (12288, 96, 96), (8, 8, 0, 8), (1536, 2), (2048, 51200), 55.1, BLOCK, "vTrain"),
    ("dgx-h100", (4096, 30, 32), (2, 1, 0, 48), (192, 1), (4096, 131072), 0.800, SHARDED, "Megatron-Core"),
    ("dgx-h100", (12288, 96, 96), (8, 6, 16, 48), (1152, 1), (4096, 131072), 5.26, SHARDED, "Megatron-Core"),
    ("dgx-a100-4x100", (4096, 32, 32), (1, 1, 0, 8), (64, 2), (2048, 103168), 16384 / 4062, LLAMA, "InternEvo"),
    ("dgx-a100-4x100", (4096, 32, 32), (1, 1, 0, 256), (2048, 2), (2048, 103168), 16384 / 3209, LLAMA, "InternEvo"),
)  # fmt: skip
KEPT = ("train.recompute", "data_parallel.method", "pipeline.partition", "tensor.algorithm")
AIMS = {"left_out_error": "at most half of constant_error", "off": "at most 0.08 at 8,192 to 32,768 ranks"}
# Machines of the same chip whose rows one program ran.
ALIKE = {"dgx-a100-selene": "Megatron-LM on A100", "dgx-a100-4hdr": "Megatron-LM on A100"}


def config(row) -> Config:
    _, (width, layers, heads), (tensor, pipeline, virtual, data), (batch, each), (context, vocabulary), *_ = row
    virtual_stages = ("pipeline.schedule=interleaved", f"pipeline.virtual_stages={virtual}") if virtual else ()
    return load_config(
        overrides=[
            f"model.width={width}", f"model.layers={layers}", f"model.heads={heads}", f"model.context={context}",
            f"model.vocabulary={vocabulary}", f"grid.data={data}", f"grid.pipeline={pipeline}", f"grid.tensor={tensor}",
            f"train.batch={batch}", f"train.microbatches={batch // data // each}", "precision.compute=bf16",
            *virtual_stages, *row[6],
        ]
    )  # fmt: skip


def chip(row) -> str:
    return ALIKE.get(row[0], row[0])


def seconds(row, product: float) -> float:
    machine = Machine.load(row[0])
    return predict(
        config(row), dataclasses.replace(machine, device=dataclasses.replace(machine.device, product=product))
    ).seconds


def fitted(rows) -> float:
    """The `product` of the least squared logarithm of predicted over measured, by golden section."""

    def error(product):
        return sum(math.log(seconds(row, product) / row[5]) ** 2 for row in rows)

    low, high, golden = 0.3, 1.0, (math.sqrt(5) - 1) / 2
    while high - low > 1e-3:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if error(left) < error(right) else (left, high)
    return (low + high) / 2


def constant(row, rows) -> float:
    """Seconds at the rate of flops a rank that fits all the rows best."""

    def work(each):
        made = config(each)
        again = 4 / 3 if made.train.recompute == "block" else 1  # a forward more
        return again * read(made)[0].flops / made.ranks

    return work(row) / math.exp(statistics.fmean(math.log(work(each) / each[5]) for each in rows))


def slower(row) -> float:
    """Of the published grid, on which it was left to the authors what suited it, than of the plan's, as predicted."""
    made = config(row)
    made = dataclasses.replace(made, tensor=dataclasses.replace(made.tensor, algorithm="megatron"))
    machine = Machine.load(row[0])
    return predict(made, machine).seconds / search(made, made.ranks, machine, 1, keep=KEPT)[0].seconds - 1


def scaling(machine: str, rows) -> dict:
    """From the row of the fewest devices to that of the most, the change in model flop/s of a device."""
    made = [config(row) for row in rows]
    work = [read(each)[0].flops / each.ranks for each in made]
    ends = [min(range(len(rows)), key=lambda n: made[n].ranks), max(range(len(rows)), key=lambda n: made[n].ranks)]

    def change(seconds):
        few, many = (work[n] / seconds[n] for n in ends)
        return many / few - 1

    measured, predicted = change([row[5] for row in rows]), change([predict(each, machine).seconds for each in made])
    few, many = (made[n].ranks for n in ends)
    return {
        "case": f"{machine}, {few} to {many} devices", "measured": round(measured, 3), "predicted": round(predicted, 3),
        "off": round(predicted - measured, 3), "aim": AIMS["off"],
    }  # fmt: skip


def main() -> None:
    errors = {"predicted": [], "left_out": [], "constant": []}
    for row in ROWS:
        alike = [each for each in ROWS if each[0] == row[0]]
        others = [each for each in ROWS if chip(each) == chip(row) and each is not row]
        found = {
            "predicted": predict(config(row), row[0]).seconds,
            "left_out": seconds(row, fitted(others)),
            "constant": constant(row, alike),
        }
        for name, value in found.items():
            errors[name].append(abs(value / row[5] - 1))
        case = f"{row[0]}, width {row[1][0]} on {config(row).ranks} devices ({row[7]})"
        line = {"benchmark": "planner_rows", "case": case, "measured": round(row[5], 3)}
        print(json.dumps(line | {name: round(value, 3) for name, value in (found | {"slower": slower(row)}).items()}))
    for machine in dict.fromkeys(row[0] for row in ROWS):
        found = scaling(machine, [row for row in ROWS if row[0] == machine])
        print(json.dumps({"benchmark": "planner_rows"} | found))
    means = {f"{name}_error": round(statistics.fmean(values), 4) for name, values in errors.items()}
    print(json.dumps({"benchmark": "planner_rows", "case": "mean", **means, "aim": AIMS["left_out_error"]}))


if __name__ == "__main__":
    main()
