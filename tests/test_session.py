"""What is checked before a job's parts are built."""

import pytest

from hpctrain.config import load_config
from hpctrain.train.session import build

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


@pytest.mark.parametrize("resumes", [False, True])
def test_ranks_with_other_settings(world, resumes):
    """As mpirun -n 1 hpctrain train a.toml : -n 1 hpctrain train a.toml run.steps=3 starts them; on all ranks."""
    config = load_config(None, [f"run.steps={2 if resumes else 2 + world.rank}", "grid.data=2"])
    text = "--resume = 'must', and rank 0 with ''" if resumes else "run.steps = 3, and rank 0 with 2"
    with pytest.raises(ValueError, match=f"rank 1 was started with {text}; start all ranks alike"):
        build(config, world, "must" if resumes and world.rank else "")
