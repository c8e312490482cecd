"""Write the tables of README.md and benchmarks/README.md from the lines in benchmarks/results.

    python benchmarks/tables.py              writes what lies between <!-- table NAME --> and <!-- end -->
    python benchmarks/tables.py --machine    says of this machine that the lines are from it, then does the same
    python benchmarks/tables.py --check      writes nothing; status 1, and the file's name, where it would differ

`figures` has the rule that makes every figure, `each_table` what a table shows.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from each_table import TABLES
from figures import RESULTS

ROOT = Path(__file__).parents[1]
TEXTS = ("README.md", "benchmarks/README.md")
MARKED = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def this_machine():
    import torch
    from mpi4py import MPI

    from hpctrain import cores

    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    flags = {"avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}
    present = Path("/proc/cpuinfo").read_text().split()
    return {
        "processor": ", ".join([
            processor[1] if processor else "unknown", *[name for flag, name in flags.items() if flag in present][:1]
        ]),
        "cores": cores.find().count,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "mpi": MPI.Get_library_version().split(",")[0],
    }  # fmt: skip


def filled(text):
    """The text with every table made anew.

    Raises:
        KeyError: for a table that there is not.
    """
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--machine", action="store_true")
    options = parser.parse_args()
    if options.machine:
        line = json.dumps({"benchmark": "machine", **this_machine()})
        (RESULTS / "machine.jsonl").write_text(line + "\n", encoding="utf-8")
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
