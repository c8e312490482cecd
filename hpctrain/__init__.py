"""hpctrain: train on a data × pipeline × tensor grid of MPI ranks, equal to training on one.

Importing this package starts neither MPI nor torch; names load what they need when first used.
"""

import importlib

__version__ = "0.1.0"

_HOME = {
    "Grid": "hpctrain.grid",
    "Shard": "hpctrain.shard",
    "RngKey": "hpctrain.randomness",
    "Trainer": "hpctrain.train.trainer",
    "parallelize": "hpctrain.one_line",
    "register_rule": "hpctrain.convert",
    "gather_state_dict": "hpctrain.convert",
    "gather_gradients": "hpctrain.convert",
    "gather_optimizer_state": "hpctrain.convert",
    "load_optimizer_state": "hpctrain.convert",
    "sync_gradients": "hpctrain.convert",
    "clip_grad_norm_": "hpctrain.convert",
    "load_config": "hpctrain.config",
}
_MODULES = (
    "checkpoint", "comm", "data", "data_parallel", "layers", "matmul", "models", "pipeline", "plan", "train",
)  # fmt: skip

__all__ = [*_HOME, *_MODULES]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"hpctrain.{name}")
    raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
