"""What a user sees first: the names of `hpctrain`, and what they take."""

import importlib
import subprocess
import sys

import pytest
from running import warm

import hpctrain as ht

NAMES = """Grid RngKey Shard Trainer checkpoint clip_grad_norm_ comm data data_parallel gather_gradients
    gather_optimizer_state gather_state_dict layers load_config load_optimizer_state matmul models parallelize pipeline
    plan register_rule sync_gradients train"""


def test_dir_shows_the_public_names():
    assert dir(ht) == sorted([*NAMES.split(), "__version__"])
    assert sorted(ht.__all__) == NAMES.split()


@pytest.mark.parametrize("name", NAMES.split())
def test_every_name_is_there(name):
    found = getattr(ht, name)
    assert found is not None
    if name in ht._MODULES:
        assert found is importlib.import_module(f"hpctrain.{name}")


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'hpctrain' has no attribute 'sync'"):
        ht.sync  # noqa: B018


def test_models_are_there_by_name():
    """In a process that has imported none of them."""
    code = "import hpctrain as ht; print(*(getattr(ht.models, name).__name__ for name in ('gpt2', 'llama', 'mixtral')))"
    ran = subprocess.run(warm([sys.executable, "-c", code]), capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["hpctrain.models.gpt2", "hpctrain.models.llama", "hpctrain.models.mixtral"]
