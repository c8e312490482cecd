"""What of a training job goes into a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from hpctrain.data_parallel import DataParallelStrategy
from hpctrain.layers.whole_parameters import shards_of_buffers
from hpctrain.parameter import annotate, shard_of
from hpctrain.shard_entries import Described, Entry


class TrainingState:
    """The parameters of a model, the buffers that `state_dict()` has, such as running statistics, and the state of the
    optimizer, wherever the strategy has them. Collective, as stages of a pipeline may have the same buffer.

    Attributes: `names` of parameters.
    """

    def __init__(self, model: torch.nn.Module, strategy: DataParallelStrategy):
        self.strategy = strategy
        # tied parameters have one name, that of the stage which counts them
        self.names = {p: getattr(p, "same_as", name) for name, p in model.named_parameters()}
        self._model, self._shards = model, shards_of_buffers(model, strategy.grid)
        self._stacks = {f"/{name}": stack for p, name in self.names.items() if (stack := _stack_of(p))}

    def to_save(self) -> list[Entry]:
        parts = self._in_whole_shape(self.strategy.to_save(self.names | self._buffers()))
        return [p if p.tensor.is_contiguous() else dataclasses.replace(p, tensor=p.tensor.contiguous()) for p in parts]

    def to_load(self, saved: dict[str, Described]) -> list[Entry]:
        stacked = {
            name: Described(stack.of(each.shape), each.dtype)
            for name, each in saved.items()
            if (stack := self._stack_of(name))
        }
        return list(self._in_whole_shape(self.strategy.to_load(self.names | self._buffers(), {**saved, **stacked})))

    def loaded(self) -> None:
        self.strategy.loaded()

    def _stack_of(self, name):
        return self._stacks.get(name[name.rfind("/") :])

    def _in_whole_shape(self, entries: list[Entry]) -> Iterator[Entry]:
        for entry in entries:
            stack = self._stack_of(entry.name)
            yield from stack.apart(entry) if stack and stack.is_of(entry.shard.global_shape) else [entry]

    def _buffers(self) -> dict[torch.nn.Parameter, str]:
        """As parameters that are not trained, in the memory that they have now: a module may give them other."""
        buffers = {name: self._model.get_buffer(name).detach() for name in self._shards}
        made = {name: torch.nn.Parameter(buffer, requires_grad=False) for name, buffer in buffers.items()}
        return {annotate(each, shard=self._shards[name]): name for name, each in made.items()}


class Stack(NamedTuple):
    """Matrices in one weight, as of queries, keys and values, of each of which a rank has the same part. Its shards
    have a dim for their number, `dim` of `shape`; checkpoints have the weight as it is, which no grid changes.

    Replicas that differ come with a dim of their own before these.
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dim: int

    def is_of(self, shape: tuple[int, ...]) -> bool:
        return shape[-len(self.shape) :] == self.shape

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The same with the dim, of a shape that checkpoints have."""
        before = len(shape) - len(self.whole)
        return (*shape[:before], *self.shape) if shape[before:] == self.whole else shape

    def apart(self, entry: Entry) -> Iterator[Entry]:
        """Of each matrix its part."""
        shard, dim = entry.shard, len(entry.shard.global_shape) - len(self.shape) + self.dim
        rows, memory = self.shape[self.dim + 1], entry.tensor.view(shard.shape)
        number, part = shard.slices[dim : dim + 2]
        for place, matrix in enumerate(range(number.start, number.stop)):
            here = slice(matrix * rows + part.start, matrix * rows + part.stop)
            there = dataclasses.replace(
                shard, global_shape=(*shard.global_shape[: -len(self.shape)], *self.whole),
                slices=(*shard.slices[:dim], here, *shard.slices[dim + 2 :]),
            )  # fmt: skip
            yield Entry(entry.name, there, memory.select(dim, place))


def _stack_of(parameter):
    stacked, whole = shard_of(parameter).global_shape, vars(parameter).get("whole_shape")
    if whole is None or len(stacked) == len(whole):
        return None
    whole = tuple(whole)
    return Stack(stacked, whole, next(n for n, length in enumerate(stacked) if whole[n : n + 1] != (length,)))
