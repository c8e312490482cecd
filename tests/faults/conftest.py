"""Real jobs that are made to fail."""

from pathlib import Path

import pytest
from running import start, text
from tiny_jobs import command
from two_checkpoints import root

collect_ignore = ["faulty.py"]  # a job's program, which needs its rank

__all__ = ["root", "start", "text", "tiny"]


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.job)


@pytest.fixture
def tiny(start, tmp_path, text):
    """tiny(script) begins a job of these statements on two ranks; cold=True where signals go to their process ids."""
    return lambda script, cold=False: start(*command(tmp_path, text, script, 2), cold=cold)
