"""What all ranks decide alike in every step: whether it may be taken, whether to stop, how far a save is."""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable

import torch

from hpctrain import comm
from hpctrain.checkpoint import Checkpointer
from hpctrain.config import Config
from hpctrain.grid import Grid
from hpctrain.train.sanity import BadStep, Sanity
from hpctrain.train.signals import Interrupts

AGREE_EVERY = 20  # batches of a validation at most, until a stop is seen by all
AGREE_WITHIN = 5.0  # seconds, about, likewise


class Agreement:
    """One small all-reduce a step, of what each rank has to say.

    Where ranks go at their own pace it is begun in a step and read `lag` steps later, when all have begun it: nobody
    waits for it. All ranks read the same in the same step, so that they stop, save and go back after the same one; a
    bad step is then among those taken.

    Args:
        lag: of the `DataParallelStrategy`.
        sanity: judges the steps.
        interrupts: why this rank would stop, or None.

    Attributes:
        stop: why all ranks stop after this step, a code of `signals.REASONS`; 0 where they do not.
        save_by_clock: a checkpoint is due after this step, by rank 0's clock.
        phase_done: every rank has done its part of the save that is under way.
    """

    def __init__(
        self, config: Config, grid: Grid, lag: int, checkpointer: Checkpointer, sanity: Sanity,
        interrupts: Interrupts | None,
    ):  # fmt: skip
        self.run, self.grid, self.lag = config.run, grid, lag
        self.checkpointer, self.sanity, self.interrupts = checkpointer, sanity, interrupts
        self.stop, self.save_by_clock, self.phase_done = 0, False, False
        self._under_way: collections.deque[comm.Work] = collections.deque()
        self._outdated = 0  # of those under way, which were begun before a decision and say nothing of what is now
        self._batches = 1
        self._saved_at = time.monotonic()

    def judge(self, loss: float, norm: float, began: float) -> BadStep | None:
        """Before the update of a step: why it must not be made, if so. Collective.

        Args:
            began: `time.perf_counter()` when the step began.
        """
        self.phase_done = self.save_by_clock = False
        saving = self.checkpointer.busy and not self.checkpointer.phase_done
        stop = self.interrupts.code if self.interrupts else 0
        milliseconds = int(1000 * (time.perf_counter() - began))
        codes = self.sanity.judge(loss, norm), stop, int(saving), self._is_late(), milliseconds
        reduce = comm.all_reduce_start if self.lag else lambda *given: comm.done(comm.all_reduce(*given))
        self._under_way.append(reduce(torch.tensor(codes), self.grid.world, "max"))
        if len(self._under_way) <= self.lag:
            return None
        bad, self.stop, saving, late, milliseconds = self._under_way.popleft().wait().tolist()
        self._batches = max(1, min(AGREE_EVERY, int(1000 * AGREE_WITHIN / max(1, milliseconds))))
        if self._outdated:
            self._outdated -= 1
            return None
        self.phase_done, self.save_by_clock = self.checkpointer.busy and not saving, bool(late)
        if bad or self.phase_done:
            self._outdated = len(self._under_way)
        return self.sanity.bad(bad, loss, norm) if bad else None

    def finish(self) -> None:
        """After the last step: wait for what is under way. Collective."""
        while self._under_way:
            self._under_way.popleft().wait()

    def stop_in_validation(self) -> Callable[[], bool]:
        """For one validation: a function that says, before each batch, whether all are to stop. Collective; it asks the
        others about once in AGREE_WITHIN seconds."""
        calls = itertools.count(1)

        def stop() -> bool:
            if self.interrupts and next(calls) % self._batches == 0:
                code = torch.tensor(max(self.stop, self.interrupts.code))
                self.stop = int(comm.all_reduce(code, self.grid.world, "max"))
            return bool(self.stop)

        return stop

    def save_due(self, step: int) -> bool:
        """Whether a checkpoint is due after a step: by its number, by the clock or as all stop."""
        every = self.run.checkpoint_every
        by_number = every and (step % every == 0 or step == self.run.steps)
        return bool(by_number or self.save_by_clock or self.stop)

    def save_begins(self) -> None:
        """The minutes until the next save count from now."""
        self._saved_at, self.save_by_clock = time.monotonic(), False
        self._outdated = len(self._under_way)

    def _is_late(self) -> int:
        minutes = self.run.checkpoint_minutes
        return int(self.grid.rank == 0 and minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes)
