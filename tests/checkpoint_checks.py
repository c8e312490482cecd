"""A little state to save, and a communicator of one rank that needs no MPI."""

import torch

from hpctrain.shard import Shard
from hpctrain.shard_entries import Entry

SHARDS = "ranks-00000/rank-00000.h5"  # of the first rank


class Alone:
    """What the checkpointer asks of a communicator, for one rank."""

    rank, size = 0, 1

    def allgather(self, value):
        return [value]

    def gather(self, value):
        return [value]

    def bcast(self, value):
        return value


class Numbers:
    """Tensors of several types, with recognisable values, held whole by one rank."""

    def __init__(self, scale=1, sizes=((7, 5), (3,), (130, 70))):
        kinds = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
        self.tensors = {
            f"{k}/{str(kind)[6:]}.{n}": (torch.arange(torch.Size(size).numel()) * scale % 251).view(size).to(kind)
            for n, size in enumerate(sizes)
            for k, kind in enumerate(kinds)
        }
        self.tensors["step"] = torch.tensor(float(scale))

    def to_save(self):
        return [Entry(name, whole(t.shape), t) for name, t in self.tensors.items()]

    def to_load(self, saved):
        assert {name: (tuple(t.shape), t.dtype) for name, t in self.tensors.items()} == saved
        return self.to_save()

    def loaded(self):
        """Nothing is held twice."""

    def clear(self):
        for tensor in self.tensors.values():
            tensor.zero_()

    def __eq__(self, other):
        return all(torch.equal(t, other.tensors[name]) for name, t in self.tensors.items())


def whole(shape):
    return Shard(tuple(shape), tuple(slice(0, size) for size in shape))
