"""The tables of AMPNet in benchmarks/README.md."""

import statistics
from collections import defaultdict

from figures import lines, pivot, table


def ampnet():
    found = [line for line in lines("ampnet") if line.get("peer")]
    return pivot(
        found, lambda line: (line["case"],), lambda line: line["peer"], ("GPT of 4 layers",), ("1f1b", "pipedream")
    )


def ampnet_steps():
    """Of each side the steps to the loss, and who waits how much."""
    rows, found = {}, [line for line in lines("ampnet") if "peer" in line and not line["peer"]]
    for line in found:
        what, kind, *name, ranks = line["case"].split(", ")
        if what == "occupancy":
            rows.setdefault((", ".join(name), ranks), {})[kind] = " ".join(f"{part:.2f}" for part in line["occupancy"])
        else:
            rows.setdefault((", ".join(name), ranks), {})["steps"] = str(line["steps"])
    return table(
        ["", "ranks", "occupancy, fixed lengths", "occupancy, variable lengths", "steps to the loss"],
        ([*key, row.get("fixed lengths"), row.get("variable lengths"), row.get("steps")] for key, row in rows.items()),
    )


def ampnet_accuracy():
    found = [line for line in lines("ampnet_accuracy") if line["case"].startswith("accuracy")]
    rows = {line["case"].removeprefix("accuracy "): line for line in found}  # the last epoch of each
    return table(
        ["task", "criterion", "right", "epochs", "instances an epoch", "staleness"],
        (
            [case, f"{100 * line['goal']:.0f} %", f"{100 * line['right']:.1f} %", str(line["epoch"]),
             str(line["instances"]), f"{line['staleness']:.1f}"]
            for case, line in rows.items()
        ),
    )  # fmt: skip


def ampnet_elastic():
    """Losses of the last epoch, and how far they are from those of one key with the same seed; ± the standard error of
    the mean over the seeds."""
    found = defaultdict(dict)
    for line in lines("ampnet_accuracy"):
        if line["case"].startswith("elastic"):
            found[line["case"], line["epoch"], line["keys"]][line["seed"]] = line  # on any ranks
    rows = []
    for (case, epoch, keys), by_seed in found.items():
        one = found[case, epoch, 1]
        losses = [line["loss"] for line in by_seed.values()]
        beside = [100 * (line["loss"] / one[seed]["loss"] - 1) for seed, line in by_seed.items()]
        staleness = statistics.fmean(line["staleness"] for line in by_seed.values())
        row = [case.removeprefix("elastic "), str(epoch), str(keys), str(len(losses)), f"{staleness:.2f}"]
        rows.append([*row, f"{_with_error(losses, '.3f')}", "" if keys == 1 else f"{_with_error(beside, '+.1f')} %"])
    return table(["task", "epochs", "keys", "seeds", "staleness", "loss of the last epoch", "beside one key"], rows)


def _with_error(values, form):
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):{form}} ± {error:{form.lstrip('+')}}"
