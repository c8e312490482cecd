"""All-reduce algorithms, and which of them sums over an axis."""

from hpctrain.comm.algorithms.reducer import Reducer, choose_all_reduce

__all__ = ["Reducer", "choose_all_reduce"]
