"""Small training jobs."""

import pytest
from running import SMALL, python, start, text

__all__ = ["python", "start", "text", "train"]


@pytest.fixture
def train(start, tmp_path, text):
    """train(ranks, override, ...) begins a small training job, its runs in the test's folder."""

    def begin(ranks, *overrides, program=("hpctrain",), config=None):
        if config is not None:
            return start(ranks, *program, "train", str(config), *overrides)
        config = tmp_path / "config.toml"
        config.write_text(f'[run]\nout = "{tmp_path}/runs"\n[data]\ntext = ["{text}"]\n')
        return start(ranks, *program, "train", str(config), *SMALL, *overrides)

    return begin
