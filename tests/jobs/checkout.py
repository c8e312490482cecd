"""Copies of the checkout that run their own code, with the packages that are installed for this one."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from running import ROOT

COMMAND = """#!/bin/sh
'''exec' "{python}" {flags}"$0" "$@"
' '''
import os, sys
if {warm}:
    client = ["-IS", "{root}/tests/warm.py", "hpctrain"] if "HPCTRAIN_WARM" in os.environ else ["-m", "hpctrain"]
    os.execv(sys.executable, [sys.executable, *client, *sys.argv[1:]])
from hpctrain.cli import main
sys.exit(main())
"""  # as pip writes it where the path has spaces


def copy(folder, warm=False, python=sys.executable):
    """The files that git knows of, below the folder, and an environment for them; with `warm` its `hpctrain` is forked
    from the server of jobs/test.sbatch, where there is one: the code is then this checkout's, which is the same."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    make_environment(folder, warm, python)
    if warm:  # under Slurm mpirun looks for programs beside itself before all else, where hpctrain starts cold
        script = folder / "jobs/train.sbatch"
        cold, ranks = script.read_text(), '-n "$ranks" '
        assert f"{ranks}hpctrain train" in cold
        script.write_text(cold.replace(f"{ranks}hpctrain", f"{ranks}{folder}/.venv/bin/hpctrain"))
    return folder


def make_environment(folder, warm=False, python=sys.executable):
    """A .venv in which hpctrain is the folder's, and all else this environment's; env.sh takes it for its own work. Its
    interpreter is `python`, of this one's version."""
    venv = folder / ".venv"
    subprocess.run([python, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{folder}\n{sysconfig.get_path('purelib')}\n")
    ours = Path(sys.executable).parent
    for kind in ("bin", "lib"):  # mpirun and the like, with their own interpreter; a wheel's MPI
        for path in (ours.parent / kind).iterdir():
            if not (venv / kind / path.name).exists():
                (venv / kind / path.name).symlink_to(path)
    command = venv / "bin/hpctrain"
    command.unlink()
    command.write_text(COMMAND.format(python=venv / "bin/python", flags="-IS " * warm, root=ROOT, warm=warm))
    command.chmod(0o755)
    for stamp in ours.parent.glob(".hpctrain-*"):
        shutil.copy(stamp, venv)
