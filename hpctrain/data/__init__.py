"""Training data: text packed into checksummed HDF5 token shards, read in an order that no grid changes."""

from hpctrain.data.mixture import MixedOrder
from hpctrain.data.order import SampleOrder
from hpctrain.data.pack import pack
from hpctrain.data.shards import ShardedTokens

__all__ = ["MixedOrder", "SampleOrder", "ShardedTokens", "pack"]
