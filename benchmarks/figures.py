"""How lines of benchmarks/results become figures and tables.

One rule makes every figure: the median over the pairs of theirs / ours in seconds, above 1 where hpctrain is faster,
and in brackets the interval in which 95 of 100 medians lie when the pairs are drawn again (bootstrap). Where it holds 1
the two are equal within noise. Of lines that keep no pairs (†) there is the ratio alone.
"""

import json
import statistics
from pathlib import Path

from pairs import interval

RESULTS = Path(__file__).parent / "results"
NO_PAIRS = "†"


def lines(name):
    """The lines of a file of results, but for those that say that a peer was absent, which have no figures."""
    text = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line) for line in text.splitlines()]
    return [line for line in found if "absent" not in line and line.get("ratio", 0) is not None]


def figure(line):
    """
    >>> figure({"ratio": 1.0512})
    '1.05 †'
    >>> figure({"ratio": 2.0, "ours_samples": [1, 1, 1], "theirs_samples": [2, 2, 2]})
    '2.00 (2.00–2.00)'
    >>> figure({"ratio": 1.0, "ours_samples": [1, 1, 1], "theirs_samples": [0.9, 1, 1.1]})
    'equal within noise (0.90–1.10)'
    """
    if "ours_samples" not in line:
        return f"{line['ratio']:.2f} {NO_PAIRS}"
    return median([b / a for a, b in zip(line["ours_samples"], line["theirs_samples"])])


def median(ratios):
    low, high = interval(ratios)
    said = "equal within noise" if low <= 1 <= high else f"{statistics.median(ratios):.2f}"
    return f"{said} ({low:.2f}–{high:.2f})"


def table(header, rows):
    """Markdown; a cell that is None is empty."""
    text = [header, ["---"] * len(header), *([cell or "" for cell in row] for row in rows)]
    return "".join("| " + " | ".join(row) + " |\n" for row in text)


def cells(found, row_of, column_of):
    """{row: {column: figure}} in the order of the lines. A later line takes an earlier one's place."""
    made = {}
    for line in found:
        made.setdefault(row_of(line), {})[column_of(line)] = figure(line)
    return made


def pivot(found, row_of, column_of, titles, columns=None):
    made = cells(found, row_of, column_of)
    columns = columns or sorted({column for row in made.values() for column in row})
    header = [*titles, *map(str, columns)]
    return table(header, ([*row, *(each.get(column) for column in columns)] for row, each in made.items()))
