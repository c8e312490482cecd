"""`hpctrain config` and the help of train: every option, with its default and bounds."""

import io
import subprocess
import sys
import tomllib
from dataclasses import fields

import pytest
from running import ROOT

from hpctrain.cli import main
from hpctrain.config import Config, load_config
from hpctrain.config.option import options


def test_a_login_node_reads_a_configuration_without_torch_and_mpi():
    script = (
        "import sys; from hpctrain.config import load_config; load_config('jobs/train.toml'); "
        "assert not {'torch', 'mpi4py', 'numpy', 'scipy'} & {*sys.modules}, sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_the_template_is_a_configuration_with_the_defaults(tmp_path, capsys):
    """`hpctrain config > run.toml`."""
    assert main(["config"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "config.toml"
    path.write_text(text)
    assert load_config(path) == load_config()
    keys = {(section.name, key) for section in fields(Config) for key in options(section.default_factory, section.name)}
    assert {(section, key) for section, table in tomllib.loads(text).items() for key in table} == keys


def test_one_section_and_one_option(capsys):
    assert main(["config", "grid"]) == 0
    assert tomllib.loads(capsys.readouterr().out) == {
        "grid": {"data": 1, "pipeline": 1, "tensor": [1, 1, 1], "sequence": 1, "expert": 1, "expert_tensor": 1}
    }
    assert main(["config", "precision.master"]) == 0
    expected = """[precision]
# of the weights that the optimizer updates (str, "fp32" or "compute")
master = "fp32"
"""
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gird", "unknown section gird; did you mean grid?"),
        ("run.stesp", "unknown key run.stesp; did you mean run.steps?"),
        ("replicas", "replicas is called data_parallel now"),
        ("replicas.method", "replicas.method is called data_parallel.method now"),
        ("pipeline.chunks", "pipeline.chunks is called pipeline.virtual_stages now"),
    ],
)
def test_options_that_are_not_there(capsys, name, message):
    assert main(["config", name]) == 2
    assert capsys.readouterr().err == f"hpctrain: error: {message}\n"


def test_the_help_of_train_points_to_the_options(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "`hpctrain config` prints every setting" in capsys.readouterr().out


def test_a_command_without_arguments_names_those_that_it_needs(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train"])
    assert capsys.readouterr().err.endswith("the following arguments are required: CONFIG.toml\n")


def test_an_output_that_cannot_show_all_characters(monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    assert main(["config", "grid"]) == 0
    sys.stdout.flush()
    assert b"ring ? ulysses" in output.getvalue()


def test_python_m_hpctrain():
    command = [sys.executable, "-m", "hpctrain", "ranks", "jobs/train.toml"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout == "8\n"
