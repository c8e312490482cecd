"""One save under way: the phases it goes through, and a rank's part of each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import comm
from hpctrain.checkpoint import folder, index, manifests, shards
from hpctrain.checkpoint.index import Summary
from hpctrain.checkpoint.pieces import Corrupt, dtype_name
from hpctrain.shard_entries import Entry

if TYPE_CHECKING:
    from mpi4py import MPI

TAG = 1201  # of messages with a Summary

log = logging.getLogger("hpctrain")


class Save:
    """A part is done in a thread, while training goes on; in between, `next` tells others of it by MPI.

        write      each rank: files of its shards and their manifest
        group      the first of each group of ranks: the group's manifest
        publish    rank 0: the checkpoint's manifest, rename, `latest`
        verify     each rank, where older ones are to go: its files once more, by their checksums
        prune      rank 0: all but the newest `keep`

    Attributes: `published`, whether it is a checkpoint; `over`, whether nothing is left to be done.
    """

    def __init__(
        self, root: Path, world: MPI.Intracomm | comm.WatchedComm, keep: int, background: bool, step: int,
        entries: list[Entry],
        about: dict,
    ):  # fmt: skip
        self.root, self.world, self.keep, self.background = root, world, keep, background
        self.step, self.about = step, about
        self.published = self.over = False
        self._entries = entries
        self._parts: list[Summary] | None = None  # where this rank gathers those of others
        self._phase: Callable[[], object] = self._write
        self._thread: threading.Thread | None = None
        self._result: Any = None  # of the phase
        self._error: Exception | None = None

    def begin(self) -> None:
        """Start this rank's part of the phase."""
        self._result = self._error = None
        if self.background:
            # no daemon, which the interpreter's end stops within h5py, to wait for ever for the lock of all of h5py
            self._thread = threading.Thread(target=self._run, name="hpctrain checkpoint")
            self._thread.start()
        else:
            self._run()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def next(self) -> None:
        """Agree on how the phase ended, and begin the next. Raises on all ranks where it failed on any: Corrupt for a
        checkpoint that is there, but not as it was written."""
        world = self.world
        if self._phase == self._verify:
            problems = world.allgather(str(self._error) if isinstance(self._error, Corrupt) else None)
            if problem := next(filter(None, problems), None):
                raise Corrupt(problem)
        comm.agree(world, self._error)
        if self._phase == self._write:
            self._entries = []
            ranks = range(self._leader, min(self._leader + manifests.GROUP, world.size))
            self._parts = self._gathered(self._result, ranks)
            self._phase = self._group
        elif self._phase == self._group:
            self._parts = None
            if world.rank == self._leader:
                self._parts = self._gathered(self._result, range(0, world.size, manifests.GROUP))
            self._phase = self._publish
        elif self._phase == self._publish:
            size, self.over = world.bcast(self._result)
            self.published = True
            if world.rank == 0:
                log.info("saved %s (%.1f MB)", folder.place(self.root, self.step), size / 1e6)
            self._phase = self._verify
        elif self._phase == self._verify:
            self._phase = self._prune
        else:
            self.over = True
        if not self.over:
            self.begin()

    def _gathered(self, own: Summary, ranks: range) -> list[Summary] | None:
        """On the first of these ranks, the summaries of all of them."""
        if self.world.rank != ranks[0]:
            self.world.send(own, ranks[0], TAG)
            return None
        return [own, *(self.world.recv(source=rank, tag=TAG) for rank in ranks[1:])]

    def _run(self):
        try:
            self._result = self._phase()
        except (ValueError, OSError) as error:
            kind = Corrupt if isinstance(error, Corrupt) and self._phase == self._verify else OSError
            self._error = kind(f"rank {self.world.rank}: {error}")
        except Exception as error:  # a thread's own errors go unseen
            self._error = error

    @property
    def _leader(self) -> int:
        return self.world.rank // manifests.GROUP * manifests.GROUP

    @property
    def _path(self) -> Path:
        """The folder of this rank's group."""
        return folder.unfinished(self.root, self.step) / manifests.group_name(self.world.rank // manifests.GROUP)

    def _write(self) -> Summary:
        entries = [entry for entry in self._entries if entry.shard.global_shape]
        numbers = [entry for entry in self._entries if not entry.shard.global_shape]
        scalars = {entry.name: (dtype_name(entry.tensor.dtype), entry.tensor.item()) for entry in numbers}
        tensors = {entry.name: (dtype_name(entry.tensor.dtype), tuple(entry.shard.global_shape)) for entry in entries}
        entries = [entry for entry in entries if entry.tensor.numel()]
        if entries:
            self._path.mkdir(exist_ok=True)
        self._files = shards.write(self._path, self.world.rank, entries)
        return index.write_rank(self._path, self.step, self.world.rank, tensors, scalars, self._files)

    def _group(self) -> Summary | None:
        return index.write_group(self._path, self.step, self._parts) if self._parts else None

    def _publish(self):
        if self.world.rank:
            return None
        assert self._parts is not None
        manifest = index.write(folder.unfinished(self.root, self.step), self.step, self._parts, self.about)
        folder.publish(self.root, self.step)
        return manifest.bytes, len(folder.steps(self.root)) <= self.keep

    def _verify(self):
        path = folder.place(self.root, self.step) / self._path.name
        for file in self._files:
            shards.check_contents(path / file.name, file)

    def _prune(self):
        if self.world.rank == 0:
            folder.prune(self.root, self.keep)
