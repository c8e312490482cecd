"""Scratch memory for collectives along an axis: what all its kinds do, and which kind an axis has."""

from __future__ import annotations

import torch

from hpctrain.comm.buffers import Work, done
from hpctrain.comm.message_workspace import MessageWorkspace
from hpctrain.comm.path import Path, path_of
from hpctrain.comm.rotation import LocalRotation, Rotation
from hpctrain.comm.shared_memory_workspace import SharedMemoryWorkspace
from hpctrain.comm.slices import Slices
from hpctrain.grid import Axis


class LocalWorkspace:
    """That of an axis with one rank: nothing is copied, what a method is given is its result.

    The methods that every workspace has; rank r holds `counts[r]` rows, elements or `widths[r]` columns. What they
    return is scratch memory, valid until the next call of the same workspace other than `buffer`.
    """

    def __init__(self, axis: Axis):
        self.axis = axis

    def gather(self, part: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        """All ranks' rows, in rank order."""
        return part

    def gather_counted(self, part: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        """The same where ranks do not know how many rows the others have, and these numbers. No scratch memory."""
        return part, (len(part),)

    def buffer(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """A flat tensor to fill with this rank's summands, for the sums below."""
        return like.new_empty(numel)

    def reserve(self, numel: int, like: torch.Tensor) -> None:
        """Make the memory for buffers of up to this size: none of them is waited for later."""

    def reduce(self, buffer: torch.Tensor, counts: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's elements of the sum of all ranks' buffers, in `dtype`, by default theirs."""
        return buffer if dtype is None else buffer.to(dtype)

    def reduce_start(
        self, buffer: torch.Tensor, counts: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Work[torch.Tensor]:
        """Begin `reduce`, which must be waited for before the next call of the same workspace."""
        return done(self.reduce(buffer, counts, dtype))

    def reduce_columns(self, buffer: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        """This rank's columns of the sum of all ranks' buffers, viewed as matrices."""
        return buffer

    def gather_columns(self, part: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        """All ranks' columns, in rank order."""
        return part

    def rows_to_columns(self, part: torch.Tensor, counts: tuple[int, ...], widths: tuple[int, ...]) -> torch.Tensor:
        """From counts[r] whole rows on each rank r to widths[r] whole columns, by an all-to-all."""
        return part

    def columns_to_rows(self, part: torch.Tensor, counts: tuple[int, ...], widths: tuple[int, ...]) -> torch.Tensor:
        """From widths[r] whole columns on each rank r to counts[r] whole rows. Adjoint and inverse of the above."""
        return part

    def rows_to_slices(self, parts: list[torch.Tensor], counts: tuple[int, ...], slices: Slices) -> list[torch.Tensor]:
        """From counts[r] rows of dim 2 of 4-dimensional tensors on each rank r to slices[t][r] of dim 1 of tensor t,
        by one all-to-all. What is returned is memory of its own, except here. The slices of a tensor may overlap.

        Elsewhere `parts` is empty after it, so that a tensor that the caller has nowhere else is gone as soon as it is
        copied."""
        return parts

    def slices_to_rows(self, parts: list[torch.Tensor], counts: tuple[int, ...], slices: Slices) -> list[torch.Tensor]:
        """From slices of dim 1 to rows of dim 2, each the sum over the ranks whose slices have it. Adjoint of the
        above; `parts` is empty after it likewise."""
        return parts

    def rotate(
        self, part: torch.Tensor, counts: tuple[int, ...], sum_dtype: torch.dtype | None = None, gather: bool = False
    ) -> Rotation:
        """Let every rank's flat block, of counts[r] elements, visit every rank; with `sum_dtype`, sums come back. With
        `gather` blocks that go by messages come all at once."""
        return LocalRotation(part, self.axis, sum_dtype)

    def add_up(self, buffer: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' buffers, in memory that all of them share. Not in the ledger, and not by messages."""
        return buffer

    def barrier(self) -> None:
        """What any rank wrote to the result of `add_up`, every rank sees after. Not by messages."""


Workspace = LocalWorkspace | SharedMemoryWorkspace | MessageWorkspace


def workspace(axis: Axis, like: torch.Tensor, use: str = "blocking") -> Workspace:
    """The axis's workspace for tensors that are where `like` is. Calls that return when they are done ("blocking"),
    sums that are "started" and those of "attention" have memory of their own, so that one may be under way beside
    another. That of attention is long sequences, once: the next call waits until all have done with it."""
    workspaces = axis.transport.workspaces
    found = workspaces.get((axis, like.is_cpu, use))
    if found is None:
        found = workspaces[axis, like.is_cpu, use] = new_workspace(axis, like, 1 if use == "attention" else 2)
    return found


def reduce_rows(workspace: Workspace, buffer: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' buffers, viewed as matrices."""
    width = buffer.shape[1]
    return workspace.reduce(buffer.view(-1), tuple(count * width for count in counts)).view(
        counts[workspace.axis.rank], width
    )


def new_workspace(axis: Axis, like: torch.Tensor, windows: int = 2) -> Workspace:
    """A workspace with memory of its own: in shared memory, so many windows in turn."""
    match path_of(axis, like):
        case Path.LOCAL:
            return LocalWorkspace(axis)
        case Path.SHARED_MEMORY:
            return SharedMemoryWorkspace(axis, windows)
        case Path.MESSAGES:
            return MessageWorkspace(axis)
