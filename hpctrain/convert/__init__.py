"""Torch modules into grid-parallel ones: `ht.parallelize`, and what a training loop needs beside it.

The package is not called `parallelize`, as `ht.parallelize` is the function.
"""

from hpctrain.convert.parallelize import parallelize
from hpctrain.convert.state_dict import gather_state_dict
from hpctrain.convert.steps import clip_grad_norm_, sync_gradients

__all__ = ["clip_grad_norm_", "gather_state_dict", "parallelize", "sync_gradients"]
