"""Torch modules into grid-parallel ones: `ht.parallelize`, and what a training loop needs beside it.

The package is not called `parallelize`, as `ht.parallelize` is the function.
"""

from hpctrain.convert.parallelize import parallelize
from hpctrain.convert.state import gather_state_dict
from hpctrain.convert.steps import clip_, sync

__all__ = ["clip_", "gather_state_dict", "parallelize", "sync"]
