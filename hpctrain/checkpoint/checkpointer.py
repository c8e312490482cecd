"""Saving and finding the checkpoints of a job, by all of its ranks together."""

from __future__ import annotations

import contextlib
import logging
import operator
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain import comm
from hpctrain.checkpoint import checks, folder, index, reading
from hpctrain.checkpoint.index import Node
from hpctrain.checkpoint.manifests import Manifest
from hpctrain.checkpoint.pieces import Corrupt, OtherVersion, check_entry
from hpctrain.checkpoint.save_phases import Save
from hpctrain.shard import split
from hpctrain.shard_entries import Entry, State

if TYPE_CHECKING:
    from mpi4py import MPI

log = logging.getLogger("hpctrain")


class Checkpointer:
    """Saves, in the background unless that is False. All methods are collective, and all ranks learn how each ended.

    A checkpoint goes through the phases of `save_phases.Save`. Each rank does its part of one in a thread; `poll`, in
    the training loop, goes on to the next once all ranks are done. MPI is used by the loop alone.

    Args:
        root: the folder of checkpoints.
        world: communicator (mpi4py) of all ranks.
        keep: how many checkpoints stay, at least 1.
        background: write while training goes on; `save` then takes as long as a copy in memory.

    Attributes: `saved`, step of the newest checkpoint, or None.
    """

    def __init__(self, root: Path, world: MPI.Intracomm | comm.WatchedComm, keep: int = 2, background: bool = True):
        if sys.byteorder != "little":
            raise ValueError("checkpoints hold little-endian numbers, this machine's are big-endian")
        keep = checked_int("keep", keep, 1)  # 0 would delete the checkpoint that was just saved
        self.root, self.world, self.keep, self.background = root, world, keep, background
        self._stalled = 0.0
        self.saved: int | None = None
        self._under_way: Save | None = None
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def busy(self) -> bool:
        """Whether a save is under way: the same on all ranks."""
        return self._under_way is not None

    @property
    def phase_done(self) -> bool:
        """Whether this rank has done its part; once all have, `poll` may be called."""
        return self._under_way is not None and self._under_way.done

    def take_stall(self) -> float:
        """Seconds for which training stood still since the last call."""
        stalled, self._stalled = self._stalled, 0.0
        return stalled

    def save(self, step: int, state: State, about: dict) -> str | None:
        """Save, or begin to. Returns why that failed, or why an earlier save did that had to be waited for."""
        start = time.perf_counter()
        try:
            error = self.finish()
            with comm.together(self.world):
                entries = state.to_save()
                for entry in entries:
                    check_entry(entry)
                if self.world.rank == 0:
                    folder.clean(self.root)
                    folder.start(self.root, step)
                entries = self._snapshot(entries) if self.background else _on_host(entries)
            self._under_way = Save(self.root, self.world, self.keep, self.background, step, entries, about)
            self._under_way.begin()
            return error if self.background else error or self.finish()
        except (ValueError, OSError) as failed:
            return f"step {step}: {failed}"
        finally:
            self._stalled += time.perf_counter() - start

    def poll(self) -> str | None:
        """Go on to the next phase: to be called when this rank's part is done on all ranks. Returns why it failed."""
        start = time.perf_counter()
        save = self._under_way
        assert save is not None
        try:
            save.join()
            save.next()
        except Corrupt as problem:  # it cannot be read back: no checkpoint, but an older one may be there
            self._under_way = None
            self._set_aside(save.step, str(problem))
            self.saved = self.world.bcast(self._newest() if self.world.rank == 0 else None)
            return f"step {save.step}: {problem}"
        except (ValueError, OSError) as failed:
            self._under_way = None
            return self._failed(save, failed)
        finally:
            self._stalled += time.perf_counter() - start
        if save.published:
            self.saved = save.step
        if save.over:
            self._under_way = None
        return None

    def finish(self) -> str | None:
        """Wait for the save that is under way, if any. Returns why it failed."""
        while self.busy:
            if error := self.poll():
                return error
        return None

    def clean(self) -> None:
        """Remove what killed jobs left unfinished, as `save` does: for the one job that saves in the folder."""
        with comm.together(self.world):
            if self.world.rank == 0:
                folder.clean(self.root)

    def resume(self, state: State, suits: Callable[[Manifest], None] = lambda manifest: None) -> Manifest | None:
        """Load the newest valid checkpoint; None where there is none. Those that are bad are named and set aside.

        `suits` raises ValueError for a checkpoint that this job cannot go on from.

        Raises:
            ValueError: on every rank, when there are checkpoints of which none is valid, the newest is of another
                version, or the newest valid one does not suit.
            OSError: on a rank that cannot read a file, which says nothing of what the file holds; the others then raise
                a ValueError of its text, as `comm.agree` does.
        """
        found = None
        with comm.together(self.world):
            if self.world.rank == 0:
                found = folder.steps(self.root), folder.bad(self.root)
        steps, bad = self.world.bcast(found)
        for step in steps:
            path = folder.place(self.root, step)
            node, problem = self._together(_read, path if self.world.rank == 0 else None)
            if not problem:
                node = self.world.bcast(node)
                _, problem = self._together(self._check_files, node)
            if not problem:
                with comm.together(self.world):
                    suits(node.manifest)
                # refused by one rank, nothing is read by another
                entries, _ = self._together(state.to_load, reading.described(node.manifest))
                _, problem = self._together(reading.load, node, entries)
            if not problem:
                state.loaded()
                self.saved = step
                return node.manifest
            self._set_aside(step, problem)
        if steps or bad:
            raise ValueError(
                f"none of the checkpoints in {self.root} can be used; start without --resume, or with another folder, "
                "to begin anew"
            )
        return None

    def describe_newest(self) -> str:
        """In words, what a job that goes on would start from."""
        if self.saved is None:
            return "nothing is saved"
        return f"the newest checkpoint is {self.root}/step-{self.saved}; go on with --resume"

    def _check_files(self, node: Node) -> None:
        """The files, shared out among the ranks, but for what is checked when it is read."""
        for path, files in index.stored(node, split(node.manifest.files, self.world.size, self.world.rank)):
            for file in files:
                checks.check(path / file.name, file)

    def _together(self, action: Callable, *arguments):
        """What the action gives, and what is wrong with the checkpoint, if anything: the same on all ranks."""
        result = problem = None
        with comm.together(self.world):
            try:
                result = action(*arguments)
            except Corrupt as error:
                problem = str(error)
        return result, next(filter(None, self.world.allgather(problem)), None)

    def _set_aside(self, step: int, problem: str) -> None:
        with comm.together(self.world):
            if self.world.rank == 0:
                kept = folder.set_aside(self.root, step)
                log.warning("WARNING: checkpoint step-%d is not used: %s. It is kept as %s", step, problem, kept.name)

    def _snapshot(self, entries: list[Entry]) -> list[Entry]:
        """Copies in host memory, which is kept from save to save: new pages cost more than the copy."""
        copies = []
        for number, entry in enumerate(entries):
            key = f"{number} {entry.name}"
            buffer = self._buffers.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (entry.tensor.shape, entry.tensor.dtype):
                buffer = self._buffers[key] = torch.empty_like(entry.tensor, device="cpu")
            copies.append(Entry(entry.name, entry.shard, buffer.copy_(entry.tensor)))
        return copies

    def _failed(self, save: Save, error: Exception) -> str | None:
        """Remove what a failed save left. One that is complete stays, and so do the older ones."""
        if save.published:
            if self.world.rank == 0:
                path = folder.place(self.root, save.step)
                log.warning("WARNING: %s stays, and older ones beside it, not being verified: %s", path, error)
            return None
        if self.world.rank == 0:
            try:
                folder.clean(self.root)
            except OSError as stays:
                log.warning("WARNING: %s stays: %s", folder.unfinished(self.root, save.step), stays)
        return f"step {save.step}: {error}"

    def _newest(self) -> int | None:
        try:
            return next(iter(folder.steps(self.root)), None)
        except OSError:
            return None


def checked_int(name: str, value: Any, least: int) -> int:
    """`value` as an int, which one of NumPy is not. Raises ValueError where it is no integer of at least `least`."""
    with contextlib.suppress(TypeError):
        if (number := operator.index(value)) >= least:
            return number
    raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _read(path: Path | None) -> Node | None:
    """A checkpoint's manifest. One of another version is nothing to set aside: whoever wrote it can use it."""
    try:
        return index.read(path) if path else None
    except OtherVersion as error:
        raise ValueError(f"{error}; go on with the hpctrain that saved it, or start anew without --resume") from error


def _on_host(entries: list[Entry]) -> list[Entry]:
    return [Entry(entry.name, entry.shard, entry.tensor.cpu()) for entry in entries]
