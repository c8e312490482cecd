"""Train on every grid of 1, 2, 4 and 8 ranks and compare all losses and gradient norms with one rank's.

    python benchmarks/equivalence.py                     all 56 grids of both models; about 25 minutes on 2 cores
    python benchmarks/equivalence.py --model llama --ranks 4       the 15 grids of four ranks, of one
    python benchmarks/equivalence.py --algorithms all --ranks 4    with each matrix product, where it works
    python benchmarks/equivalence.py --sequence --ranks 2,4,8      sequences shared by ring and Ulysses ranks, 128 grids
    python benchmarks/equivalence.py --experts --ranks 1,2,4       a mixture of experts, on each number of them
    python benchmarks/equivalence.py train.clip=0.1      any setting of the configuration

Runs `hpctrain train` in float64, one job for all grids of so many ranks, for ten steps of a model of which nothing
divides: 9 layers, width 15, 3 heads, vocabulary 261, batch 5 in 2 microbatches; a Llama has 6 heads of width 4 in 3
groups, norms of heads, scaled frequencies and an inner width of 21; a mixture is a Llama with 6 experts of width 7 in
three groups, two shared ones, biases that follow the load and an auxiliary loss. Prints one JSON object a grid with
the largest relative difference of its metrics.jsonl from the serial one, the load of each expert among them; exits with
1 when any exceeds 1e-12.
"""

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hpctrain.choices import PRODUCTS, check_product
from hpctrain.grid_shape import all_grids

ROOT = Path(__file__).parents[1]
GOAL = 1e-12
DONE = "equivalence-run-done"
SETTINGS = [
    "model.layers=9", "model.width=15", "model.heads=3", "model.context=16", "model.vocabulary=261", "train.batch=5",
    "train.microbatches=2", "train.lr=1e-2", "precision.compute=fp64", "run.steps=10", "run.eval_batches=1",
    "comm.watchdog=120",
]  # fmt: skip
MODELS = {
    "gpt2": [],
    "llama": [
        "model.kind=llama", "model.heads=6", "model.kv_heads=3", "model.head_width=4", "model.ffn=21",
        "model.qk_norm=true", "model.rope_base=10", "model.rope_scaling=[8, 0.7, 4, 40]",
    ],
}  # fmt: skip
MIXTURE = [
    "model.kind=mixtral", "model.heads=6", "model.kv_heads=3", "model.head_width=4", "model.ffn=21",
    "model.qk_norm=true", "model.rope_base=10", "model.router=sigmoid", "model.experts=6", "model.top_k=3",
    "model.router_groups=[3, 2]", "model.router_scale=2.5", "model.expert_ffn=7", "model.shared_experts=2",
    "model.dense_layers=1", "model.aux_loss=0.5", "model.z_loss=0.01", "model.balance_bias=0.03",
]  # fmt: skip


def command(folder, name, place, overrides):
    """Arguments of `hpctrain` that train on a grid."""
    data, pipeline, tensor, expert = place
    data = list(data) if isinstance(data, tuple) else data
    grid = [f"grid.data={data}", f"grid.pipeline={pipeline}", f"grid.tensor={list(tensor)}", f"grid.expert={expert}"]
    return ["train", str(folder / "config.toml"), *SETTINGS, *overrides, *grid, f"run.name={name}"]


def trained(folder, ranks, commands):
    """Losses and gradient norms of every run, in order, as they end: one job of so many ranks takes them in turn."""
    listed = folder / "commands.json"
    listed.write_text(json.dumps(commands))
    launcher = os.environ.get("MPIRUN", str(ROOT / "jobs/mpirun.sh"))
    job = [launcher, "-n", str(ranks), sys.executable, "-m", "mpi4py", __file__, "--job", str(listed)]
    with subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as started:
        said = []
        for line in started.stdout:
            said.append(line)
            if line.startswith(DONE):
                path = folder / line.split()[1] / "metrics.jsonl"
                records = map(json.loads, path.read_text().splitlines())
                yield [value for record in records for value in compared(record)]
    if started.returncode:
        sys.exit(f"{' '.join(job)}\n{''.join(said[-100:])}")


def compared(record):
    """Of a line of metrics, what no grid may change."""
    load = itertools.chain(*record.get("experts", {}).get("load", []))
    return [*(record[key] for key in ("loss", "grad_norm", "val_loss", "aux_loss") if key in record), *load]


def difference(value, serial):
    return abs(value - serial) / (abs(serial) or 1)


def run(listed):
    """The ranks of such a job."""
    from mpi4py import MPI

    from hpctrain.cli import main

    for arguments in json.loads(Path(listed).read_text()):
        if main(arguments):
            return 1
        gc.collect()  # with a run go its communicators
        MPI.COMM_WORLD.Barrier()
        if MPI.COMM_WORLD.rank == 0:
            print(DONE, arguments[-1].removeprefix("run.name="), flush=True)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="one of the models, instead of both")
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--algorithms", default="agarwal", help="names separated by commas, or all")
    parser.add_argument("--sequence", action="store_true", help="only grids with (replica, ring, ulysses), and dropout")
    parser.add_argument("--experts", action="store_true", help="only a mixture of experts, with every grid.expert")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args()
    if options.job:
        return run(options.job)
    algorithms = PRODUCTS if options.algorithms == "all" else options.algorithms.split(",")
    worst = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.toml").write_text(f'[run]\nout = "{folder}"\n[data]\ntext = ["{ROOT / "LICENSE"}"]\n')
        models = {"mixtral": MIXTURE} if options.experts else MODELS
        for model in [options.model] if options.model else models:
            common = [*models[model], *(["model.dropout=0.2"] if options.sequence else []), *options.overrides]
            (serial,) = trained(folder, 1, [command(folder, f"{model}-serial", (1, 1, (1, 1, 1), 1), common)])
            for ranks in map(int, options.ranks.split(",")):
                grids = list(cases(ranks, algorithms, options.sequence, options.experts))
                commands = [
                    command(folder, f"{model}-{ranks}-{number}", place, [*common, f"tensor.algorithm={algorithm}"])
                    for number, (place, algorithm) in enumerate(grids)
                ]
                for (place, algorithm), values in zip(grids, trained(folder, ranks, commands)):
                    largest = max(difference(*each) for each in zip(values, serial, strict=True))
                    worst = max(worst, largest)
                    data, pipeline, tensor, expert = place
                    experts = f", expert {expert}" if options.experts else ""
                    result = {
                        "benchmark": "equivalence",
                        "case": f"{model}, data {data}, pipeline {pipeline}, tensor {tensor}{experts}, {algorithm}",
                        "values": len(values),
                        "largest_relative_difference": largest,
                        "goal": GOAL,
                    }
                    print(json.dumps(result), flush=True)
    return int(worst > GOAL)


def cases(ranks, algorithms, sequence, experts):
    """((data, pipeline, tensor, expert), algorithm) of every grid of so many ranks on which an algorithm works."""
    for place, algorithm in itertools.product(all_grids(ranks, sequence), algorithms):
        if sequence and place[0][1:] == (1, 1):
            continue  # in the table without --sequence
        try:
            check_product(algorithm, *place[2])
        except ValueError:
            continue
        in_stage = ranks // place[1]
        for expert in range(1, in_stage + 1 if experts else 2):
            if in_stage % expert == 0:
                yield (*place, expert), algorithm


if __name__ == "__main__":
    sys.exit(main())
