"""Jobs that must succeed: the command line, the run folder, the job scripts."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

import pytest
from running import ROOT, warm
from safetensors.torch import load_file
from torch.testing import assert_close

from hpctrain.slurm.site import parse

pytestmark = pytest.mark.job

FIELDS = {
    "step", "loss", "grad_norm", "lr", "tokens", "seconds", "tokens_per_second", "time", "bytes_sent", "bytes_received",
    "epochs",
}  # fmt: skip


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def succeeds(job, limit=90):
    ended = job.wait(limit)
    assert ended.status == 0, ended.output
    return ended


def test_replicas_without_sequences_are_told_of(train):
    """Once; a batch that is large enough says nothing."""
    ended = succeeds(train(2, "grid.data=2", "train.batch=1", "run.steps=1"))
    assert ended.output.count("train.batch = 1 gives no sequence to 1 of the 2 replicas") == 1
    assert "gives no sequence" not in succeeds(train(2, "grid.data=2", "train.batch=2", "run.steps=1")).output


@pytest.mark.skipif(os.cpu_count() < 2, reason="takes two cores")
@pytest.mark.parametrize(("ranks", "given"), [(1, None), (os.cpu_count(), None), (os.cpu_count(), "1")])
def test_a_rank_may_use_as_many_cores_as_it_has_threads(start, python, ranks, given, monkeypatch):
    for name in os.environ:
        if name == "OMP_NUM_THREADS" or name.startswith("PRTE_MCA"):
            monkeypatch.delenv(name)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    said = "import os; print('cores', len(os.sched_getaffinity(0)), 'threads', os.environ['OMP_NUM_THREADS'])"
    ended = succeeds(start(ranks, python, "-c", said))
    each = os.cpu_count() // ranks
    assert ended.output.count(f"cores {each} threads {each}") == ranks


@pytest.mark.skipif(os.cpu_count() < 2, reason="takes two cores")
@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE"])
def test_ranks_on_two_nodes_share_no_cores(tmp_path, monkeypatch, variable):
    """Without Slurm the batch system's file tells how many nodes there are: a line a slot."""
    (tmp_path / "hosts").write_text("n1\nn1\nn2\nn2\n")
    for name in ("SLURM_JOB_NUM_NODES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "hosts"))
    monkeypatch.setenv("HPCTRAIN_LAUNCHER", "python -c print(__import__('os').environ['OMP_NUM_THREADS'])")
    told = subprocess.run(
        ["jobs/mpirun.sh", "-n", "2", "x"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert int(told) == len(os.sched_getaffinity(0))


def test_what_a_killed_mpirun_left_stops_none_that_gets_its_process_id(tmp_path):
    """A later mpirun of that id would end with "The PMIx server's listener thread failed to start"."""
    script = """
        for ((id = $$; id < $$ + 500; id++)); do
            mkdir "$TMPDIR/ompi.$id"
            touch "$TMPDIR/ompi.$id/pmix.$(uname -n).tool.$id"
        done
        exec jobs/mpirun.sh -n 2 echo started
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.stdout == "started\n" * 2, ended.stdout + ended.stderr


def test_the_run_folder(train, tmp_path):
    overrides = ["grid.data=2", "run.steps=5", "run.eval_every=2", "run.sample=20", "model.dropout=0.1"]
    ended = succeeds(train(2, *overrides))
    folder = tmp_path / "runs/run"
    records = metrics(folder)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5]
    assert [r["step"] for r in records if "val_loss" in r] == [2, 4, 5]
    assert set(records[0]) == FIELDS
    assert [r["tokens"] for r in records] == [96, 192, 288, 384, 480]
    assert (
        set(records[0]["bytes_sent"])
        == set(records[0]["bytes_received"])
        == {"data", "sequence", "expert", "pipeline", "tensor"}
    )
    assert records[0]["bytes_sent"]["data"] > 0 == records[0]["bytes_sent"]["tensor"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    weights, tokenizer = {"config.json", "model.safetensors"}, {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (folder / "model").iterdir()} == weights | tokenizer
    for text in ("grid of 2 ranks", "final training loss", "sample:", f"results: {folder}/"):
        assert text in ended.output

    # the resolved configuration gives the same run again; the older one is kept
    again = succeeds(train(2, config=folder / "config.toml"))
    assert f"an older run was moved to {folder}.1/" in again.output
    assert [r["loss"] for r in metrics(folder)] == [r["loss"] for r in records]
    assert (tmp_path / "runs/run.1/metrics.jsonl").exists()

    out = tmp_path / "exported"
    export = warm(["hpctrain", "export", str(folder), "-o", str(out)])
    done = subprocess.run(export, capture_output=True, text=True)
    assert done.returncode == 0
    assert {path.name for path in out.iterdir()} == weights | tokenizer
    again = subprocess.run(export, capture_output=True, text=True)
    assert again.returncode == 2
    assert "exists and is not an empty folder" in again.stderr


def test_grids_agree_on_the_command_line(train, tmp_path):
    """Losses, norms and validation losses of ten steps in float64; the benchmark `equivalence.py` does all grids."""
    common = ["run.steps=10", "precision.compute=fp64", "model.layers=3", "model.dropout=0.2", "train.batch=5"]
    results = {}
    for name, ranks, grid in [
        ("serial", 1, []),
        ("all", 8, ["grid.data=2", "grid.pipeline=2", "grid.tensor=2"]),
    ]:
        succeeds(train(ranks, *common, *grid, f"run.name={name}"))
        records = metrics(tmp_path / "runs" / name)
        results[name] = [r[key] for r in records for key in ("loss", "grad_norm", "val_loss") if key in r]
    assert len(results["serial"]) == 21
    for values in results.values():
        assert values == pytest.approx(results["serial"], rel=1e-10)


def test_a_llama_goes_on_on_another_grid(train, tmp_path):
    """Its run in one go, and one that is saved on a grid and resumed on another: the same losses, norms and weights."""
    common = [
        "model.kind=llama", "model.layers=3", "model.width=14", "model.heads=4", "model.kv_heads=2", "model.ffn=9",
        "model.head_width=4", "model.rope_base=500000", "model.rope_scaling=[8, 1, 4, 8]", "model.qk_norm=true",
        "model.dropout=0.2", "train.batch=5", "precision.compute=fp64", "run.sample=3", "run.steps=6",
    ]  # fmt: skip
    ended = succeeds(train(1, *common, "run.name=serial"))
    assert "llama: 3 layers, width 14, 4 heads of 4, 2 of keys, ffn 9, context 16, vocabulary 257" in ended.output
    saved = ["grid.data=2", "grid.pipeline=2", "data_parallel.method=zero2", "run.checkpoint_every=3"]
    succeeds(train(4, *common, *saved))
    shutil.rmtree(max((tmp_path / "runs/run/checkpoints").glob("step-*")))  # the last; as if stopped before
    ended = succeeds(train(4, *common, "grid.tensor=[2, 1, 2]", "--resume"))
    assert "resumed after step 3" in ended.output
    values, exported = [], []
    for name in ("serial", "run"):
        records = metrics(tmp_path / "runs" / name)
        values.append([r[key] for r in records[3:] for key in ("loss", "grad_norm", "val_loss") if key in r])
        told = json.loads((tmp_path / "runs" / name / "model/config.json").read_text())
        exported.append((told, load_file(tmp_path / "runs" / name / "model/model.safetensors")))
    assert len(values[0]) == 7
    assert values[1] == pytest.approx(values[0], rel=1e-10)
    (told, weights), (other, others) = exported
    assert told == other
    assert (told["architectures"], told["head_dim"], told["rope_scaling"]["factor"]) == (["Qwen3ForCausalLM"], 4, 8)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert_close(others[name], weight, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_main_job_s_script(tmp_path):
    """`bash jobs/train.sbatch` with settings; the number of ranks follows the grid. CI runs it as it is, on eight."""
    settings = ["run.steps=2", "run.sample=3", f"run.out={tmp_path}/runs", "grid.pipeline=1", "precision.compute=bf16"]
    command = ["bash", "jobs/train.sbatch", *settings]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "grid of 4 ranks" in ended.stdout
    assert len(metrics(tmp_path / "runs/gpt2")) == 2


@pytest.fixture
def command_is(tmp_path):
    """command_is(text) is the environment of a job of which Slurm says that its Command is so."""
    script = tmp_path / "bin/scontrol"
    script.parent.mkdir()

    def environment(text):
        script.write_text(f"#!/bin/sh\necho 'JobId=1\n   Command={text}\n   WorkDir=/\n'\n")
        script.chmod(0o755)
        return {**os.environ, "SLURM_JOB_ID": "1", "PATH": f"{script.parent}:{os.environ['PATH']}"}

    return environment


def test_the_script_fails_as_the_job_does(tmp_path, command_is):
    """Started by a user's own batch script, with a configuration that lies beside it."""
    (tmp_path / "mine.sbatch").write_text("")
    (tmp_path / "my.toml").write_text("[run]\nstesp = 2\n")
    command = ["bash", ROOT / "jobs/train.sbatch", "my.toml"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=command_is(f"{tmp_path}/mine.sbatch"), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "unknown key run.stesp; did you mean run.steps?" in ended.stderr


def test_the_environment_is_quick_and_clean():
    """Sourcing env.sh again costs under 2 s and leaves just what it says."""
    script = """
        set -eu
        source jobs/env.sh
        before=$PATH
        compgen -v | sort >"$1/first"
        source jobs/env.sh
        [ "$PATH" = "$before" ]
        compgen -v | sort >"$1/second"
        diff "$1/first" "$1/second"
        $MPIRUN -n 4 python -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1))'
    """
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        subprocess.run(["bash", "-c", "source jobs/env.sh"], cwd=ROOT, check=True)
        assert time.monotonic() - start < 2
        ended = subprocess.run(["bash", "-c", script, "bash", folder], cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ended.stdout.split() == ["4"] * 4


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"HPCTRAIN_MPI": "mpich"}, "HPCTRAIN_MPI must be auto, wheel or site, got mpich"),
        ({"HPCTRAIN_MPI": "site"}, "there is no mpirun on the PATH; load an MPI module"),
        ({"HPCTRAIN_MODULES": "gcc", "BASH_FUNC_module%%": "() { echo no $2 >&2; false; }"}, "no gcc"),
    ],
)
def test_a_bad_environment_is_refused(setting, message):
    if setting.get("HPCTRAIN_MPI") == "site" and os.environ.get("HPCTRAIN_MPI_FOUND") == "site":
        pytest.skip("this machine has an MPI of its own")
    environment = {**os.environ, **setting}
    ended = subprocess.run(
        ["bash", "-c", "source jobs/env.sh"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.returncode != 0
    assert message in ended.stderr


@pytest.mark.parametrize("site", sorted(path.stem for path in (ROOT / "jobs/sites").glob("*.env")))
def test_site_files(site):
    """Each line is read alike by the job scripts, by Python and by a plain shell, and says why; what is set stays."""
    text = (ROOT / f"jobs/sites/{site}.env").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'export \w+="[^"$`\\]*" # .+', line) for line in lines)
    settings = dict(parse(text))
    assert len(settings) == len(lines)
    script = """
        set -eu
        module() { [ "$1" = load ] && shift && echo "$*"; }
        source <(sed -n '/^hpctrain_site()/,/^}/p' jobs/env.sh)
        HDF5_USE_FILE_LOCKING=mine
        hpctrain_site "$PWD"
        env -0
    """
    environment = {"PATH": os.environ["PATH"], "HPCTRAIN_SITE": site}
    ended = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    loaded, _, exported = ended.stdout.rpartition("\n") if "HPCTRAIN_MODULES" in settings else ("", "", ended.stdout)
    assert loaded == settings.get("HPCTRAIN_MODULES", "")
    found = dict(pair.split("=", 1) for pair in exported.split("\0") if "=" in pair)
    settings.pop("HDF5_USE_FILE_LOCKING")
    assert settings.items() <= found.items()
    assert found.get("HDF5_USE_FILE_LOCKING") != "FALSE"


@pytest.mark.parametrize(
    ("site", "gtl", "firsts"),
    [
        # the first core beside each device
        ("frontier", "hsa", [49, 57, 17, 25, 1, 9, 33, 41]),
        ("lumi", "hsa", [49, 57, 17, 25, 1, 9, 33, 41]),
        ("perlmutter", "cuda", [48, 32, 16, 0]),
    ],
)
def test_cray_sites_give_mpi_the_devices_and_ranks_the_cores_beside_theirs(site, gtl, firsts):
    """With GPU support asked for and the library not loaded, MPI_Init aborts; mpi4py's wheel does not link it."""
    settings = dict(parse((ROOT / f"jobs/sites/{site}.env").read_text()))
    assert settings["MPICH_GPU_SUPPORT_ENABLED"] == "1"
    assert settings["MPICH_OFI_NIC_POLICY"] == "GPU"
    launcher = settings["HPCTRAIN_LAUNCHER"].split()
    assert f"--export=ALL,LD_PRELOAD=/opt/cray/pe/lib64/libmpi_gtl_{gtl}.so.0" in launcher
    assert int(settings["SBATCH_GPUS_PER_NODE"]) == len(firsts)
    (masks,) = [option.split(":")[1] for option in launcher if option.startswith("--cpu-bind=mask_cpu:")]
    threads = int(settings["OMP_NUM_THREADS"])
    cores = [[bit for bit in range(64) if int(mask, 16) >> bit & 1] for mask in masks.split(",")]
    assert cores == [list(range(first, first + threads)) for first in firsts]


def test_an_unknown_site_is_refused():
    environment = {**os.environ, "HPCTRAIN_SITE": "moon"}
    command = ["bash", "-c", "source jobs/env.sh"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode != 0
    assert "HPCTRAIN_SITE=moon, but there is no" in ended.stderr
    assert "known are frontier generic" in ended.stderr


@pytest.mark.parametrize(
    ("script", "said"),
    [("matmul", "usage: matmul.py"), ("weak_scaling", "usage: hpctrain scale"), ("strong_scaling", "--strong")],
)
def test_the_other_scripts_start(script, said, tmp_path, command_is):
    """From the copy that Slurm makes, in a checkout with a space in its path."""
    copy = tmp_path / "slurm_script"
    copy.write_bytes((ROOT / f"jobs/{script}.sbatch").read_bytes())
    (tmp_path / "a checkout").symlink_to(ROOT)
    for place, status in [(tmp_path / "a checkout/jobs", 0), (tmp_path / "nowhere", 2)]:
        environment = command_is(f"{place}/{script}.sbatch --help a=b")
        ended = subprocess.run(["bash", copy, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ended.returncode == status, ended.stderr
        assert said in ended.stdout or "there is no env.sh beside" in ended.stderr


def test_no_optimizer_imports_the_compiler():
    """A job that compiles nothing must not read 800 modules from a shared disk on every rank."""
    program = """
import sys, torch
from hpctrain.choices import OPTIMIZERS
from hpctrain.shard import Shard
from hpctrain.train.optimizer import make_optimizer
for name in OPTIMIZERS:
    p = torch.nn.Parameter(torch.ones(3))
    p.shard = Shard((3,), (slice(0, 3),))
    optimizer = make_optimizer([p], 0.1, name)
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.zero_grad()
    assert p.grad is None and bool((p < 1).all()), name
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
