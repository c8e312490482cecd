"""A wheel, installed away from the checkout: all that a user needs comes along."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from running import ROOT, SMALL

pytestmark = pytest.mark.job

TRAIN = [*SMALL, "model.vocabulary=257", "grid.data=2", "grid.pipeline=1", "grid.tensor=1", "run.name=first"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """One with the wheel of this checkout in it; all other packages are this environment's."""
    folder = tmp_path_factory.mktemp("installed")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():  # what is built is written beside it
        if name.split("/")[0] in ("hpctrain", "jobs", "modules") or "/" not in name:
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, folder / "source"], check=True)
    shutil.rmtree(folder / "source")
    venv = folder / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (wheel,) = folder.glob("hpctrain-*.whl")
    subprocess.run([*pip, "--python", venv / "bin/python", "install", "--no-deps", "--no-index", wheel], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    for path in Path(sys.executable).parent.iterdir():  # mpirun and the like
        if not (venv / "bin" / path.name).exists():
            (venv / "bin" / path.name).symlink_to(path)
    return venv


@pytest.fixture(scope="module")
def bash(environment, tmp_path_factory):
    """bash(script) -> what became of it in an empty folder, with the environment's commands and no other hpctrain."""
    folder = tmp_path_factory.mktemp("work")
    ours = str(Path(sys.executable).parent)
    path = [str(environment / "bin"), *(each for each in os.environ["PATH"].split(":") if each != ours)]
    others = ("HPCTRAIN_", "SLURM_", "PYTHON", "VIRTUAL_", "MPIRUN")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}

    def run(script, cwd=folder, **more):
        return subprocess.run(
            ["bash", "-c", f"set -euo pipefail\n{script}"], cwd=cwd, capture_output=True, text=True, timeout=240,
            env={**kept, "PATH": ":".join(path), **more},
        )  # fmt: skip

    run.folder = folder
    assert run("hpctrain init mine").returncode == 0
    return run


def said(done, status=0):
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_what_is_laid_out(bash, environment):
    """All that a checkout has but for what works on its tests and benchmarks; as executable as there."""
    mine = bash.folder / "mine"
    tracked = subprocess.run(["git", "ls-files", "jobs", "modules"], cwd=ROOT, capture_output=True, text=True).stdout
    expected = {*tracked.splitlines()} - {"jobs/test.sbatch", "jobs/matmul.sbatch"}
    found = [path for top in ("jobs", "modules") for path in (mine / top).rglob("*") if path.is_file()]
    assert {str(path.relative_to(mine)) for path in found} == expected
    for name in expected:
        assert os.access(mine / name, os.X_OK) == os.access(ROOT / name, os.X_OK), name
    assert (mine / ".venv").resolve() == environment.resolve()
    assert "mine/jobs exists; choose another folder" in said(bash("hpctrain init mine"), status=2)


def test_train_in_it(bash, environment):
    (bash.folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(400)))
    script = f"""
cd mine
source jobs/env.sh
python -c "import hpctrain; print(hpctrain.__file__)"
python -m hpctrain --version
$MPIRUN -n 2 hpctrain train jobs/train.toml data.text=../text.txt {" ".join(TRAIN)}
hpctrain report runs/first
"""
    output = said(bash(script))
    assert f"{environment}/lib/" in output.splitlines()[0] or f"{bash.folder}/mine/hpctrain" in output.splitlines()[0]
    lines = (bash.folder / "mine/runs/first/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert (bash.folder / "mine/runs/first/report.html").exists()


@pytest.mark.slow
def test_mpirun_itself_starts_it(bash):
    """Without jobs/env.sh."""
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = " ".join(["data.text=text.txt", *TRAIN, "run.name=plain"])
    said(bash(f"mpirun --oversubscribe -n 2 hpctrain train mine/jobs/train.toml {words}", **as_root))
    assert len((bash.folder / "runs/plain/metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_the_other_commands(bash):
    """doctor, submit and scale find the jobs of the folder."""
    (bash.folder / "mine/jobs/sites/ours.env").write_text("# nothing to set\n")
    output = said(bash("cd mine; source jobs/env.sh; hpctrain doctor", HPCTRAIN_SITE="ours"))
    assert re.search(r"^ok +launcher +.*/mine/jobs/mpirun.sh", output, re.MULTILINE)
    assert re.search(r"^ok +site +ours", output, re.MULTILINE)
    submit = "hpctrain submit jobs/train.sbatch --dry-run data.text=../text.txt"
    output = said(bash(f"cd mine; source jobs/env.sh; {submit}"))
    assert f"--ntasks=8 {bash.folder}/mine/jobs/train.sbatch" in output
    words = " ".join([*SMALL, "model.vocabulary=257", "data.text=../text.txt"])
    scale = f"hpctrain scale jobs/scale.toml {words} --weak --ranks 1 --steps 1 --repeat 1 -o study"
    assert "report: study/report.html" in said(bash(f"cd mine; source jobs/env.sh; {scale}"))
    assert json.loads((bash.folder / "mine/study/results.jsonl").read_text())["commit"].startswith("hpctrain 0.")


@pytest.mark.parametrize(
    ("change", "variables", "message"),
    [
        ("rm mine/.venv", {}, "env.sh: the environment that {mine} was laid out with, .* is gone"),
        ("", {"HPCTRAIN_MPI": "site"}, "there is no mpirun on the PATH|mpi4py would load the MPI wheel"),
    ],
)
def test_what_is_missing_is_said(bash, tmp_path, change, variables, message):
    script = f"cp -a {bash.folder}/mine .; {change or ':'}; source mine/jobs/env.sh"
    done = bash(script, cwd=tmp_path, **variables)
    assert re.search(message.format(mine=tmp_path / "mine"), said(done, status=1))
