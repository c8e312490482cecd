"""The job scripts under a real Slurm. Ranks start cold in the first test and in the study; in the others, warm."""

import json
import re
import shutil
from pathlib import Path

import pytest
from cluster import TRAIN, final, read, until
from running import ROOT

pytestmark = pytest.mark.job


@pytest.mark.slow
def test_sbatch_of_the_main_job(sbatch, ended, shell, small, jobs, tmp_path):
    """Submitted from another folder; the ranks follow the allocation; the losses are those of `bash`."""
    job = sbatch("--ntasks=2", "--output=job.out", TRAIN, *small)
    # too few tasks for the grid: the job fails, and says why
    refused = sbatch("--ntasks=1", "--output=refused.out", TRAIN, *small)
    assert ended(job) == ("COMPLETED", 0)
    output = (tmp_path / "job.out").read_text()
    assert "grid of 2 ranks" in output
    assert final(output) == final(shell("bash", jobs / "train.sbatch", *small, "run.name=bash"))
    assert ended(refused) == ("FAILED", 2)
    assert "has 2 places, but there are 1 ranks" in (tmp_path / "refused.out").read_text()


def test_submit_over_two_nodes(shell, small, jobs):
    """Followed to its end; listed by `hpctrain jobs`; refused before it is queued where the job would refuse it."""
    hpctrain, script = jobs.parent / ".venv/bin/hpctrain", jobs / "train.sbatch"
    output = shell(hpctrain, "submit", script, "--nodes", "2", *small, "--time", "5", "--follow")
    job = re.match(r"job (\d+)\nlog (.*)", output)
    assert "grid of 2 ranks" in output
    assert f"job {job[1]}: COMPLETED" in output
    assert final(output) == final(Path(job[2]).read_text())
    assert "NumNodes=2" in shell("scontrol", "show", "job", job[1])
    header, line = shell(hpctrain, "jobs").splitlines()
    assert header.split() == ["job", "state", "run", "step", "loss", "tokens/s"]
    assert line.split()[:4] == [job[1], "COMPLETED", "gpt2", "3"]
    assert "unknown key run.stpes" in shell(hpctrain, "submit", script, "run.stpes=3", status=2)
    assert "sbatch refused the job" in shell(hpctrain, "submit", script, "--time=soon", status=2)


@pytest.mark.slow
def test_a_study_as_jobs(shell, small, ended, tmp_path):
    """One job a point; the second waits for the first; both are in the report."""
    (tmp_path / "job.toml").write_text("")
    settings = [word for word in small if not word.startswith("grid.")]
    study = ["scale", str(tmp_path / "job.toml"), *settings, "--ranks=1,2", "--weak", "--repeat=1", "--steps=1"]
    hpctrain = shutil.which("hpctrain")
    output = shell(hpctrain, *study, "--submit", "-o", "study")
    first, second = re.findall(r"job (\d+): [12] ranks", output)
    facts = shell("scontrol", "show", "job", second)
    assert f"Dependency=afterany:{first}" in facts
    assert "NumCPUs=2 " in facts  # one a rank, on as many nodes as that takes
    assert ended(first) == ended(second) == ("COMPLETED", 0)
    results = [json.loads(line) for line in (tmp_path / "study/results.jsonl").read_text().splitlines()]
    assert [(result["ranks"], result["slurm_job"]) for result in results] == [(1, first), (2, second)]
    assert (tmp_path / "study/report.html").read_text().count(">1×1×1×1×1×1×1</td>") == 1
    assert "add --submit, or begin with salloc" in shell(hpctrain, *study, status=2)  # not on the login node


@pytest.mark.slow
def test_jobs_that_end_early(sbatch, ended, shell, small, jobs, tmp_path):
    """A warned job saves, is requeued, and ends with the losses of one that was left alone; one over its time limit and
    a cancelled one say so; the tasks of an array have their own seeds."""
    limited = sbatch("--nodelist=n3", "--wrap=sleep 300")
    # whose ranks have saved before anybody else hears of it
    (tmp_path / "saves.sh").write_text("trap 'exit 85' TERM; scancel $SLURM_JOB_ID; exit 85")
    supervised = f"HPCTRAIN_LAUNCHER=env exec {ROOT}/jobs/supervise.sh bash saves.sh"
    cancelled = sbatch("--nodelist=n3", "--output=cancelled.out", f"--wrap={supervised}")
    common = ["--ntasks=2", jobs / "train.sbatch", *small, "run.steps=250"]
    warned = sbatch("--output=warned.out", *common, "run.name=warned")
    alone = sbatch("--output=alone.out", *common, "run.name=alone")
    array = sbatch("--array=0-1", "--output=array-%a.out", *common, "run.steps=2", "run.seed=%a", "run.name=seed-%a")
    until(lambda: "step " in read(tmp_path / "warned.out"))
    shell("scancel", "--batch", "--signal=USR1", warned)
    shell("scontrol", "update", f"JobId={limited}", "EndTime=now+1seconds")
    assert ended(alone) == ("COMPLETED", 0)
    assert ended(warned) == ("COMPLETED", 0)
    log = read(tmp_path / "warned.out")  # appended to
    assert "stopped by SIGUSR1 after step" in log
    assert f"saved; requeueing job {warned}" in log
    assert "resumed after step" in log
    one, other = (
        [json.loads(line)["loss"] for line in read(tmp_path / f"runs/{name}/metrics.jsonl").splitlines()]
        for name in ("warned", "alone")
    )
    assert len(one) == 250
    assert one == other
    assert "Restarts=1" in shell("scontrol", "show", "job", warned)
    assert ended(array) == ("COMPLETED", 0)
    until(lambda: all("final training loss" in read(tmp_path / f"array-{task}.out") for task in (0, 1)))
    assert final(read(tmp_path / "array-0.out")) != final(read(tmp_path / "array-1.out"))
    assert ended(cancelled)[0] == "CANCELLED"
    assert "Restarts=0" in shell("scontrol", "show", "job", cancelled)
    assert ended(limited)[0] == "TIMEOUT"


@pytest.mark.slow
def test_studies_and_products_as_jobs(sbatch, ended, small, jobs, tmp_path):
    """The ranks of the studies follow the allocation. The least of the products' benchmark: 2 ranks, one round."""
    (tmp_path / "job.toml").write_text("")
    settings = [str(tmp_path / "job.toml"), "--repeat=1", "--steps=1", *small[:1], *small[4:]]
    kinds = ("weak", "strong")
    studies = [
        sbatch("--ntasks=2", f"--output={kind}.out", jobs / f"{kind}_scaling.sbatch", *settings, "-o", tmp_path / kind)
        for kind in kinds
    ]
    least = ("--on=2", "--sizes=256", "--rounds=1", "--dtypes=float32")
    products = sbatch("--ntasks=2", "--output=matmul.out", jobs / "matmul.sbatch", *least)
    for kind, study in zip(kinds, studies):
        assert ended(study) == ("COMPLETED", 0)
        results = [json.loads(line) for line in read(tmp_path / kind / "results.jsonl").splitlines()]
        assert [result["ranks"] for result in results] == [1, 2]
        assert results[1]["flops"] / results[0]["flops"] == (2 if kind == "weak" else 1)
        assert (tmp_path / kind / "report.html").exists()
    assert ended(products) == ("COMPLETED", 0)
    lines = [json.loads(line) for line in read(tmp_path / "matmul.out").splitlines()]
    assert {line["peer"] for line in lines} >= {"one process", "lower bound"}
    assert all(line["ours"] > 0 for line in lines)


def test_what_srun_adds_to_a_clear_error(shell):
    """Nothing; where the ranks do not say why they end, what it knows."""
    start = ["env", "HPCTRAIN_LAUNCHER=srun --nodes=2 --overcommit", ROOT / "jobs/mpirun.sh", "-n", "2", "sh", "-c"]
    error = "hpctrain: error: unknown key run.stpes\n"
    script = f'[ "$SLURM_PROCID" = 0 ] && printf "{error}" >&2; exit 2'
    assert shell(*start, script, status=2) == error
    output = shell(*start, "exit 2", status=2)
    assert sorted(output.splitlines()) == [f"srun: error: n{n + 1}: task {n}: Exited with exit code 2" for n in (0, 1)]
