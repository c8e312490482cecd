"""What a job of 1,000 and of 10,000 ranks costs its busiest rank besides computing, counted without such a machine.

    python benchmarks/ten_thousand.py                         all parts, 1,000 and 10,000 ranks
    python benchmarks/ten_thousand.py --parts comm --ranks 4096

Each part is a module ten_thousand_PART.py beside this one with `rows(ranks)`, which runs the package's own bookkeeping
for one rank of that many, with a stand-in for the others, and returns dictionaries:

    case     what is counted, in a few words
    value    of the busiest rank: messages, bytes, seconds, lines, ...
    unit     of the value
    limit    what the value must not exceed, or None for a figure without one

Prints one JSON object a line; ends with status 1 where a value is above its limit.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

PARTS = sorted(path.stem.removeprefix("ten_thousand_") for path in Path(__file__).parent.glob("ten_thousand_*.py"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS, help=f"of {','.join(PARTS)}")
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[1_000, 10_000])
    options = parser.parse_args()
    exceeded = 0
    for part in options.parts:
        rows = importlib.import_module(f"ten_thousand_{part}").rows
        for ranks in options.ranks:
            for row in rows(ranks):
                exceeded += row["limit"] is not None and row["value"] > row["limit"]
                print(json.dumps({"benchmark": "ten_thousand", "part": part, "ranks": ranks, **row}), flush=True)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
