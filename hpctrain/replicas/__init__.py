"""Keeping the replicas of a model alike."""

from hpctrain.replicas.data_parallel import DataParallel

__all__ = ["DataParallel"]
