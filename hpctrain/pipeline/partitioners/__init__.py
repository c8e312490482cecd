"""Partitions: which consecutive layers of a chain make each stage, so that unequal layers keep all ranks busy."""

from hpctrain.pipeline.partitioners.costs import LayerCosts
from hpctrain.pipeline.partitioners.methods import METHODS, check_counts, partition, score

__all__ = ["METHODS", "LayerCosts", "check_counts", "partition", "score"]
