"""`hpctrain submit` and `hpctrain jobs` beside a Slurm that does not answer as hoped; tests/jobs has a real one."""

import json

import pytest

from hpctrain.slurm import jobs, registry


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
    scontrol("!slurm_load_jobs error: Invalid job id specified\n")
    row = jobs._row(registry.Submitted("7", "train.sbatch", "", str(tmp_path)))
    assert row == ("7", "ENDED", tmp_path.name, "3", "skipped", "1,000")
