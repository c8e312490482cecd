"""The modulefiles, loaded by real Lmod and real environment-modules."""

import glob
import re
import shutil
import subprocess

import pytest
from running import ROOT

import hpctrain

pytestmark = pytest.mark.job

# Debian's packages exclude each other, so that .ci/run unpacks environment-modules into /opt.
LMOD = ["/usr/share/lmod/lmod/init/bash", "/opt/lmod/lmod/lmod/init/bash"]
ENVIRONMENT_MODULES = [
    "/usr/lib/*/modulecmd.tcl",
    "/opt/environment-modules/usr/lib/*/modulecmd.tcl",
    "/usr/share/Modules/libexec/modulecmd.tcl",
]


def found(patterns):
    return next((path for pattern in patterns for path in glob.glob(pattern)), None)


@pytest.fixture(params=["lmod", "environment-modules"])
def shell(request, tmp_path):
    """shell(script, modules=folder, **environment) runs bash with `module`, in a clean environment."""
    if request.param == "lmod":
        if not (init := found(LMOD)):
            pytest.skip("no Lmod here (Debian: apt-get install lmod)")
        start = f"source {init}"
    else:
        if not (command := found(ENVIRONMENT_MODULES)) or not shutil.which("tclsh"):
            pytest.skip("no environment-modules here (Debian: apt-get install environment-modules)")
        start = f'module() {{ local code; code=$(tclsh {command} bash "$@"); local rc=$?; eval "$code"; return $rc; }}'

    def run(script, modules=ROOT / "modules", **environment):
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LMOD_PAGER": "none", **environment}
        script = f"{start}\nexport MODULEPATH={modules}\n{script}"
        return subprocess.run(
            ["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path
        )

    run.name = request.param
    return run


@pytest.fixture
def installed(tmp_path):
    """A checkout with an empty environment, a site of its own, and a module that the site needs."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "modules", root / "modules")
    for name, content in {
        "hpctrain/__init__.py": '__version__ = "7.8.9"\n',
        ".venv/bin/hpctrain": "#!/bin/sh\n",
        "jobs/sites/generic.env": "",
        "jobs/sites/here.env": 'export HPCTRAIN_MODULES="fastmpi"  # reason\nexport SOME_SETTING="a b=1"  # reason\n',
        "modules/fastmpi/1": "#%Module1.0\nsetenv FASTMPI 1\n",
        "modules/other/1.lua": 'family("hpctrain")\n',
        "modules/other/1": "#%Module1.0\nconflict hpctrain\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / ".venv/bin/hpctrain").chmod(0o755)
    return root


def test_load_gives_the_command_and_mpi(shell):
    done = shell("""
        module load hpctrain && hpctrain --version &&
        $MPIRUN -n 2 python -c 'from mpi4py import MPI; import hpctrain; print(MPI.COMM_WORLD.size)'
    """)
    assert done.stdout.split("\n")[:3] == [f"hpctrain {hpctrain.__version__}", "2", "2"], done.stdout + done.stderr


def test_unload_leaves_the_environment_as_it_was(shell):
    was_set = "export VIRTUAL_ENV=mine;" if shell.name == "lmod" else ""  # Tcl modulefiles do not remember
    done = shell(f"""
        {was_set} module load hpctrain; module unload hpctrain  # the tools' own bookkeeping is there after this
        env | sort >before
        module load hpctrain; env | sort >loaded; module unload hpctrain
        env | sort >after
        diff before loaded | grep -c '^>'; diff before after
    """)
    changed, *rest = done.stdout.split()
    assert int(changed) > 5
    assert not rest, done.stdout


def test_help_and_whatis(shell, installed):
    """The version is the package's."""
    done = shell("module help hpctrain; module whatis hpctrain", installed / "modules")
    said = done.stdout + done.stderr
    assert "hpctrain 7.8.9: train neural networks" in said
    assert re.search(r"Version: 7\.8\.9", said)


def test_a_site_brings_its_modules_and_settings(shell, installed):
    script = 'module load fastmpi; module load hpctrain; echo "$FASTMPI|$SOME_SETTING|$HPCTRAIN_MPI_FOUND"'
    assert "1|a b=1|site" in shell(script, installed / "modules", HPCTRAIN_SITE="here").stdout
    alone = shell('module load hpctrain; echo "$FASTMPI|$HPCTRAIN_ROOT"', installed / "modules", HPCTRAIN_SITE="here")
    if shell.name == "lmod":  # depends_on loads it
        assert f"1|{installed}" in alone.stdout
    else:
        assert "fastmpi" in alone.stdout + alone.stderr


def test_a_site_that_is_empty_is_none(shell, installed):
    script = 'module load hpctrain; echo "[$HPCTRAIN_SITE_LOADED]"'
    assert "[generic]" in shell(script, installed / "modules", HPCTRAIN_SITE="").stdout


def test_libraries_as_env_sh_gives_them(shell, installed):
    """MPICH's under the name of mpi4py's, and those that Cray's modules name to link."""
    (installed / ".venv/lib/mpich").mkdir(parents=True)
    (installed / ".venv/lib/mpich/libmpi.so.12").touch()
    (installed / "modules/fastmpi/1").write_text("#%Module1.0\nsetenv CRAY_LD_LIBRARY_PATH /cray/lib\n")
    done = shell(
        """module load fastmpi; module load hpctrain; echo "$LD_LIBRARY_PATH"
        module unload hpctrain; echo "[$LD_LIBRARY_PATH]" """, installed / "modules", HPCTRAIN_SITE="here",
        LD_LIBRARY_PATH="/mine",
    )  # fmt: skip
    assert done.stdout.split() == [f"{installed}/.venv/lib/mpich:/cray/lib:/mine", "[/mine]"], done.stderr


def test_unload_undoes_what_was_loaded(shell, installed):
    """Though HPCTRAIN_SITE names another site by then, or none that there is."""
    (installed / "jobs/sites/other.env").write_text('export OTHER_SETTING="mine"  # reason\n')
    for later in ("other", "nowhere"):
        done = shell(
            f"""module load fastmpi; module load hpctrain; loaded=$SOME_SETTING
            export OTHER_SETTING=mine HPCTRAIN_SITE={later}; module unload hpctrain
            echo "$loaded|$SOME_SETTING|$OTHER_SETTING|$MPIRUN" """,
            installed / "modules", HPCTRAIN_SITE="here",
        )  # fmt: skip
        assert done.stdout.strip() == "a b=1||mine|", done.stderr


def test_variants_exclude_each_other(shell, installed):
    done = shell('module load other; module load hpctrain; module list; echo "[$HPCTRAIN_ROOT]"', installed / "modules")
    if shell.name == "lmod":  # the later one of a family takes the other's place
        assert "other" not in done.stderr.split("Currently Loaded")[1]
    else:
        assert "[]" in done.stdout


def test_what_is_missing_is_said(shell, installed):
    done = shell('module load hpctrain; echo "[$HPCTRAIN_ROOT]"', installed / "modules", HPCTRAIN_SITE="nowhere")
    assert "[]" in done.stdout
    assert "HPCTRAIN_SITE=nowhere, but there is no" in done.stderr.replace("\n", " ")
    (installed / ".venv/bin/hpctrain").unlink()
    done = shell('module load hpctrain; echo "[$HPCTRAIN_ROOT]"', installed / "modules")
    assert "[]" in done.stdout
    assert "hpctrain is not installed yet in" in done.stderr.replace("\n", " ")


def test_syntax(shell, installed):
    """Lmod's own check; a modulefile that it cannot read does not pass."""
    if shell.name != "lmod":
        pytest.skip("only Lmod has --checkSyntax")
    good = shell("module --checkSyntax load hpctrain", installed / "modules")
    assert "syntax" not in good.stderr.lower(), good.stderr
    broken = installed / "modules/hpctrain/main.lua"
    broken.write_text(broken.read_text() + "if then\n")
    assert "syntax" in shell("module --checkSyntax load hpctrain", installed / "modules").stderr.lower()
