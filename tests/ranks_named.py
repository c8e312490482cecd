"""On how many ranks each MPI test is to run, and whether it did: jobs/test.sbatch asks

    python tests/ranks_named.py numbers    after one rank has collected all tests: the numbers of ranks that they name
    python tests/ranks_named.py check      at the end: how many pairs of test and number passed; ends with 1 where a
                                           test did not run on a number it names, or skipped itself on all of them

Both look into the folder HPCTRAIN_TESTS_RAN, where the first MPI run, on one rank, leaves what it collected, and every
one what became of it.
"""

import collections
import functools
import json
import os
import sys
import zlib
from pathlib import Path

UNNAMED = {1, 2, 4}  # where a test names none
FOLDER = os.environ.get("HPCTRAIN_TESTS_RAN")
ALL = os.environ.get("HPCTRAIN_TESTS") == "all"  # combinations of parameters and of grids on all ranks, and slow tests
outcomes = {}  # of this run's tests: "passed", "failed", or why it was skipped


def named(item):
    """The numbers of ranks that a test names by its marks and its parameters'; without any, its module's."""
    marks = [mark for mark in item.own_markers if mark.name == "ranks"] or list(item.iter_markers("ranks"))
    return set.intersection(*(set(mark.args) for mark in marks)) if marks else UNNAMED


def of(item):
    """The numbers of ranks that it runs on."""
    return {number for number in named(item) if turn(item, number) is not None}


def turn(item, number):
    """Which of the combinations of a test's parameters it is among those that run on this number of ranks; None where
    it is not among them."""
    lists = places(item)
    which = sum(at for at, _ in lists)
    if ALL or number == 1:
        return which
    if len(lists) > 1:
        # as many as the longest list has values: the first values of all lists, the second ones, and so on, lists that
        # end begun anew
        turns = range(max(length for _, length in lists))
        which = next((turn for turn in turns if all(at == turn % length for at, length in lists)), None)
        if which is None:
            return None
    several = sorted(named(item) - {1})
    if len(several) == 1:
        return which
    # Of tests without parameters half take 2 and half 4; of an odd number of numbers the first and the last are taken.
    first = 0 if len(several) % 2 else zlib.crc32(item.originalname.encode())
    return which // 2 if (first + which + several.index(number)) % 2 == 0 else None


def places(item):
    """Of each list of a test's parameters: the number of its value in it, and how many there are."""
    import pytest

    found = []
    for mark in item.iter_markers("parametrize"):
        names, values = mark.args[:2]
        names = names.split(",") if isinstance(names, str) else names
        given = [item.callspec.params[name.strip()] for name in names]
        each = [v.values if isinstance(v, type(pytest.param())) else v if len(names) > 1 else (v,) for v in values]
        found.append((next(n for n, v in enumerate(each) if all(a is b for a, b in zip(v, given))), len(each)))
    return found


def may_have_tests(path, ranks):
    """Whether a file has MPI tests, for this number of ranks as far as that is known."""
    if FOLDER and (Path(FOLDER) / "named.json").exists():
        return path.name in files(ranks)
    return path.name.startswith("test_") and "mark.mpi" in path.read_text(encoding="utf-8")


@functools.cache  # it is asked for every file, and the list is long
def files(ranks):
    """Names of those that have tests for this number of ranks."""
    return {Path(name.split("::")[0]).name for name, test in read().items() if ranks in test["ranks"]}


def write(tests, ranks):
    """Of the first run, on one rank, which collects all: {test: numbers, and whether the machine may lack what it
    needs}. Those that follow collect only what is for their own number."""
    if FOLDER and ranks == 1 and not (Path(FOLDER) / "named.json").exists():
        named = {
            item.nodeid: {"ranks": sorted(numbers), "lacks": item.get_closest_marker("skipif") is not None}
            for item, numbers in tests.items()
            if numbers  # else other combinations of the parameters have its values
        }
        (Path(FOLDER) / "named.json").write_text(json.dumps(named))


def note(report):
    if report.skipped:
        outcomes[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed or report.nodeid not in outcomes:
        outcomes[report.nodeid] = report.outcome


def write_outcomes(ranks):
    if FOLDER:
        (Path(FOLDER) / f"on-{ranks}.json").write_text(json.dumps(outcomes))


def read():
    return json.loads((Path(FOLDER) / "named.json").read_text())


def numbers():
    return sorted({ranks for test in read().values() for ranks in test["ranks"]})


def check():
    """Prints how many passed, what was skipped and why; returns the number of tests that did not do as they say."""
    ran = {int(path.stem.removeprefix("on-")): json.loads(path.read_text()) for path in Path(FOLDER).glob("on-*.json")}
    passed, skipped, wrong = 0, collections.Counter(), []
    for name, test in read().items():
        became = {ranks: ran.get(ranks, {}).get(name, "not run") for ranks in test["ranks"]}
        passed += list(became.values()).count("passed")
        skipped.update(why for why in became.values() if why not in ("passed", "failed", "not run"))
        bad = [f"{why} on {ranks}" for ranks, why in became.items() if why in ("failed", "not run")]
        if not bad and "passed" not in became.values() and not test["lacks"]:
            bad = [f"skipped on all of {', '.join(map(str, became))} ranks"]
        wrong += [f"{name}: {', '.join(bad)}"] if bad else []
    print(f"MPI tests: {len(read())} tests, {passed} pairs of a test and a number of ranks passed")
    for why, times in skipped.most_common():
        print(f"  {times} skipped: {why}")
    for line in wrong:
        print(f"  WRONG: {line}")
    return len(wrong)


if __name__ == "__main__":
    if sys.argv[1] == "numbers":
        print(*numbers())
    else:
        sys.exit(check() > 0)
