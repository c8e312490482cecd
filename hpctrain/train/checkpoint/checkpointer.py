"""Saving and finding the checkpoints of a job, by all of its ranks together."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hpctrain import comm
from hpctrain.state import Entry, State
from hpctrain.train.checkpoint import checks, folder, load, manifest, shards
from hpctrain.train.checkpoint.manifest import Corrupt, Manifest

log = logging.getLogger("hpctrain")


class Checkpointer:
    """Saves in the background, unless told to wait. All methods are collective, and all ranks learn how each ended.

    A checkpoint goes through four phases. Each rank does its part of one in a thread; `poll`, in the training loop,
    goes on to the next once all ranks are done. MPI is used by the loop alone.

        write      each rank: files of its shards, their SHA-256, fsync
        publish    rank 0: manifest, rename, `latest`
        verify     each rank, where older ones are to go: its files once more, by their checksums
        prune      rank 0: all but the newest `keep`

    Args:
        root: the folder of checkpoints.
        world: communicator (mpi4py) of all ranks.
        keep: how many checkpoints stay.
        background: write while training goes on; `save` then takes as long as a copy in memory.

    Attributes: `saved`, step of the newest checkpoint, or None.
    """

    def __init__(self, root: Path, world, keep: int = 2, background: bool = True):
        if sys.byteorder != "little":
            raise ValueError("checkpoints hold little-endian numbers, this machine's are big-endian")
        self.root, self.world, self.keep, self.background = root, world, keep, background
        self._stalled, self.saved = 0.0, None
        self._under_way: _Save | None = None
        self._room: dict[str, torch.Tensor] = {}

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
                if self.world.rank == 0:
                    folder.start(self.root, step)
                entries = self._snapshot(state.to_save()) if self.background else _on_host(state.to_save())
            self._under_way = _Save(self, step, entries, about)
            self._under_way.begin()
            return error if self.background else error or self.finish()
        except (ValueError, OSError) as failed:
            return f"step {step}: {failed}"
        finally:
            self._stalled += time.perf_counter() - start

    def poll(self) -> str | None:
        """Go on to the next phase: to be called when this rank's part is done on all ranks. Returns why it failed."""
        start = time.perf_counter()
        try:
            save = self._under_way
            save.join()
            save.next()
            if save.over:
                self._under_way = None
        except (ValueError, OSError) as failed:
            self._under_way = None
            self._abandon(save, str(failed))
            return f"step {save.step}: {failed}"
        finally:
            self._stalled += time.perf_counter() - start
        return None

    def finish(self) -> str | None:
        """Wait for the save that is under way, if any. Returns why it failed."""
        while self.busy:
            if error := self.poll():
                return error
        return None

    def resume(self, state: State, suits: Callable[[Manifest], None] = lambda told: None) -> Manifest | None:
        """Load the newest valid checkpoint; None where there is none. Those that are bad are named and set aside.

        `suits` raises ValueError for a checkpoint that this job cannot go on from.

        Raises:
            ValueError: on every rank, when there are checkpoints of which none is valid, or the newest valid one does
                not suit.
            OSError: on every rank, when one cannot read a file, which says nothing of what the file holds.
        """
        found = None
        with comm.together(self.world):
            if self.world.rank == 0:
                folder.clean(self.root)
                found = folder.steps(self.root), folder.bad(self.root)
        steps, bad = self.world.bcast(found)
        for step in steps:
            path = folder.place(self.root, step)
            told, problem = self._together(lambda path=path: manifest.read(path) if self.world.rank == 0 else None)
            if not problem:
                told = self.world.bcast(told)
                _, problem = self._together(self._check_files, path, told)
            if not problem:
                with comm.together(self.world):
                    suits(told)
                _, problem = self._together(load.load, path, told, state)
            if not problem:
                state.loaded()
                self.saved = step
                return told
            self._set_aside(step, problem)
        if steps or bad:
            raise ValueError(
                f"none of the checkpoints in {self.root} can be used; start without --resume to begin anew"
            )
        return None

    def _check_files(self, path: Path, told: Manifest) -> None:
        """The files, shared out among the ranks, but for what is checked when it is read."""
        for file in told.files[self.world.rank :: self.world.size]:
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
            room = self._room.get(key)
            if room is None or (room.shape, room.dtype) != (entry.tensor.shape, entry.tensor.dtype):
                room = self._room[key] = torch.empty_like(entry.tensor, device="cpu")
            copies.append(Entry(entry.name, entry.shard, room.copy_(entry.tensor)))
        return copies

    def _abandon(self, save: _Save, problem: str) -> None:
        """Remove what a failed save left; what could not be read back is no checkpoint."""
        if save.verifying:
            self.saved = None
            self._set_aside(save.step, problem)
        elif self.world.rank == 0:
            try:
                folder.clean(self.root)
            except OSError as error:
                log.warning("WARNING: %s stays: %s", folder.unfinished(self.root, save.step), error)


class _Save:
    """One save under way: the phase that it is in, and this rank's part of that."""

    def __init__(self, owner: Checkpointer, step: int, entries: list[Entry], about: dict):
        self.owner, self.step, self.about = owner, step, about
        self.entries = entries
        self.over = False
        self._phase = self._write
        self._thread: threading.Thread | None = None
        self._result = self._error = None

    def begin(self) -> None:
        """Start this rank's part of the phase."""
        self._result = self._error = None
        if self.owner.background:
            self._thread = threading.Thread(target=self._run, name="hpctrain checkpoint", daemon=True)
            self._thread.start()
        else:
            self._run()

    @property
    def verifying(self) -> bool:
        return self._phase == self._verify

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def next(self) -> None:
        """Agree on how the phase ended, and begin the next. Raises on all ranks where it failed on any."""
        owner, world = self.owner, self.owner.world
        comm.agree(world, self._error)
        if self._phase == self._write:
            self.entries = [entry for entry in self.entries if not entry.shard.global_shape]
            self._gathered = world.gather((self._result, self._numbers()))
            self._phase = self._publish
        elif self._phase == self._publish:
            owner.saved = self.step
            size, self.over = world.bcast(self._result)
            if world.rank == 0:
                log.info("saved %s (%.1f MB)", folder.place(owner.root, self.step), size / 1e6)
            self._phase = self._verify
        elif self._phase == self._verify:
            self._phase = self._prune
        else:
            self.over = True
        if not self.over:
            self.begin()

    def _run(self):
        try:
            self._result = self._phase()
        except (ValueError, OSError) as error:
            self._error = OSError(f"rank {self.owner.world.rank}: {error}")
        except Exception as error:  # a thread's own errors go unseen
            self._error = error

    def _write(self):
        path = folder.unfinished(self.owner.root, self.step)
        tensors = [entry for entry in self.entries if entry.shard.global_shape]
        self._described = {e.name: (_name(e.tensor.dtype), e.shard.global_shape) for e in tensors}
        self._files = shards.write(path, self.owner.world.rank, [entry for entry in tensors if entry.tensor.numel()])
        return self._files

    def _numbers(self):
        return self._described, {e.name: (_name(e.tensor.dtype), e.tensor.item()) for e in self.entries}

    def _publish(self):
        if self.owner.world.rank:
            return None
        tensors, scalars = {}, {}
        for _, (described, numbers) in self._gathered:
            tensors |= described
            scalars |= numbers
        made = Manifest(self.step, tensors, scalars, [f for files, _ in self._gathered for f in files], self.about)
        manifest.parse(made.text())  # what could not be read is not published
        folder.publish(self.owner.root, made)
        return made.bytes, len(folder.steps(self.owner.root)) <= self.owner.keep

    def _verify(self):
        path = folder.place(self.owner.root, self.step)
        for file in self._files:
            shards.check_contents(path / file.name, file)

    def _prune(self):
        if self.owner.world.rank == 0:
            folder.prune(self.owner.root, self.owner.keep)


def _on_host(entries: list[Entry]) -> list[Entry]:
    return [Entry(entry.name, entry.shard, entry.tensor.cpu()) for entry in entries]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
