"""`hpctrain submit` and `hpctrain jobs` beside a Slurm that does not answer as hoped; tests/jobs has a real one."""

import json
import re
from pathlib import Path

import pytest

from hpctrain.cli import jobs, main
from hpctrain.slurm import follow, submitted

ROOT = Path(__file__).parents[1]
FORGOTTEN = "!slurm_load_jobs error: Invalid job id specified\n"
BUSY = "!slurm_load_jobs error: Socket timed out on send/recv operation\n"


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """scontrol(text, ...) makes it answer so, one after the other, each to stdout or, after "!", as an error."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    script = tmp_path / "scontrol"

    def answers(*texts):
        for number, text in enumerate(texts):
            (tmp_path / f"answer-{number}").write_text(text)
        script.write_text(
            f"""#!/bin/bash
for answer in {tmp_path}/answer-*; do break; done
if read -rn1 first <"$answer" && [ "$first" = ! ]; then tail -c +2 "$answer" >&2; failed=1; else cat "$answer"; fi
rm "$answer"
exit ${{failed:-0}}
"""
        )
        script.chmod(0o755)

    return answers


def test_a_skipped_step_has_no_loss(tmp_path, scontrol):
    record = {"step": 3, "loss": None, "tokens_per_second": 1000}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    scontrol(FORGOTTEN)
    row = jobs._row(submitted.Submitted("7", "train.sbatch", str(tmp_path)))
    assert row == ("7", "ENDED", tmp_path.name, "3", "skipped", "1,000")


def test_a_busy_controller_is_not_the_end_of_a_job(tmp_path, scontrol, monkeypatch, capsys):
    """Nor is a space the end of a log's path."""
    monkeypatch.setattr(follow, "SECONDS", 0)
    log = tmp_path / "the log.out"
    log.write_text("step 1\n")
    facts = f"JobId=7 JobName=a\n   JobState=%s Reason=None\n   ExitCode=%s\n   StdOut={log}\n   Power=\n\nJobId=8\n"
    scontrol(BUSY, facts % ("RUNNING", "0:0"), BUSY, facts % ("FAILED", "3:0"))
    assert follow.follow("7") == 3
    told = capsys.readouterr()
    assert told.out == "step 1\n"
    assert [line.removeprefix("job 7: ").split()[0] for line in told.err.splitlines()] == [
        "no",
        "RUNNING",
        "no",
        "FAILED",
    ]
    scontrol(FORGOTTEN)
    assert follow.follow("7") == 1


def test_a_job_is_noted_whatever_scontrol_says(tmp_path, scontrol, monkeypatch, capsys):
    """Submitted to go on, with a configuration of this folder; there is no scontrol."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/given\necho 7\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    train = str(ROOT / "jobs/train.sbatch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text("[grid]\ndata = 3\n")
    assert main(["submit", train, "my.toml", "grid.pipeline=2", "--resume"]) == 0
    assert capsys.readouterr().out == "job 7\n"
    assert (tmp_path / "given").read_text().split()[1:] == [
        "--ntasks=6",
        train,
        "my.toml",
        "grid.pipeline=2",
        "--resume",
    ]
    assert [job.job for job in submitted.read()] == ["7"]


def test_all_job_scripts_search_for_the_checkout_alike():
    """Slurm runs a copy of a script: the search cannot be in a file beside it."""
    searches = {}
    for path in (ROOT / "jobs").glob("*.sbatch"):
        match = re.search(r"^script=\$0\n.*?^source jobs/env.sh\n", path.read_text(), re.MULTILINE | re.DOTALL)
        searches[path.stem] = [line for line in match[0].splitlines() if not line.startswith("export ")]
    assert {*searches} >= {"train", "test", "weak_scaling", "strong_scaling", "matmul"}
    assert all(search == searches["train"] for search in searches.values())
