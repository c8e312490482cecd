"""Where jobs and modules are that belong to the package."""

from importlib import metadata

import pytest

from hpctrain import home


def test_a_package_that_came_alone(monkeypatch, tmp_path):
    """On PYTHONPATH, without its jobs, and installed nowhere."""

    def files(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.delenv("HPCTRAIN_ROOT", raising=False)
    monkeypatch.setattr(home, "PACKAGE", tmp_path / "hpctrain")
    monkeypatch.setattr(metadata, "files", files)
    with pytest.raises(ValueError, match="this hpctrain was installed without its jobs"):
        home.home()
