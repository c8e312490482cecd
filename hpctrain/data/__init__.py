"""Training data: text packed into checksummed HDF5 token shards, read in an order that no grid changes."""

from hpctrain.data.order import SampleOrder
from hpctrain.data.pack import pack
from hpctrain.data.shards import ShardedTokens

__all__ = ["SampleOrder", "ShardedTokens", "pack"]
