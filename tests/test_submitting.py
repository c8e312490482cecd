"""`hpctrain submit` and `hpctrain jobs` beside a Slurm that does not answer as hoped; tests/jobs has a real one."""

import argparse
import json
import re
import resource
import shlex
import signal
from pathlib import Path

import pytest
from test_plan_learn import figures, written

from hpctrain import plan
from hpctrain.cli import jobs, main
from hpctrain.cli.arguments import add_resume
from hpctrain.config import load_config
from hpctrain.plan import predict, search
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
    record = {"step": 3, "loss": None, "tokens_per_second": 1000, "job": "Slurm job 7"}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "jobs").write_text("Slurm job 7\n")
    scontrol(FORGOTTEN)
    row = jobs._row(submitted.Submitted("7", "train.sbatch", str(tmp_path)))
    assert row == ("7", "ENDED", tmp_path.name, "3", "skipped", "1,000")


def test_figures_are_those_of_the_job(tmp_path, scontrol):
    """Four jobs of one run name: 6 set aside what 5 had trained, and 7 resumed it; 8 failed before its first step."""

    def write(folder, jobs, *records):
        folder.mkdir()
        (folder / "jobs").write_text("".join(f"Slurm job {job}\n" for job in jobs))
        lines = [
            {"step": step, "loss": loss, "tokens_per_second": 10, "job": f"Slurm job {job}", "more": "x" * more}
            for step, loss, job, more in records
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    write(tmp_path / "mine.1", [5], (1, 5.5, 5, 0), (2, 5.25, 5, 0))
    write(tmp_path / "mine", [6, 7], (1, 6.5, 6, 0), (2, 7.5, 7, 40_000), (3, 7.25, 7, 40_000))
    write(tmp_path / "mine.old", [55], (1, 1.0, 55, 0))
    scontrol(*[FORGOTTEN] * 4)
    rows = [jobs._row(submitted.Submitted(str(job), "train.sbatch", str(tmp_path / "mine"))) for job in (5, 6, 7, 8)]
    assert [row[3:5] for row in rows] == [("2", "5.2500"), ("1", "6.5000"), ("3", "7.2500"), ("", "")]


def test_jobs_are_watched_until_all_have_ended(tmp_path, scontrol, monkeypatch, capsys):
    """Each list once, where it differs from the one before."""
    monkeypatch.setattr(jobs.client, "require", lambda instead: None)
    running, ended = (f"JobId=7 JobState={state} Reason=None ExitCode=0:0\n" for state in ("RUNNING", "COMPLETED"))
    scontrol(running, running, ended, "no further question")
    submitted.add([submitted.Submitted("7", "train.sbatch", None)])
    assert main(["jobs", "--watch", "0.01"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [["job", "state"], ["7", "RUNNING"], ["job", "state"], ["7", "COMPLETED"]]
    assert [path.name for path in tmp_path.glob("answer-*")] == ["answer-3"]
    for last in ("0", "-1"):
        assert main(["jobs", "--last", last]) == 2
        assert f"--last must be at least 1, got {last}" in capsys.readouterr().err
    for interval, said in {"0": "above 0 and at most 86400.0, got 0", "inf": "got inf", "x": "invalid seconds"}.items():
        with pytest.raises(SystemExit):
            main(["jobs", "--watch", interval])
        assert said in capsys.readouterr().err


def test_a_busy_controller_is_not_the_end_of_a_job(tmp_path, scontrol, monkeypatch, capsys):
    """Nor is a space the end of a log's path."""
    monkeypatch.setattr(follow, "SECONDS", 0)
    log = tmp_path / "the log.out"
    log.write_text("step 1\n")
    facts = f"JobId=7 JobName=a\n   JobState=%s Reason=None\n   ExitCode=%s\n   StdOut={log}\n   Power=\n\nJobId=8\n"
    scontrol(BUSY, facts % ("RUNNING", "0:0"), BUSY, facts % ("FAILED", "3:0"))
    assert follow.follow("7") == 3
    printed = capsys.readouterr()
    assert printed.out == "step 1\n"
    assert [line.removeprefix("job 7: ").split()[0] for line in printed.err.splitlines()] == [
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
    assert main(["submit", train, "my.toml", "grid.pipeline=2", "--resume=auto"]) == 0
    assert capsys.readouterr().out == "job 7\n"
    assert (tmp_path / "given").read_text().split()[1:] == [
        "--ntasks=6",
        train,
        "my.toml",
        "grid.pipeline=2",
        "--resume=auto",
    ]
    assert [job.job for job in submitted.read()] == ["7"]


def test_a_full_home_folder(queue, capsys):
    """Slurm has the job all the same; a line that was cut is left out, and the next one is whole."""
    assert queue() == 0
    noted = submitted.read()
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (submitted.path().stat().st_size + 20, usual[1]))
    capsys.readouterr()
    status = queue()
    resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    signal.signal(signal.SIGXFSZ, handler)
    assert status == 0
    said = capsys.readouterr()
    assert said.out == "job 7\n"
    assert "WARNING: `hpctrain jobs` will not show job 7: [Errno 27] File too large" in said.err
    assert submitted.read() == noted
    assert queue() == 0
    assert submitted.read() == noted * 2
    with submitted.path().open("a") as file:
        file.write('[]\n{"job": "8"}\n')
    assert submitted.read() == noted * 2


def test_a_study_with_a_full_home_folder(tmp_path, queue, monkeypatch, capsys):
    """All its points are submitted, as Slurm has the first by then."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a.txt"))
    study = ["scale", str(tmp_path / "run.toml"), f"data.text={tmp_path}/a.txt", "--ranks=1,2", "--weak", "--submit"]
    assert main([*study, "-o", str(tmp_path / "study")]) == 0
    said = capsys.readouterr()
    assert re.findall(r"job 7: \d ranks", said.out) == ["job 7: 1 ranks", "job 7: 2 ranks"]
    assert said.err.count("WARNING: `hpctrain jobs` will not show job 7: ") == 2


@pytest.mark.parametrize("chosen", ["", "moon"])
def test_a_script_of_one_s_own(tmp_path, queue, monkeypatch, capsys, chosen):
    """Beside which there are no sites: they are those of the command."""
    monkeypatch.setenv("HPCTRAIN_SITE", chosen)
    script = tmp_path / "own.sbatch"
    script.write_text("#!/bin/bash\n")
    status, said = main(["submit", str(script), "--dry-run"]), capsys.readouterr()
    if chosen:
        assert status == 2
        assert f"HPCTRAIN_SITE=moon, but there is no {ROOT}/jobs/sites/moon.env; known are frontier, gen" in said.err
    else:
        assert (status, said.out.split()[-1]) == (0, str(script))


@pytest.mark.parametrize(
    "options", ["--signal=B:USR1@120", "--signal B:USR1@120", "--time=5 --signal=B:USR1@120 --nodes=1"]
)
def test_a_job_that_is_warned_at_its_start(tmp_path, queue, capsys, options):
    """It would be requeued for ever; what sbatch does not read it refuses itself."""
    with (tmp_path / "jobs/train.sbatch").open("a") as script:
        script.write(f"#SBATCH {options}\n")
    for limit in ("3", "2:01"):
        assert queue("--time", limit) == 2
        said = capsys.readouterr().err
        assert f"--time must be above 3:00, got {limit}: train.sbatch asks to be warned 120 s before its end" in said
    assert submitted.read() == []
    for limit in ("3:01", "0", "soon"):
        assert queue("--time", limit) == 0
    own = tmp_path / "jobs/own.sbatch"
    for line, status in (("", 0), ("#SBATCH --requeue\n", 2)):
        own.write_text(f"#SBATCH {options}\n{line}")
        assert main(["submit", str(own), "--time", "3"]) == status


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """An sbatch that takes every job, and a script in a checkout of its own, where `config` is written to."""
    for name, text in (("sbatch", "#!/bin/sh\necho 7\n"), ("jobs/train.sbatch", "#HPCTRAIN config=run.toml\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "jobs/sites").mkdir()
    (tmp_path / "jobs/sites/generic.env").write_text("")
    (tmp_path / "run.toml").write_text('[data]\ntext = ["a.txt"]\n[model]\ncontext = 8\n')
    (tmp_path / "a.txt").write_text("hello world\n" * 20)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return lambda *overrides: main(["submit", str(tmp_path / "jobs/train.sbatch"), *overrides])


def test_what_the_job_would_refuse_is_refused_before_it_is_queued(tmp_path, queue, capsys):
    """From another working directory than the checkout's, whose paths are meant."""
    from hpctrain.data import pack

    pack([str(tmp_path / "a.txt")], tmp_path / "a.h5")
    cases = {
        "data.text=b.txt": "b.txt does not exist; name files, directories or python-stdlib",
        "data.path=b.h5": "b.h5 does not exist; restore it",
        "data.path=a.h5 data.text=jobs/train.sbatch": "data.path = a.h5 was not packed from data.text",
        "data.path=a.h5 model.vocabulary=100": "use model.vocabulary=257 or more",
        "model.vocabulary=100": "use model.vocabulary=257 or more",
        "data.path=a.h5 model.context=200": "too few for a training and a validation sample",
        "data.tokenizer=t.json": "data.tokenizer must be",
        "model.init=b": "model.init = b holds no readable config.json",
        "--resume": "there are no checkpoints in runs/run",
        "data_parallel.method=parameter_server": "data_parallel.servers must leave a worker",
        "data_parallel.method=local_sgd precision.compute=bf16": "has weights and gradients in one precision",
        "pipeline.schedule=pipedream data_parallel.method=zero1 train.clip=0 model.tied=false": "works with",
    }
    for overrides, message in cases.items():
        assert queue(*overrides.split()) == 2, overrides
        assert message in capsys.readouterr().err, overrides
    assert submitted.read() == []
    for overrides in ("run.steps=7", "data.path=a.h5 data.text=a.txt", "--resume=auto"):
        assert queue(*overrides.split()) == 0, overrides
    assert not (tmp_path / "runs").exists()  # nothing was packed
    (tmp_path / "runs/run/checkpoints/step-3").mkdir(parents=True)
    assert queue("model.init=b", "--resume") == 0  # a checkpoint has the weights
    assert queue("model.init=b", "--resume=auto") == 2  # a new job begins anew


def test_a_plan_is_part_of_the_job(tmp_path, queue, capsys, monkeypatch):
    """Its settings are the script's arguments: in Slurm's record, and in the run's configuration."""
    monkeypatch.chdir(tmp_path)
    planned = ["--plan", "auto", "--machine", "cpu-cluster", "--dry-run", "run.steps=7"]
    assert queue(*planned, "--ranks", "4") == 0
    words = shlex.split(capsys.readouterr().out)
    assert {"--ntasks=4", "--nodes=1"} <= {*words}
    given = [word for word in words if re.match(r"\w+\.\w+=", word)]
    assert "run.machine=cpu-cluster" in given
    made = load_config(tmp_path / "run.toml", given)
    assert made.ranks == 4
    assert made.run.steps == 7
    best = search(load_config(tmp_path / "run.toml", ["run.steps=7"]), 4, "cpu-cluster", 1)[0]
    assert predict(made, "cpu-cluster") == best
    # a machine of one node, on which more ranks than cores were measured
    machine = written(tmp_path, figures(1), figures(2), figures(4))
    assert queue("--plan", "auto", "--machine", str(machine), "--dry-run", "--ranks", "4") == 0
    assert {"--ntasks=4", "--nodes=1"} <= {*shlex.split(capsys.readouterr().out)}
    # whole nodes of the machine, measured by a file here
    source = Path(plan.__file__).parent / "machines/cpu-cluster.toml"
    (tmp_path / "mine.toml").write_text(
        source.read_text().replace("node = 64", "node = 2").replace("unit = 64", "unit = 2")
    )
    assert queue(*planned, "--machine", "mine.toml", "--nodes", "3") == 0
    words = shlex.split(capsys.readouterr().out)
    assert {"--ntasks=6", "--nodes=3", f"run.machine={tmp_path / 'mine.toml'}"} <= {*words}
    assert queue(*planned, "--machine", "mine.toml", "--ranks", "3") == 0  # else all on the node of the script
    assert {"--ntasks=3", "--nodes=2"} <= {*shlex.split(capsys.readouterr().out)}


def test_a_model_is_that_of_the_checkout(tmp_path, queue, capsys, monkeypatch):
    """Where the job runs; of the folder from which it is submitted it knows nothing."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/only_here.py").write_text("def build(model, key): raise AssertionError\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend("")
    assert queue("model.kind=only_here:build") == 2
    assert "cannot import only_here" in capsys.readouterr().err


def test_a_plain_model_recomputes_nothing(tmp_path, queue, capsys, monkeypatch):
    (tmp_path / "plain_model.py").write_text("def build(model): raise AssertionError\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert queue("model.kind=plain_model:build", "train.recompute=block") == 2
    assert "train.recompute = block is for the models of hpctrain, got model.kind = plain" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "resume"),
    [
        ([], ""), (["--resume=auto"], "auto"), (["--resume"], "must"),
        (["--resume", "--resume=auto"], "must"), (["--resume=auto", "--resume"], "must"),
    ],
)  # fmt: skip
def test_a_requeued_job_that_was_to_resume(given, resume):
    """It must not begin anew as it was requeued before it had come to its run folder."""
    parser = argparse.ArgumentParser()
    add_resume(parser)
    assert parser.parse_args(given).resume == resume


def test_what_no_plan_can_do(tmp_path, queue, capsys):
    """Refused before anything is queued."""
    (tmp_path / "small.toml").write_text(
        (Path(plan.__file__).parent / "machines/cpu-cluster.toml").read_text().replace("memory = 4e9", "memory = 4e8")
    )
    auto = ["--plan", "auto", "--machine", "cpu-cluster"]
    one_node = ["--plan", "auto", "--machine", str(written(tmp_path, figures(1), figures(2)))]
    cases = [
        (["--plan", "auto", "--machine", "summit"], "there is no machine 'summit'"),
        (["--plan", "auto"], "there is no machine file here.toml: `hpctrain machine -o here.toml` measures"),
        (["--plan", "auto", "--machine", str(tmp_path / "small.toml"), "model.width=2048"], "GiB more, with grid.data"),
        ([*one_node, "--nodes", "4"], "machine here is one node of 2 ranks, and nothing is known between"),
        ([*one_node, "--ranks", "4"], "got 4 ranks on 2 nodes: run `hpctrain machine` in an allocation of two"),
        ([*auto, "--ranks", "0"], "--ranks and --top must be at least 1"),
        ([*auto, "--array", "2-3", "model.layers=%a"], "one plan for all tasks of --array"),
        (["--machine", "cpu-cluster"], "--machine and --ranks are for --plan auto"),
        (["--ranks", "0"], "--machine and --ranks are for --plan auto"),
        (["--precision", "bf16"], "--precision and --keep are for --plan auto"),
        (["--keep", "grid.tensor"], "--precision and --keep are for --plan auto"),
        (["run.machine=summit"], "there is no machine 'summit'"),
    ]
    for words, message in cases:
        assert queue(*words) == 2, words
        assert message in capsys.readouterr().err, words
    assert submitted.read() == []


def test_tasks_of_one_run_folder(queue, capsys):
    """Of which all but the first would find it taken; one after the other they may go on with one run."""
    assert queue("--array", "0-2", "run.seed=%a") == 2
    assert "3 tasks of --array 0-2 have one run folder, runs/run; give each its own, by run.name=run-%a" in (
        capsys.readouterr().err
    )
    assert submitted.read() == []
    assert queue("--array", "0-2", "run.seed=%a", "run.name=run-%a") == 0
    assert queue("--array", "0-2%1") == 0
    assert [job.job for job in submitted.read()] == ["7_0", "7_1", "7_2"] * 2


def test_all_job_scripts_search_for_the_checkout_alike():
    """Slurm runs a copy of a script: the search cannot be in a file beside it."""
    searches = {}
    for path in (ROOT / "jobs").glob("*.sbatch"):
        match = re.search(r"^script=\$0\n.*?^source jobs/env.sh\n", path.read_text(), re.MULTILINE | re.DOTALL)
        searches[path.stem] = [line for line in match[0].splitlines() if not line.startswith("export ")]
    assert {*searches} >= {"train", "test", "weak_scaling", "strong_scaling", "matmul"}
    assert all(search == searches["train"] for search in searches.values())
