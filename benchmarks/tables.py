"""Write the tables of README.md and benchmarks/README.md from the lines in benchmarks/results.

    python benchmarks/tables.py              writes what lies between <!-- table NAME --> and <!-- end -->
    python benchmarks/tables.py --machine peers pipeline
                                             says that these results are from this machine, then does the same
    python benchmarks/tables.py --check      writes nothing; status 1, and the file's name, where it would differ

`figures` has the rule that makes every figure, `each_table` what a table shows.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from each_table import TABLES
from figures import RESULTS, lines

ROOT = Path(__file__).parents[1]
TEXTS = ("README.md", "benchmarks/README.md")
MARKED = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def this_machine():
    import torch
    from mpi4py import MPI

    from hpctrain import cores

    said = Path("/proc/cpuinfo").read_text()
    processor = re.search(r"model name\s*: (.*)", said)
    flags = {"avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON", "amx_tile": "AMX", "sha_ni": "SHA"}
    present = [name for flag, name in flags.items() if flag in said.split()]
    return {
        "processor": ", ".join([processor[1] if processor else "unknown", *present]),
        "cores": cores.find().count,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__.split("+")[0],
        "mpi": MPI.Get_library_version().split(",")[0].split(" package")[0],
    }


def written_by_this_machine(names):
    """The lines of machine.jsonl, with these results taken from the machines that they were of and given to this one.

    Raises:
        ValueError: for results that there are not.
    """
    for name in names:
        if not (RESULTS / f"{name}.jsonl").is_file():
            known = ", ".join(sorted(path.stem for path in RESULTS.glob("*.jsonl")))
            raise ValueError(f"--machine names results, got {name!r}; there are {known}")
    here, others = this_machine(), []
    for line in lines("machine"):
        results = [name for name in line.pop("results") if name not in names]
        if {key: value for key, value in line.items() if key != "benchmark"} == here:
            names = sorted({*names, *results})
        elif results:
            others.append(line | {"results": results})
    return [*others, {"benchmark": "machine", **here, "results": list(names)}]


def filled(text):
    """The text with every table made anew.

    Raises:
        KeyError: for a table that there is not.
    """
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--machine", nargs="+", metavar="RESULTS", help="names of files in benchmarks/results")
    options = parser.parse_args()
    if options.machine:
        written = "".join(json.dumps(line) + "\n" for line in written_by_this_machine(options.machine))
        (RESULTS / "machine.jsonl").write_text(written, encoding="utf-8")
    differ = 0
    for name in TEXTS:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        made = filled(text)
        if made != text:
            differ = 1
            print(f"{name}: " + ("its tables differ from benchmarks/results" if options.check else "written"))
            if not options.check:
                path.write_text(made, encoding="utf-8")
    return differ if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
