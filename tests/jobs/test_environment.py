"""jobs/env.sh in checkouts that were copied, moved, or left by their interpreter."""

import os
import shutil
import subprocess

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


@pytest.mark.parametrize(
    ("make", "libraries", "linked"),
    [
        ("HYDRA build details:", ["libmpich.so.12"], True),
        ("HYDRA build details:", ["libmpich.so.12", "libmpi.so.12"], False),
        ("mpirun (Open MPI) 4.1.4", ["libmpich.so.12"], False),
    ],
)
def test_the_library_of_debians_mpich_gets_its_usual_name(tmp_path, make, libraries, linked):
    """Where mpirun is MPICH's, and there is no other library of that name."""
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho '{make}'\n")
    (tmp_path / "mpirun").chmod(0o755)
    for name in libraries:
        (tmp_path / name).touch()
    script = """
        set -eu
        source <(sed -n '/^hpctrain_debian_mpich()/,/^}/p; /^hpctrain_use_mpich()/,/^}/p' jobs/env.sh)
        hpctrain_debian_mpich "$1/venv"
        hpctrain_use_mpich "$1/venv" site
        echo "$LD_LIBRARY_PATH"
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", script, "bash", tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    folder = tmp_path / "venv/lib/mpich"
    assert done.stdout.strip() == (f"{folder}:{tmp_path}" if linked else str(tmp_path))
    if linked:
        assert (folder / "libmpi.so.12").readlink() == tmp_path / "libmpich.so.12"
