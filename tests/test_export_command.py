"""`hpctrain export` and the options of `hpctrain checkpoint`."""

import os

import pytest

from hpctrain import files
from hpctrain.cli import main


def test_an_export_is_the_user_s_own(tmp_path, capsys):
    """To change and to delete, of a run that may only be read, as others' runs are."""
    run, out = tmp_path / "run", tmp_path / "out"
    (run / "model" / files.DRAFT).mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (run / "model" / name).write_text(name)
        (run / "model" / name).chmod(0o444)
    (run / "model").chmod(0o555)
    assert main(["export", str(run), "-o", str(out)]) == 0
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "config.json": "config.json", "model.safetensors": "model.safetensors",
    }  # fmt: skip
    assert all(path.stat().st_mode & 0o200 for path in (out, *out.iterdir()))
    assert main(["export", str(run), "-o", str(out)]) == 2
    assert capsys.readouterr().err == f"hpctrain: error: {out} exists and is not an empty folder; choose another\n"
    os.chmod(run / "model", 0o755)


@pytest.mark.parametrize("action", ["ls", "verify"])
@pytest.mark.parametrize("option", [["-o", "out"], ["--weights", "ema"]])
def test_what_is_for_export_alone(tmp_path, capsys, action, option):
    assert main(["checkpoint", action, str(tmp_path), *option]) == 2
    assert f"-o and --weights are for export, got {action}; leave them out" in capsys.readouterr().err
