"""What a save and a run folder do to the disk, in order, as the system saw it: a power cut at any point loses nothing
that was said to be there. Packing has its own in test_packing.py."""

import re
import subprocess
import sys
from pathlib import Path

CALLS = "openat,write,pwrite64,ftruncate,fsync,fdatasync,rename,renameat2,mkdir,symlink,unlink,unlinkat,rmdir"

SAVE = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from checkpoint_checks import Alone, Numbers
from hpctrain.checkpoint import Checkpointer
saver = Checkpointer(Path({root!r}), Alone(), keep=1, background=False)
assert saver.save({step}, Numbers(1), {{}}) is None
"""

RUN = """
from hpctrain.config import load_config
from hpctrain.train.run_folder import RunFolder
run = RunFolder(load_config(overrides=['run.out={root}', 'run.name=run']))
run.begin(0)
run.log({{"step": 1}})
run.sync()
run.begin(1)
run.close()
"""


def disk_calls(folder, code):
    """ "CALL FILE ..." of all that changes the folder, those that follow on the same file once."""
    log = folder.with_name("strace.log")
    command = ["strace", "-f", "-y", "-s", "4", "-e", f"trace={CALLS}", "-o", log, sys.executable, "-c", code]
    subprocess.run(command, check=True)
    seen, begun = [], {}
    for line in log.read_text().splitlines():
        thread = line.split(maxsplit=1)[0]
        if line.endswith("<unfinished ...>"):  # another thread's call comes between
            begun[thread] = line.removesuffix("<unfinished ...>")
            continue
        if " resumed>" in line:
            line = begun.pop(thread) + line.split(" resumed>", 1)[1]
        found = re.search(r"(?:^\d+ +)(\w+)\((.*)\) += (\d+)", line)
        if not found or str(folder) not in line or (found[1] == "openat" and "O_CREAT" not in line):
            continue
        call = {"pwrite64": "write", "ftruncate": "write", "openat": "create"}.get(found[1], found[1].rstrip("at2"))
        paths = re.findall(r'"([^"]+)"|\d<([^>]+)>', found[2])
        names = [b or a for a, b in paths if (b or a).startswith(str(folder)) or call == "symlink"]
        said = " ".join([call, *(name.replace(f"{folder}/", "").replace(str(folder), "root") for name in names)])
        if not seen or seen[-1] != said:
            seen.append(said)
    return seen


def test_a_checkpoint(tmp_path):
    """The second one, which takes the place of the first: all that it is made of is on disk before it has its name, its
    name before anything older goes."""
    root = tmp_path / "checkpoints"
    for step in (1, 2):
        seen = disk_calls(root, SAVE.format(tests=str(Path(__file__).parents[1]), root=str(root), step=step))
    group = "step-2.tmp/ranks-00000"
    written = [f"{group}/rank-00000.h5", f"{group}/rank-00000.json", group, f"{group}/holders.bin",
               f"{group}/manifest.json", group, "step-2.tmp/holders.bin", "step-2.tmp/manifest.json",
               "step-2.tmp/manifest.sha256", "step-2.tmp"]  # fmt: skip
    expected = ["mkdir step-2.tmp", f"mkdir {group}"]
    for path in written:
        expected += [f"fsync {path}"] if path in (group, "step-2.tmp") else [
            f"create {path}", f"write {path}", f"fsync {path}"
        ]  # fmt: skip
    expected += ["rename step-2.tmp step-2", "fsync root"]
    expected += ["symlink step-2 latest.tmp", "rename latest.tmp latest", "fsync root"]
    assert seen[: len(expected)] == expected
    rest = seen[len(expected) :]
    assert rest[0] == "rename step-1 step-1.tmp"
    assert all(re.match("unlink|rmdir", call) for call in rest[1:]), rest


def test_the_first_checkpoint_s_folder(tmp_path):
    """The names of folders that are made for it."""
    root = tmp_path / "runs/run/checkpoints"
    code = SAVE.format(tests=str(Path(__file__).parents[1]), root=str(root), step=1)
    seen = disk_calls(tmp_path / "runs", code)
    assert seen[:6] == [
        "mkdir root", "mkdir run", "fsync root", "mkdir run/checkpoints", "fsync run",
        "mkdir run/checkpoints/step-1.tmp",
    ]  # fmt: skip


def test_a_run_folder(tmp_path):
    """Settings and metrics are whole at any moment, and on disk where a checkpoint counts on them."""
    (tmp_path / "runs").mkdir()
    seen = disk_calls(tmp_path / "runs", RUN.format(root=tmp_path / "runs"))
    begin = [
        "create run/config.toml.tmp", "write run/config.toml.tmp", "fsync run/config.toml.tmp",
        "rename run/config.toml.tmp run/config.toml",
        "create run/metrics.jsonl.tmp", "fsync run/metrics.jsonl.tmp",
        "rename run/metrics.jsonl.tmp run/metrics.jsonl", "fsync run", "create run/metrics.jsonl",
    ]  # fmt: skip
    again = [*begin[:5], "write run/metrics.jsonl.tmp", *begin[5:]]
    assert [call for call in seen if ".run.lease" not in call] == [
        "mkdir run", "fsync root", *begin, "write run/metrics.jsonl", "fsync run/metrics.jsonl", *again
    ]  # fmt: skip
