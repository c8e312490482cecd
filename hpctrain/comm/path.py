"""The path that tensors take along an axis, asked once, when a workspace or buffer is made."""

from __future__ import annotations

import enum

import torch

from hpctrain.grid import Axis


class Path(enum.Enum):
    LOCAL = "the axis has one rank: nothing moves"
    SHARED_MEMORY = "all ranks are on one node, tensors in host memory: the others' are read and written in place"
    MESSAGES = "all else: MPI moves the tensors, those of a device through pinned memory where MPI cannot reach it"


def path_of(axis: Axis, like: torch.Tensor) -> Path:
    """The path along `axis` of tensors that are where `like` is."""
    if axis.size == 1:
        return Path.LOCAL
    return Path.SHARED_MEMORY if axis.one_node and like.is_cpu else Path.MESSAGES
