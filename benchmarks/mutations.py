"""Break the code on purpose, one small change at a time, and see that the tests named for it notice.

    python benchmarks/mutations.py                          all of them, at most 40 minutes on 2 cores
    python benchmarks/mutations.py --only comm --only zero  those whose file or text has one of these words
    python benchmarks/mutations.py --since HEAD~5           those of files that changed since then

The list is in benchmarks/mutations/*.toml:

    [[mutation]]
    file = "hpctrain/comm/collectives.py"
    text = "total += arriving"          # stands once in the file
    replacement = "total = arriving"
    tests = ["tests/test_comm.py"]      # of which at least one must fail, or not end within --limit seconds
    ranks = 2                           # 0 for tests without MPI
    equivalent = "why no test can notice"  # instead of tests

All tests are run without any change first. Of a mutation's tests the one that noticed it in results/mutations.jsonl is
tried before the others. Prints one JSON object a line: `{"benchmark": "mutations", "file", "text", "replacement",
"caught", "by", "seconds"}`; ends with 1 if a mutation was not noticed.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/mutations.jsonl"
USAGE = {2, 4, 5}  # pytest's statuses for tests that could not be collected, or that there are none of
FAILURE = re.compile(r"^(?:FAILED|ERROR|=== rank \d+ of \d+:) (tests/\S+?::\w+)", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="part of a file's name or of a text"
    )
    parser.add_argument("--since", metavar="COMMIT", help="only files that changed since this commit")
    parser.add_argument("--jobs", type=int, default=2, help="mutations tried at once (2)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of the tests of one mutation (120)")
    options = parser.parse_args()
    mutations = chosen(listed(), options)
    with tempfile.TemporaryDirectory() as folder, warm(Path(folder) / "warm"):
        first = copy(Path(folder) / "0")
        if not pass_unchanged(first, mutations):
            return 2
        # With the bytecode that the run just made, since only what is mutated is then compiled again.
        free = [first, *(shutil.copytree(first, Path(folder) / str(n)) for n in range(1, options.jobs))]
        noticed = noticed_before()

        def attempt(mutation):
            where = free.pop()
            try:
                return mutation, *try_one(where, mutation, options.limit, noticed.get(key(mutation)))
            finally:
                free.append(where)

        survivors = 0
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            tried = [m for m in mutations if "equivalent" not in m]
            for done in concurrent.futures.as_completed([pool.submit(attempt, m) for m in tried]):
                mutation, caught, how, seconds = done.result()
                survivors += not caught
                shown = dict(zip(("file", "text", "replacement"), key(mutation), strict=True))
                row = {"benchmark": "mutations", **shown, "caught": caught, "by": how, "seconds": round(seconds, 1)}
                print(json.dumps(row), flush=True)
    excused = len(mutations) - len(tried)
    print(f"{len(tried) - survivors} of {len(tried)} caught; {excused} more change nothing", file=sys.stderr)
    return int(survivors > 0)


def listed() -> list[dict]:
    """All mutations, each of which changes one place of a file into something that Python can still read."""
    found = []
    for path in sorted((ROOT / "benchmarks/mutations").glob("*.toml")):
        for mutation in tomllib.loads(path.read_text())["mutation"]:
            where = f"{path.name}: {mutation['file']}: {mutation['text']!r}"
            if (count := (ROOT / mutation["file"]).read_text().count(mutation["text"])) != 1:
                raise SystemExit(f"{where} stands there {count} times instead of once")
            if mutation["file"].endswith(".py"):
                try:
                    ast.parse(mutated(ROOT, mutation))
                except SyntaxError as error:
                    raise SystemExit(f"{where}: not Python any more: {error}") from error
            if not mutation.get("tests") and not mutation.get("equivalent"):
                raise SystemExit(f"{where} names no tests")
            found.append(mutation)
    return found


def chosen(mutations: list[dict], options) -> list[dict]:
    if options.since:
        command = ["git", "diff", "--name-only", options.since]
        changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        mutations = [m for m in mutations if m["file"] in changed]
    if options.only:
        mutations = [m for m in mutations if any(word in m["file"] + m["text"] for word in options.only)]
    return mutations


def key(mutation: dict) -> tuple[str, str, str]:
    return mutation["file"], mutation["text"], mutation["replacement"]


def noticed_before() -> dict[tuple[str, str, str], str]:
    """The test that noticed a mutation last time."""
    rows = map(json.loads, RESULTS.read_text().splitlines()) if RESULTS.exists() else ()
    return {key(row): row["by"] for row in rows if row["by"].startswith("tests/")}


def mutated(root: Path, mutation: dict) -> str:
    return (root / mutation["file"]).read_text().replace(mutation["text"], mutation["replacement"])


def copy(folder: Path) -> Path:
    """The files of the checkout, as they are now, which git knows there too: some tests ask it for them."""
    names = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, names.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    for command in ("init", "-q"), ("add", "-A"):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


@contextlib.contextmanager
def warm(path: Path):
    """Programs are forked from one that has imported all other packages: tests/warm.py."""
    command = [sys.executable, str(ROOT / "tests/warm.py"), "--serve", str(path), "--others"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        os.environ["HPCTRAIN_WARM"] = str(path)
        yield
        server.stdin.close()


def pass_unchanged(folder: Path, mutations: list[dict]) -> bool:
    """Whether the tests pass on the code as it is; a test that fails anyway notices nothing."""
    good = True
    for ranks in sorted({m["ranks"] for m in mutations if "equivalent" not in m}):
        tests = sorted({test for m in mutations if m.get("ranks") == ranks for test in m.get("tests", ())})
        status, output = run(folder, tests, ranks, 1200)
        if status:
            print(f"without any change, on {ranks} ranks: status {status}\n{output[-4000:]}", file=sys.stderr)
            good = False
    return good


def try_one(folder: Path, mutation: dict, limit: float, noticed: str | None = None) -> tuple[bool, str, float]:
    """Whether the tests notice, which of them (or how), and in how many seconds."""
    path, ranks = folder / mutation["file"], mutation["ranks"]
    original, times, start = path.read_text(), path.stat(), time.monotonic()
    try:
        path.write_text(mutated(folder, mutation))
        status, output = run(folder, [noticed], ranks, limit, "1") if noticed else (0, "")
        if status is not None and not FAILURE.search(output):
            status, output = run(folder, mutation["tests"], ranks, limit, "1")
    finally:
        path.write_text(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    seconds = time.monotonic() - start
    if status is None:
        return True, "no end", seconds
    failed = FAILURE.search(output)
    if status in USAGE and not ranks and not failed:
        raise SystemExit(f"{mutation['tests']} cannot be run: status {status}\n{output[-2000:]}")
    return status != 0, failed[1] if failed else f"status {status}", seconds


def run(folder: Path, tests: list[str], ranks: int, limit: float, no_bytecode: str = "") -> tuple[int | None, str]:
    """Status and output; no status where it did not end in time. A mutation leaves no bytecode behind."""
    python = [sys.executable, "-IS", str(folder / "tests/warm.py"), "python"]
    command = [*python, "-m", "pytest", "-x", "-q", "--color=no", "-p", "no:cacheprovider", *tests]
    if ranks:
        mpirun = str(folder / "jobs/mpirun.sh")
        command = [mpirun, "-n", str(ranks), *python, "-m", "mpi4py", *command[len(python) :], "--only-mpi"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": no_bytecode}
    environment |= {"MPIRUN": str(folder / "jobs/mpirun.sh"), "HPCTRAIN_TESTS": "all"}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return status, log.read()


if __name__ == "__main__":
    sys.exit(main())
