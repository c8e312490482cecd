"""Cores counted, shared out and bound to, on machines that are not at hand: jobs/mpirun.sh, Open MPI and the doctor."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from running import ROOT

from hpctrain import cli, cores, launch
from hpctrain.doctor import findings

pytestmark = pytest.mark.job


@dataclass
class Machine:
    """A topology as hwloc writes it (packages, cores, threads), and what a process is given of it."""

    packages: int
    cores: int
    threads: int
    affinity: set | None = None  # all
    files: dict = field(default_factory=dict)  # of the control group

    def tree(self, root):
        """Its /sys and /proc below `root`, numbered as Linux does: all first threads of the cores, then all second."""
        total = self.packages * self.cores
        files = {"sys/devices/system/cpu/online": f"0-{total * self.threads - 1}", **self.files}
        for thread in range(total * self.threads):
            package = thread % total // self.cores
            core = [str(thread % total + total * n) for n in range(self.threads)]
            firsts = range(package * self.cores, (package + 1) * self.cores)
            siblings = [f"{firsts[0] + total * n}-{firsts[-1] + total * n}" for n in range(self.threads)]
            topology = f"sys/devices/system/cpu/cpu{thread}/topology"
            files[f"{topology}/thread_siblings_list"] = ",".join(core)
            files[f"{topology}/core_siblings_list"] = ",".join(siblings)
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content + "\n")
        return str(root), self.affinity or set(range(total * self.threads))


GROUP2 = {"proc/self/cgroup": "0::/job/step"}
GROUP1 = {"proc/self/cgroup": "4:cpuset:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/"}
MACHINES = {
    "4 cores x 2": Machine(1, 4, 2),
    "8 cores x 2": Machine(1, 8, 2),
    "64 cores x 2 in two sockets": Machine(2, 32, 2),
    "one core": Machine(1, 1, 1),
    "one core x 2": Machine(1, 1, 2),
    "taskset to 3 of 8": Machine(1, 8, 1, {1, 3, 5}),
    "taskset to both threads of 2 of 4": Machine(1, 4, 2, {0, 1, 4, 5}),
    # hwloc leaves out what the control group forbids; so does the topology below that is given to Open MPI
    "cpuset of 3 of 8": Machine(
        1, 8, 1, {1, 3, 5}, {**GROUP2, "sys/fs/cgroup/job/cpuset.cpus.effective": "1,3,5"}
    ),
    "cpuset of 3 of 8, version 1": Machine(
        1, 8, 1, {1, 3, 5}, {**GROUP1, "sys/fs/cgroup/cpuset/cpuset.cpus": "1,3,5,8-15"}
    ),
    "quota of 2.5 CPUs": Machine(1, 8, 2, None, {**GROUP2, "sys/fs/cgroup/job/cpu.max": "250000 100000"}),
    "quota of half a CPU, version 1": Machine(
        1, 8, 2, None,
        {
            **GROUP1, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
        },
    ),
    "no limit": Machine(1, 2, 1, None, {**GROUP2, "sys/fs/cgroup/job/cpu.max": "max 100000"}),
}  # fmt: skip
HWLOC = {"cpuset of 3 of 8": "pack:1 core:3 pu:1", "cpuset of 3 of 8, version 1": "pack:1 core:3 pu:1"}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(name) makes this computer that one, for jobs/mpirun.sh, for Open MPI and in this process."""

    def become(name):
        made = MACHINES[name]
        root, affinity = made.tree(tmp_path / "root")
        for variable in os.environ:
            if variable.startswith(("SLURM_", "PRTE_MCA")) or variable in ("OMP_NUM_THREADS", "HPCTRAIN_LAUNCHER"):
                monkeypatch.delenv(variable)
        # as mpirun.sh asks, with another root and affinity
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/python3").write_text(f"""#!{sys.executable} -IS
import os, sys
os.sched_getaffinity = lambda _: {affinity}
path = sys.argv[2]
source = open(path).read().replace('root: str = "/"', "root: str = {root!r}")
del sys.argv[:2]
exec(compile(source, path, "exec"), {{"__name__": "__main__", "__file__": path}})
""")
        (tmp_path / "bin/python3").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv(
            "HWLOC_SYNTHETIC", HWLOC.get(name) or f"pack:{made.packages} core:{made.cores} pu:{made.threads}"
        )
        monkeypatch.setenv("HWLOC_THISSYSTEM", "1")
        found = cores.find(root, affinity)
        monkeypatch.setattr(cores, "find", lambda: found)
        return found

    return become


def bindings(*options):
    """Open MPI's own numbers of the cores that each rank would be bound to; None where to no cores in particular."""
    command = ["jobs/mpirun.sh", "--display", "map", "--do-not-launch", *options, "true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = re.findall(r"Binding: (?:UNBOUND|package\[\d\]\[core:L([\d-]+)\])", done.stdout)
    assert said, done.stdout + done.stderr
    return [cores or None for cores in said]


def mpirun(tmp_path, *options, **environment):
    """What jobs/mpirun.sh sets and adds, for an mpirun that only tells it: (threads, transports, options)."""
    script = 'if [ "$1" = --version ]; then echo Open MPI; else echo "$OMP_NUM_THREADS|$OMPI_MCA_btl|$*"; fi'
    (tmp_path / "bin/mpirun").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin/mpirun").chmod(0o755)
    done = subprocess.run(
        ["jobs/mpirun.sh", *options], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "HPCTRAIN_MPI_FOUND": "wheel", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    threads, transports, told = done.stdout.rstrip("\n").split("|")
    given = " ".join(options)
    assert told.endswith(given)
    return int(threads), transports, told.removesuffix(given).strip()


SAID = {
    "4 cores x 2": "4 cores (8 hardware threads)",
    "8 cores x 2": "8 cores (16 hardware threads)",
    "64 cores x 2 in two sockets": "64 cores (128 hardware threads)",
    "one core": "1 core (1 hardware thread)",
    "one core x 2": "1 core (2 hardware threads)",
    "taskset to 3 of 8": "3 cores (3 hardware threads; its affinity keeps this process to them)",
    "taskset to both threads of 2 of 4": "2 cores (4 hardware threads; its affinity keeps this process to them)",
    "cpuset of 3 of 8": "3 cores (3 hardware threads)",
    "cpuset of 3 of 8, version 1": "3 cores (3 hardware threads)",
    "quota of 2.5 CPUs": "2 cores (the container may use 2.5 CPUs of 8 cores)",
    "quota of half a CPU, version 1": "1 core (the container may use 0.5 CPUs of 8 cores)",
    "no limit": "2 cores (2 hardware threads)",
}


@pytest.mark.parametrize(
    ("name", "ranks", "each", "bound"),
    [
        ("4 cores x 2", 1, 4, ["0-3"]),
        ("4 cores x 2", 2, 2, ["0-1", "2-3"]),
        ("4 cores x 2", 4, 1, ["0", "1", "2", "3"]),
        ("4 cores x 2", 8, 1, [None] * 8),
        ("8 cores x 2", 2, 4, ["0-3", "4-7"]),
        ("8 cores x 2", 3, 2, ["0-1", "2-3", "4-5"]),
        ("64 cores x 2 in two sockets", 1, 64, [None]),
        ("64 cores x 2 in two sockets", 2, 32, ["0-31", "32-63"]),
        ("64 cores x 2 in two sockets", 3, 16, ["0-15", "16-31", "32-47"]),
        ("64 cores x 2 in two sockets", 65, 1, [None] * 65),
        ("one core", 1, 1, ["0"]),
        ("one core x 2", 2, 1, [None] * 2),
        ("taskset to 3 of 8", 3, 1, [None] * 3),
        ("taskset to 3 of 8", 4, 1, [None] * 4),
        ("taskset to both threads of 2 of 4", 1, 2, [None]),
        ("cpuset of 3 of 8", 1, 3, ["0-2"]),
        ("cpuset of 3 of 8", 3, 1, ["0", "1", "2"]),
        ("cpuset of 3 of 8, version 1", 3, 1, ["0", "1", "2"]),
        ("quota of 2.5 CPUs", 1, 2, [None]),
        ("quota of 2.5 CPUs", 4, 1, [None] * 4),
        ("quota of half a CPU, version 1", 1, 1, [None]),
        ("no limit", 1, 2, ["0-1"]),
    ],
)  # fmt: skip
def test_ranks_share_the_physical_cores(machine, name, ranks, each, bound, monkeypatch):
    """The doctor, the threads that a rank takes by itself, the job script and Open MPI say the same."""
    machine(name)
    assert findings.processor({}).found == SAID[name]
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(ranks))
    launch.limit_threads()
    assert os.environ.pop("OMP_NUM_THREADS") == str(each)
    assert bindings("-n", str(ranks)) == bound
    assert mpirun_threads(ranks) == each


def mpirun_threads(ranks):
    command = ["jobs/mpirun.sh", "-n", str(ranks)]
    launcher = {"HPCTRAIN_LAUNCHER": "python -c print(__import__('os').environ['OMP_NUM_THREADS'])"}
    return int(
        subprocess.run(command, cwd=ROOT, capture_output=True, check=True, env={**os.environ, **launcher}).stdout
    )


def test_jobs_start_with_hyper_threading(machine, capsys, monkeypatch):
    """Real ranks, though most of the cores are not here: Open MPI warns that it cannot bind, and goes on."""
    machine("4 cores x 2")
    for ranks in (2, 8):
        done = subprocess.run(
            ["jobs/mpirun.sh", "-n", str(ranks), "echo", "up"], cwd=ROOT, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout.split()) == (0, ["up"] * ranks), done.stderr
    monkeypatch.setenv("MPIRUN", str(ROOT / "jobs/mpirun.sh"))
    assert cli.main(["doctor"]) == 0
    assert "4 cores (8 hardware threads); of 2 ranks each may use" in capsys.readouterr().out


SHARE = "--map-by slot:PE="
CROWDED = "--map-by :OVERSUBSCRIBE --bind-to none"


@pytest.mark.parametrize(
    ("options", "threads", "added"),
    [
        ("-n 2 program", 2, SHARE + "2"),
        ("-np 2 program", 2, SHARE + "2"),
        ("--n 4 program", 1, ""),
        ("-np=4 program", 1, ""),
        ("--np=2 program", 2, SHARE + "2"),
        ("-c 8 program", 1, CROWDED),
        ("-n 2 program -n 1000", 2, SHARE + "2"),
        ("program -n 1000", 1, ""),  # a rank a core, as mpirun does by itself
        ("-x A=B --mca btl -n -x -n --np 2 program", 2, SHARE + "2"),
        ("--report-bindings --output tag -n 2 program --bind-to x", 2, SHARE + "2"),
        ("-n 1 program -n 7 : -n 3 program", 1, ""),
        ("-n 2 --map-by core program", 2, ""),
        ("-n 2 --bind-to=none program", 2, ""),
        ("-n 8 --oversubscribe program", 1, ""),
    ],
)
def test_only_the_launchers_own_options_count(machine, tmp_path, options, threads, added):
    machine("4 cores x 2")
    assert mpirun(tmp_path, *options.split()) == (threads, "self,sm", added)


def test_what_is_no_number_of_ranks_is_refused(machine):
    machine("4 cores x 2")
    for options in (["-n", "many", "x"], ["--np=0", "x"], ["-n"]):
        done = subprocess.run(["jobs/mpirun.sh", *options], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith(f"mpirun.sh: {options[0]} must be followed by a number of ranks, got '")


def test_what_is_no_number_of_threads_is_refused(machine, monkeypatch):
    machine("4 cores x 2")
    for threads in ("many", "0", "-2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        done = subprocess.run(["jobs/mpirun.sh", "-n", "1", "true"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr == f"mpirun.sh: OMP_NUM_THREADS must be a number of threads, got '{threads}'\n"


def test_an_empty_number_of_threads_is_none(machine, monkeypatch):
    machine("no limit")
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    launch.limit_threads()
    assert os.environ["OMP_NUM_THREADS"] == "2"


def test_a_home_where_there_is_none(monkeypatch):
    """As under cron: Open MPI would not begin."""
    monkeypatch.delenv("HOME")
    done = subprocess.run(
        ["jobs/mpirun.sh", "-n", "1", "sh", "-c", 'echo "$HOME"'], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, os.path.expanduser("~")), done.stderr


@pytest.mark.parametrize(
    ("environment", "options", "threads", "added"),
    [
        ({"SLURM_TASKS_PER_NODE": "3,1"}, "-n 4", 1, ""),  # a PE of 2 would not fit the first
        ({"SLURM_TASKS_PER_NODE": "2(x2)"}, "-n 4", 2, SHARE + "2"),
        ({"SLURM_TASKS_PER_NODE": "2(x2),1"}, "", 2, SHARE + "2"),
        ({"SLURM_TASKS_PER_NODE": "4(x2)"}, "-n 16", 1, CROWDED),
        ({"SLURM_TASKS_PER_NODE": "4(x3)"}, "-n 2", 2, SHARE + "2"),  # mpirun fills the first node
        ({"PBS_NODEFILE": "n1 n1 n1 n2"}, "-n 4", 1, ""),
        ({"LSB_DJOB_HOSTFILE": "n1 n2"}, "-n 2", 4, SHARE + "4"),
        ({}, "--host n1:2,n2:2 -n 4", 2, SHARE + "2"),
        ({}, "--host n1,n1,n2,n2 -n 4", 2, SHARE + "2"),
        ({}, "--hostfile hosts -n 4", 1, ""),
    ],
)
def test_the_fullest_node_decides(machine, tmp_path, environment, options, threads, added):
    """Each node has four cores."""
    machine("4 cores x 2")
    (tmp_path / "hosts").write_text("# ours\nn1 slots=1 max_slots=2\nn2 slots = 3\n")
    options = options.replace("hosts", str(tmp_path / "hosts"))
    for name in environment:
        if not name.startswith("SLURM"):
            (tmp_path / "nodes").write_text(environment[name].replace(" ", "\n"))
            environment = {name: str(tmp_path / "nodes")}
    assert mpirun(tmp_path, *options.split(), "program", **environment) == (threads, "", added)
