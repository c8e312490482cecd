"""Damage every format that is read, its structure more than its bytes: each input must be refused, or read right.

    python benchmarks/fuzz.py                              10,000 inputs of each format; about half an hour
    python benchmarks/fuzz.py --number 100 --only index    some formats; prints a line for each, and for each fault
    python benchmarks/fuzz.py --only index --first 1234 --number 1 --keep /tmp/input

An input must be refused by a ValueError that names the file, or read to the right values; in at most MEMORY more than
before; with all files of its folder, and one above it, as they were. Formats are in modules fuzz_PART.py beside this
one, in FORMATS: names -> `Format`. Ends with status 1 where there is a fault.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MEMORY = 256 << 20  # bytes of address space, with what libraries load late
SECONDS = 30  # of one input
BATCH = 100  # inputs of one process
GOOD = ("refused", "read")
PARTS = sorted(path.stem.removeprefix("fuzz_") for path in Path(__file__).parent.glob("fuzz_*.py"))

# in the place of what a file tells
HOSTILE = [
    0, -1, 1, 2, 7, 255, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 0.5, -0.0, 1e308,
    float("nan"), float("inf"), True, False, None, "", "x",
    "../../precious.txt", "/etc/passwd", ".", "..", "a\0b", "é" * 300, [], {},
    [0], [2**40, 2**40], [-1], ["../x"], {"x": 1}, [[[]]], [None],
]  # fmt: skip


@dataclass(frozen=True)
class Format:
    """make(folder) writes valid files; mutate(folder, generator) damages them and says how; read(folder) returns what
    it reads; right(folder, value) tells whether it is what the files hold, mine(name) whether read may change such a
    file."""

    make: Callable[[Path], None]
    mutate: Callable[[Path, random.Random], str]
    read: Callable[[Path], object]
    right: Callable[[Path, object], bool]
    mine: Callable[[str], bool] = lambda name: False


def damage_bytes(path: Path, generator: random.Random) -> str:
    content = bytearray(path.read_bytes())
    place, length = generator.randrange(len(content) + 1), generator.choice([1, 1, 4, 8, 64, 1000])
    how = generator.choice(["flip", "cut", "drop", "repeat", "zero", "fill", "random", "number"])
    if how == "flip" and content:
        content[min(place, len(content) - 1)] ^= 1 << generator.randrange(8)
    elif how == "cut":
        del content[place:]
    elif how == "drop":
        del content[place : place + length]
    elif how == "repeat":
        content[place:place] = content[place : place + length]
    elif how == "number":
        content[place : place + 8] = struct.pack("<q", generator.choice([0, -1, 1 << 31, 1 << 40, 1 << 62]))
    else:
        make = {"zero": bytes, "fill": lambda n: b"\xff" * n, "random": generator.randbytes}[how]
        content[place : place + length] = make(length)
    path.write_bytes(content)
    return f"{path.name}: {how} at {place}, {length}"


def damage_json(tree, generator: random.Random) -> str:
    """One place of a tree, which is changed in place."""
    places = []

    def walk(node, path):
        if len(path) < 6:
            for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
                places.append((node, key, [*path, key]))
                walk(node[key], [*path, key])

    walk(tree, [])
    node, key, path = generator.choice(places)
    how, value = generator.choice(["replace", "replace", "drop", "rename", "nudge"]), generator.choice(HOSTILE)
    if how == "nudge" and type(node[key]) is int:
        node[key] += generator.choice([-1, 1, 8, 1 << 32])
    elif how == "drop":
        del node[key]
    elif how == "rename" and isinstance(node, dict):
        node[str(value)] = node.pop(key)
    else:
        node[key] = value
    return f"{how} {path} {value!r:.60}"


def dumped(tree, generator: random.Random) -> bytes:
    text = json.dumps(tree)
    if generator.randrange(20) == 0:
        text = generator.choice(["[" * 100_000, '{"a":' * 50_000, "", "null", "[]", "9" * 5000, text[: len(text) // 2]])
    return text.encode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000, help="inputs of each format (10,000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (0)")
    parser.add_argument("--only", action="append", help="a format")
    parser.add_argument("--keep", type=Path, help="copy the last input to this folder, damaged as it is")
    options = parser.parse_args()
    formats = {name: each for part in PARTS for name, each in importlib.import_module(f"fuzz_{part}").FORMATS.items()}
    if unknown := set(options.only or ()) - set(formats):
        parser.error(f"unknown formats {', '.join(sorted(unknown))}; known are {', '.join(formats)}")
    os.fsync = lambda descriptor: None  # whether files reach the disk is not the question here, and takes most time
    faults = 0
    for name in options.only or formats:
        start, counts = time.perf_counter(), Counter()
        with tempfile.TemporaryDirectory() as folder:
            formats[name].make(valid := Path(folder, "valid"))
            last = options.first + options.number
            for first in range(options.first, last, BATCH):
                for number, outcome, said in batch(name, formats[name], valid, range(first, min(first + BATCH, last))):
                    counts[outcome if outcome in GOOD else "faults"] += 1
                    if outcome not in GOOD:
                        faults += 1
                        print(json.dumps({"format": name, "number": number, "outcome": outcome, "input": said}))
            if options.keep:
                shutil.copytree(Path(folder, "input"), options.keep)
        seconds = round(time.perf_counter() - start, 1)
        print(json.dumps({"benchmark": "fuzz", "format": name, **counts, "seconds": seconds}), flush=True)
    return 1 if faults else 0


def batch(name: str, format: Format, valid: Path, numbers: range):
    """(number, outcome, what was done to the input) for each number, tried in a process of its own."""
    log = valid.with_name("log")
    while numbers:
        if (pid := os.fork()) == 0:
            with log.open("w") as out:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries' panics
                try:
                    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
                    for number in numbers:
                        signal.alarm(SECONDS)
                        print(json.dumps((number, *attempt(name, format, valid, number, out))), file=out, flush=True)
                finally:
                    out.flush()
                    os._exit(3)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        lines = log.read_text().splitlines()
        done = [json.loads(line) for line in lines if line.startswith("[")]
        yield from done
        if len(done) < len(numbers):  # it died of the next one
            said = lines[-1] if lines and not lines[-1].startswith("[") else ""
            yield numbers[len(done)], f"ended with status {status}", said
            done.append(None)
        numbers = numbers[len(done) :]


def attempt(name, format, valid, number, out) -> tuple[str, str]:
    above = valid.with_name("input")
    shutil.rmtree(above, ignore_errors=True)
    folder = above / "in"
    shutil.copytree(valid, folder, symlinks=True)
    (above / "precious.txt").write_text("precious")
    try:
        said = format.mutate(folder, random.Random(f"{name} {number}"))
    except Exception:
        return traceback.format_exc()[-1500:], "the mutation itself"
    print(said.replace("\n", " ")[:500], file=out, flush=True)
    before = listing(above)
    try:
        value = format.read(folder)
        outcome = "read" if format.right(folder, value) else f"read {str(value)[:200]}"
    except ValueError as error:
        named = str(folder) in str(error)
        outcome = "refused" if named else f"refused without a name: {error}"
    except BaseException:
        outcome = traceback.format_exc()[-1500:]
    after = listing(above)
    for path in {*before, *after}:
        if before.get(path) != after.get(path) and not format.mine(path):
            outcome = f"{path} was touched"
    return outcome, said[:500]


def listing(folder: Path) -> dict:
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            told = path.lstat()
            if not path.is_dir():
                found[str(path.relative_to(folder))] = (told.st_size, told.st_mtime_ns, told.st_ino)
    return found


if __name__ == "__main__":
    sys.exit(main())
