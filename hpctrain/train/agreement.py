"""What all ranks decide alike in every step: whether it may be taken, whether to stop, how far a save is."""

from __future__ import annotations

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

AGREE_EVERY = 20  # steps at most, where ranks are to go at their own pace
AGREE_WITHIN = 5.0  # seconds that pass, about, until a stop is seen by all


class Agreement:
    """One small all-reduce a step. Where ranks go at their own pace, they meet once in AGREE_WITHIN seconds, about, and
    before each step that is saved.

    Args:
        lockstep: all ranks take the same step at about the same time.
        sanity: judges the steps.
        interrupts: why this rank would stop, or None.

    Attributes:
        stop: why all ranks stop after this step, a code of `signals.REASONS`; 0 where they do not.
        save_by_clock: a checkpoint is due after this step, by rank 0's clock.
        phase_done: every rank has done its part of the save that is under way.
    """

    def __init__(
        self, config: Config, grid: Grid, lockstep: bool, checkpointer: Checkpointer, sanity: Sanity,
        interrupts: Interrupts | None,
    ):  # fmt: skip
        self.run, self.grid, self.lockstep = config.run, grid, lockstep
        self.checkpointer, self.sanity, self.interrupts = checkpointer, sanity, interrupts
        self.stop, self.save_by_clock, self.phase_done = 0, False, False
        self._steps_within, self._next = 1, 0
        self._saved_at = time.monotonic()

    def judge(self, step: int, loss: float, norm: float, began: float) -> BadStep | None:
        """Before the update of the step after `step` steps: why it must not be made, if so. Collective.

        Args:
            began: `time.perf_counter()` when the step began.
        """
        self.phase_done = self.save_by_clock = False
        if not (self.lockstep or step >= self._next or self.save_by_number(step + 1)):
            return None
        saving = self.checkpointer.busy and not self.checkpointer.phase_done
        stop = self.interrupts.code if self.interrupts else 0
        milliseconds = int(1000 * (time.perf_counter() - began))
        bad, self.stop, saving, late, milliseconds = self._largest(
            self.sanity.judge(loss, norm), stop, int(saving), self._is_late(), milliseconds
        )
        self.phase_done, self.save_by_clock = self.checkpointer.busy and not saving, bool(late)
        self._steps_within = max(1, min(AGREE_EVERY, int(1000 * AGREE_WITHIN / max(1, milliseconds))))
        self._next = step + self._steps_within
        return self.sanity.bad(bad, loss, norm) if bad else None

    def stop_in_validation(self) -> Callable[[], bool]:
        """For one validation: a function that says, before each batch, whether all are to stop. Collective; it asks the
        others about once in AGREE_WITHIN seconds."""
        calls = itertools.count(1)

        def stop() -> bool:
            if self.interrupts and next(calls) % self._steps_within == 0:
                (self.stop,) = self._largest(max(self.stop, self.interrupts.code))
            return bool(self.stop)

        return stop

    def save_by_number(self, step: int) -> bool:
        """Whether a checkpoint is due after a step, by its number."""
        every = self.run.checkpoint_every
        return bool(every) and (step % every == 0 or step == self.run.steps)

    def save_begins(self) -> None:
        """The minutes until the next save count from now."""
        self._saved_at, self.save_by_clock = time.monotonic(), False

    def _is_late(self) -> int:
        minutes = self.run.checkpoint_minutes
        return int(self.grid.rank == 0 and minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes)

    def _largest(self, *codes: int) -> list[int]:
        """The largest that any rank has, of each code."""
        return comm.all_reduce(torch.tensor(codes), self.grid.world, "max").tolist()
