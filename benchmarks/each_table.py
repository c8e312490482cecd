"""One function for each table of README.md and benchmarks/README.md."""

import itertools
import statistics

from ampnet_tables import ampnet, ampnet_accuracy, ampnet_elastic, ampnet_steps
from figures import RESULTS, figure, lines, median, pivot, table

PEERS = {
    "ddp": ("data parallel", "torch's DDP"),
    "zero-redundancy": ("ZeRO-1", "torch's ZeroRedundancyOptimizer"),
    "deepspeed-1": ("ZeRO-1", "DeepSpeed's"),
    "fsdp2": ("ZeRO-2", "torch's FSDP2 that keeps its weights"),
    "deepspeed-2": ("ZeRO-2", "DeepSpeed's"),
    "fsdp2-reshard": ("ZeRO-3", "torch's FSDP2 that frees them"),
    "deepspeed-3": ("ZeRO-3", "DeepSpeed's"),
    "tensor": ("tensor parallel", "torch's"),
    "megatron": ("tensor parallel, sequence-parallel norms", "Megatron-core's, whole norms on every rank"),
}
WIDTHS = {"base": "256", "communication-heavy": "512", "large": "1024"}
PRODUCTS = "float32 products"


def products(line):
    """Whether torch.set_float32_matmul_precision gave both sides the same."""
    asked = line["case"].removesuffix(" products")
    return "oneDNN's on both sides" if asked.endswith("medium") else "as they are"


def machine():
    """A column for each machine that results are from."""
    found = lines("machine")
    names = [name for name in found[0] if name not in ("benchmark", "processor", "results")]
    rows = [[name, *(str(each[name]) for each in found)] for name in names]
    rows.append(["results/", *(", ".join(each["results"]) for each in found)])
    return table(["processor", *(each["processor"] for each in found)], rows)


def peers():
    def row(line):
        shape, _, way, _ = line["case"].split(", ")
        return WIDTHS[shape], *PEERS[line["peer"]], way.split(" by ")[1], products(line)

    def ranks(line):
        return line["case"].split(", ")[1]

    return pivot(lines("peers"), row, ranks, ["width", "ours", "theirs, over gloo", "our transport", PRODUCTS])


def summary():
    """The first shape of the table of peers, by shared memory."""
    found = [line for line in lines("peers") if line["case"].startswith("base, ") and "shared memory" in line["case"]]

    def row(line):
        return *PEERS[line["peer"]], products(line)

    return pivot(found, row, lambda line: line["case"].split(", ")[1], ["ours", "theirs, over gloo", PRODUCTS])


def peers_gpu():
    """With TF32 on both sides."""

    def row(line):
        return WIDTHS[line["case"].split(", ")[0]], *PEERS[line["peer"]]

    def ranks(line):
        return line["case"].split(", ")[1]

    return pivot(lines("peers_gpu"), row, ranks, ["width", "ours", "theirs, over gloo"])


def gpu_collectives():
    ways = "staged", "direct"
    rows = ([*line["case"].split(", "), *(str(line.get(way, "")) for way in ways)] for line in lines("gpu_collectives"))
    return table(["collective", "of a rank", "on", *(f"{way}, ms" for way in ways)], rows)


def memory():
    made = {}
    for line in lines("peers_memory"):
        key = *PEERS[line["peer"]], ", ".join(line["case"].split(", ")[:2])
        made.setdefault(key, {})[line["side"]] = f"{line['peak_mib']:.0f}"
    rows = ([*key, each.get("ours"), each.get("theirs")] for key, each in made.items())
    return table(["ours", "theirs", "shape", "our MiB", "their MiB"], rows)


def pipeline():
    """Chimera is left out: it holds every weight twice, and no peer does. So is the line of the best of all sides."""
    found = [line for line in lines("pipeline") if line["peer"] not in (None, "simulator")]
    found = [line for line in found if "chimera" not in line["case"] and not line["case"].startswith("best: ")]
    return pivot(found, lambda line: (line["case"],), lambda line: line["peer"], ["schedule"])


def simulator():
    rows = []
    for what in ("step time", "peak activation memory"):
        ratios = [line["ratio"] for line in lines("pipeline") if line["case"].startswith(what)]
        rows.append([what, str(len(ratios)), f"{min(ratios):.2f} to {max(ratios):.2f}"])
    return table(["simulated / measured", "schedules and cuts", "least to most"], rows)


def matmul():
    """Of ours the algorithm that was the fastest of the case, by the line that names the best of all."""
    found, best = lines("matmul"), {}
    for line in found:
        if line["peer"].startswith("best of all"):
            case, algorithm = line["case"].rsplit(", ", 1)
            best[case] = algorithm
    chosen = [
        line
        for line in found
        if not line["peer"].startswith(("best of all", "least", "lower")) and line["case"].rsplit(", ", 1)[0] in best
    ]

    def row(line):
        case, algorithm = line["case"].rsplit(", ", 1)
        return (case, algorithm) if algorithm == best[case] else None

    return pivot([line for line in chosen if row(line)], row, lambda line: line["peer"], ["n, ranks", "ours, fastest"])


def layer():
    found = [line for line in lines("matmul") if line["peer"] == "ht.matmul.Agarwal"]

    def row(line):
        size, ranks, name, _ = line["case"].split(", ")
        return f"{size}, {ranks}", name.removeprefix("layer ")

    return pivot(found, row, lambda line: line["case"].split(", ")[3], ["n, ranks", "grid"])


def elements():
    found = [line for line in lines("matmul") if line["peer"] == "lower bound"]
    rows = ([*line["case"].rsplit(", ", 1), f"{1 / line['ratio']:.2f}"] for line in found)
    return table(["n, ranks", "algorithm", "elements received / lower bound"], rows)


def allreduce():
    found = [line for line in lines("allreduce") if line["case"].startswith("auto, ") and line["peer"] == "Open MPI"]

    def both(line):
        return f"{figure(line)}: {line['ours']:g} / {line['theirs']:g}"

    made = {}
    for line in found:
        _, size, ranks = line["case"].split(", ")
        made.setdefault(size, {})[ranks] = both(line)
    columns = sorted({ranks for each in made.values() for ranks in each})
    rows = ([size, *(each.get(ranks) for ranks in columns)] for size, each in made.items())
    return table(["sum of", *(f"{ranks}: ratio: µs of ours / Open MPI" for ranks in columns)], rows)


def weak_scaling():
    rows = []
    for line in lines("weak_scaling"):
        rows.append([line["case"], "more ranks than cores" if line["efficiency"] is None else median(line["rounds"])])
    return table(["axis", "efficiency, the same work a rank"], rows)


def hidden():
    rows = (
        [line["case"], f"{100 * line['sums'] / line['during']:.0f} %", f"{line['hidden']:.2f}"]
        for line in lines("hidden")
    )
    return table(["case", "sums alone / step", "part of them that backward hides"], rows)


def equality():
    rows = []
    for name in sorted(path.stem for path in RESULTS.glob("equivalence*.jsonl")):
        found = lines(name)
        runs = sum(line.get("runs", 1) for line in found)
        largest = max(line["largest_relative_difference"] for line in found)
        rows.append([name, str(len(found)), str(runs), f"{largest:.1e}"])
    return table(["results", "cases", "runs", "largest relative difference from one rank"], rows)


def hdf5():
    found = [line for line in lines("hdf5") if "peer" in line]

    def kind(line):
        return (line["case"].rsplit(", ", 1)[0],)

    return pivot(found, kind, lambda line: line["case"].rsplit(", ", 1)[1], ["samples"])


def reading():
    found = [line for line in lines("hdf5") if "peer" not in line]
    rows = ([line["case"], f"{100 * line['ours']:.2f} %"] for line in found)
    return table(["case", "of the step"], rows)


def checkpoint():
    return pivot(lines("checkpoint"), lambda line: (line["case"],), lambda line: line["peer"], ["case"])


def sequence():
    """With what perfectly divided work would have, of the same pairs: theirs / divided."""
    found = []
    for _, same in itertools.groupby(lines("sequence"), lambda line: (line["benchmark"], line["case"].split(", ")[1:])):
        of_case = list(same)
        best = next(line["theirs_samples"] for line in of_case if line["peer"] == "divided")
        found += of_case
        for line in of_case:
            if line["peer"] != "divided":
                case = ", ".join(["at most", *line["case"].split(", ")[1:]])
                found.append(line | {"case": case, "ours_samples": best})

    def row(line):
        way, length, ranks = line["case"].split(", ")
        return {"sequence": "attention", "sequence_gpt": "a GPT's step"}[line["benchmark"]], length, ranks, way

    return pivot(found, row, lambda line: line["peer"], ["of", "length", "on", "ours"])


def experts():
    def shape_and_ranks(line):
        return line["case"].partition(" ranks")[0].rsplit(", ", 1)

    def row(line):
        return shape_and_ranks(line)[0], line["peer"], products(line)

    def column(line):
        return f"{shape_and_ranks(line)[1]} ranks"

    return pivot(lines("experts"), row, column, ["of", "theirs", PRODUCTS], ["2 ranks", "4 ranks"])


def sequence_memory():
    rows = [
        [*line["case"].split(", "), line["side"], f"{line['peak_mib']:.0f}", f"{line['formula_mib']:.0f}"]
        for line in lines("sequence_memory")
    ]
    return table(["length", "on", "ours", "peak, MiB a rank", "by the formula"], rows)


def zoo():
    """Models of each library. Where a model differs from itself by its last bits, that is beside its difference."""
    found = [*lines("zoo"), *lines("zoo_sharded"), *lines("zoo_gpu")]
    rows = []
    for grid, library in dict.fromkeys((line["grid"], line["model"].split("/")[0]) for line in found):
        chosen = [line for line in found if line["model"].startswith(f"{library}/") and line["grid"] == grid]
        ran = [line for line in chosen if "difference" in line]
        wrong = sum("wrong" in line for line in chosen)
        divided = [line["divided"] for line in ran]
        steady = max(line["difference"] for line in ran if "rounding" not in line)
        shaky = [f"{line['difference']:.1e} ({line['rounding']:.1e})" for line in ran if "rounding" in line]
        counts = len(chosen), len(ran) - wrong, len(chosen) - len(ran), wrong, sum(share >= 0.8 for share in divided)
        held = [line["bytes"][0] / line["bytes"][1] for line in ran if "bytes" in line]
        shares = [f"{100 * min(divided):.0f} %", f"{100 * statistics.median(held):.0f} %" if held else None]
        rows.append([grid, library, *map(str, counts), *shares, f"{steady:.1e}", ", ".join(shaky)])
    header = ["grid", "models of", "tried", "equal", "refused", "wrong", "80 % divided", "least divided"]
    return table([*header, "a rank holds", "largest difference", "ill-conditioned"], rows)


def parallelize():
    """Of blocks through the one line: a row for each model, width and kind of activations, on so many ranks."""

    def row(line):
        *model, ranks = line["case"].split(", ")
        return *(part.removeprefix("width ").removeprefix("activations ") for part in model), ranks

    return pivot(lines("parallelize"), row, lambda line: line["peer"], ["blocks of", "width", "activations", "on"],
                 ["native", "torch", "transformers", "one process"])  # fmt: skip


def planner():
    """Of each job on so many ranks, all grids together."""
    rows = []
    for line in lines("planner"):
        if "regret" in line:
            shares = (line[what].replace(" of ", " / ") for what in ("within_10_percent", "memory_within_7_percent"))
            row = [line["case"], str(line["ranks"]), f"{100 * line['regret']:.1f} %", f"{line['rank_correlation']:.2f}"]
            rows.append([*row, *shares, "yes" if line["bytes_exact"] else "no"])
    header = ["job", "ranks", "regret", "rank correlation", "step within 10 %", "memory within 7 %", "bytes exact"]
    return table(header, rows)


def at_scale():
    """Weak: the rate on the fewest ranks, and what is left of it on more; strong likewise, in seconds."""
    found, rows, header = lines("at_scale"), [], ["machine"]
    for machine in dict.fromkeys(line["machine"] for line in found):
        row, header = [machine], ["machine"]
        for case in ("weak", "strong"):
            known = {line["ranks"]: line for line in found if (line["machine"], line["case"]) == (machine, case)}
            first, *_, last = known
            what = "Tflop/s" if case == "weak" else "s a step"
            row.append(f"{known[first]['rate' if case == 'weak' else 'seconds']:.3g}")
            row += [f"{100 * known[ranks]['efficiency']:.0f} %" for ranks in (8192, last)]
            row.append(known[last]["bound_by"])
            header += [f"{case}: {what} on {first:,}", "8,192", f"{last:,}", "bound by"]
        rows.append(row)
    return table(header, rows)


def contention():
    """plan / SimGrid in seconds of each collective, by network."""
    found = lines("contention")
    names = {
        "ring": "ring", "halving": "recursive halving", "two_level": "two-level", "bruck": "all-to-all, log p rounds",
        "in_turns": "all-to-all, in turns", "at_once": "all-to-all, at once",
    }  # fmt: skip
    rows = {}
    for line in found:
        groups = "all" if line["ranks"] == 1024 else "128, 8 apart" if line["stride"] == 8 else "one of each unit"
        key = names[line["algorithm"]], "64 KiB" if line["bytes"] == 1 << 16 else "256 MiB", groups
        rows.setdefault(key, {})[line["network"]] = f"{line['ratio']:.2f}"
    columns = list(dict.fromkeys(line["network"] for line in found))
    made = ([*key, *(row.get(column) for column in columns)] for key, row in rows.items())
    return table(["collective", "size", "ranks of a group", *columns], made)


TABLES = {
    made.__name__: made
    for made in (
        machine, peers, peers_gpu, gpu_collectives, summary, memory, pipeline, simulator, matmul, layer, elements,
        allreduce, weak_scaling, hidden, equality, hdf5, reading, checkpoint, ampnet, ampnet_steps, ampnet_accuracy,
        ampnet_elastic, sequence, sequence_memory, experts, zoo, parallelize, planner, at_scale, contention,
    )
}  # fmt: skip
