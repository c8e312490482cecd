"""The steps of a job: train, measure, save, and decide alike on all ranks what to do when something is wrong."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time

import torch

from hpctrain import comm
from hpctrain.train.alike import Speeds, differing
from hpctrain.train.checkpoint.checkpointer import Checkpointer
from hpctrain.train.optimizer import learning_rate
from hpctrain.train.progress import Progress
from hpctrain.train.sanity import BadStep, Sanity
from hpctrain.train.signals import REASONS, Interrupts
from hpctrain.train.time_split import time_split

log = logging.getLogger("hpctrain")


AGREE_EVERY = 20  # steps at most, where ranks are to go at their own pace
AGREE_WITHIN = 5.0  # seconds that pass, about, until a stop is seen by all


class Stopped(RuntimeError):
    """Raised on every rank: the job must not go on."""


class Loop:
    """Steps from the one after `step` to the last.

    Args:
        job: `train.job.Job`, of which the loop uses configuration, grid, samples, trainer, run folder and state.
        checkpointer: saves and loads.
        interrupts: why to stop early, or None.

    Attributes: `step`, steps taken; `batches`, those of the sample order that were used or left out.
    """

    def __init__(self, job, checkpointer: Checkpointer, interrupts: Interrupts | None):
        self.job, self.config, self.grid, self.trainer = job, job.config, job.grid, job.trainer
        self.checkpointer, self.interrupts = checkpointer, interrupts
        self.speeds = Speeds(self.grid, self.config.sanity.straggler)
        self.sanity = Sanity(self.config.sanity.spike_factor)
        self.step = self.batches = self._bad = self._stop = 0
        self._may_poll = self._late = False
        self._unevaluated: dict | None = None  # a step's record, where a stop left no time for its validation
        self._steps_within, self._next_agreement = 1, 0
        self._saved_at, self._step_began = time.monotonic(), time.perf_counter()
        self.trainer.check = self._decide
        if interrupts:
            interrupts.saved = functools.partial(newest, checkpointer)

    def resume(self) -> None:
        """Go on from the newest valid checkpoint, if there is any.

        Raises:
            ValueError: on every rank, when there are some but none can be used.
        """
        told = self.checkpointer.resume(self.job.state, self.job.check_origin)
        self.step = self.batches = 0
        if told is not None:
            self.step, self.batches = told.step, told.about["data"]["batches"]
            self.sanity.losses = told.about["sanity"]["losses"]
            self._unevaluated = told.about.get("unevaluated")

    def run(self) -> str:
        """Train to the last step, or until there is a reason to stop, which is returned.

        Raises:
            BadStep, Stopped: on every rank.
        """
        config, folder = self.config, self.job.folder
        steps, every, compare = config.run.steps, config.run.eval_every, config.sanity.check_every
        progress = Progress(steps) if folder else None
        validation = self.job.validation_batches()
        try:
            if self._unevaluated and self._evaluate(self._unevaluated, validation) and folder:
                folder.begin(self.step - 1)
                folder.log(self._unevaluated)
            if not self._stop:
                self._unevaluated = None
            while self.step < steps and not self._stop:
                record = self.take_step()
                if record is None:
                    continue  # rolled back
                self._unevaluated = None
                if self.step == steps or (every and self.step % every == 0):
                    self._unevaluated = None if self._evaluate(record, validation) else record
                if folder:
                    folder.log(record)
                    progress.update(record)
                if compare and (self.step % compare == 0 or self._due(self.step) or self._late):
                    self._compare()
                self._save_when_due()
        finally:
            if progress:
                progress.close()
        self._report(self.checkpointer.finish())
        return REASONS[self._stop] if self.step < steps or self._unevaluated else ""

    def _evaluate(self, record: dict, validation: list) -> bool:
        """Add the validation loss to a step's record; False where the job is told to stop before that is known."""
        asked = itertools.count(1)

        def stops():
            if self.interrupts and next(asked) % self._steps_within == 0:
                (self._stop,) = self._largest(max(self._stop, self.interrupts.code))
            return bool(self._stop)

        loss = self.trainer.evaluate(validation, stops)
        if loss is not None:
            record["val_loss"] = loss
        return loss is not None

    def take_step(self) -> dict | None:
        """One step's record; None where it led back to a checkpoint."""
        train, steps = self.config.train, self.config.run.steps
        self._step_began = start = time.perf_counter()
        self.grid.wire.traffic.clear()
        rate = learning_rate(self.step, steps, train.lr, train.warmup)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = rate
        batch = self.job.training_batch(self.batches, self.step)
        reading = time.perf_counter() - start
        record = {"step": self.step + 1}
        try:
            loss, norm = self.trainer.step(batch)
            if math.isfinite(loss):  # where a scaled loss overflows, the step was left out and says so
                self.sanity.good(loss)
            record |= {
                key: value if math.isfinite(value) else None for key, value in (("loss", loss), ("grad_norm", norm))
            }
        except BadStep as bad:
            if not self._skip(bad):
                return None
            record |= {"loss": None, "grad_norm": None, "skipped": str(bad)}
        self.step += 1
        self.batches += 1
        seconds = time.perf_counter() - start
        self.speeds.add(seconds)
        tokens = train.batch * self.config.model.context
        record |= {
            "lr": rate,
            "tokens": tokens * self.step,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "time": time_split(self.grid.wire.traffic, seconds, reading),
            "bytes_sent": self._bytes("sent"),
            "bytes_received": self._bytes("received"),
            **self.trainer.replicas.report(),
        }
        if stalled := self.checkpointer.take_stall():
            record["checkpoint_seconds"] = stalled
        if self._may_poll:
            self._may_poll = False
            self._report(self.checkpointer.poll())
        return record

    def _decide(self, loss: float, norm: float) -> None:
        """What all ranks agree on, once a step: whether it may be taken, whether to stop, how far a save is."""
        self._may_poll = self._late = False
        lockstep = self.trainer.replicas.lockstep
        if not (lockstep or self.step >= self._next_agreement or self._due(self.step + 1)):
            return
        saving = self.checkpointer.busy and not self.checkpointer.phase_done
        stop = self.interrupts.code if self.interrupts else 0
        milliseconds = int(1000 * (time.perf_counter() - self._step_began))
        bad, self._stop, waiting, late, milliseconds = self._largest(
            self.sanity.judge(loss, norm), stop, int(saving), self._is_late(), milliseconds
        )
        self._may_poll, self._late = self.checkpointer.busy and not waiting, bool(late)
        self._steps_within = max(1, min(AGREE_EVERY, int(1000 * AGREE_WITHIN / max(1, milliseconds))))
        self._next_agreement = self.step + self._steps_within
        if bad:
            raise self.sanity.bad(bad, loss, norm)

    def _is_late(self) -> int:
        """Whether a checkpoint is due by the clock: rank 0's."""
        minutes = self.config.run.checkpoint_minutes
        return int(self.grid.rank == 0 and minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes)

    def _largest(self, *codes: int) -> list[int]:
        """The largest that any rank has, of each code."""
        return comm.all_reduce(torch.tensor(codes), self.grid.world, "max").tolist()

    def _skip(self, bad: BadStep) -> bool:
        """Do what the configuration says about a bad step: leave it out (True), go back (False), or stop."""
        policy = getattr(self.config.sanity, bad.kind)
        self._bad += 1
        if policy == "stop":
            raise bad
        if self._bad > self.config.sanity.limit:
            raise Stopped(f"{bad}; {self._bad} bad steps are more than sanity.limit = {self.config.sanity.limit}")
        if policy == "skip":
            self._warn(f"step {self.step + 1} is skipped: {bad}")
            return True
        bad_step, after = self.step + 1, self.batches + 1
        self._report(self.checkpointer.finish())
        if self.checkpointer.saved is None:
            raise Stopped(f"step {bad_step}: {bad}; there is no checkpoint to go back to")
        self.resume()
        self._warn(f"step {bad_step}: {bad}; back to step {self.step}, and on with the data after it")
        self.batches = after
        if self.job.folder:
            self.job.folder.begin(self.step)
        return False

    def _compare(self) -> None:
        """Weights that are to be alike, before they are saved, and the ranks' speeds."""
        wrong = differing(self.job.state.names, self.grid) if self.trainer.replicas.alike else []
        for rank, (differences, slow) in enumerate(self.job.world.allgather((wrong, self.speeds.slow()))):
            for text in slow:
                self._warn(f"rank {rank} on {self.job.hosts[rank]} is slow: {text}")
            if differences:
                raise Stopped(f"step {self.step}: {differences[0]}; weights are damaged, go on with --resume")

    def _save_when_due(self) -> None:
        stopped = self._stop and (self.step < self.config.run.steps or self._unevaluated)
        if not (self._due(self.step) or self._late or self._stop) or self.checkpointer.saved == self.step:
            return
        if self.job.folder:
            self.job.folder.sync()
        if stopped and (earlier := self.checkpointer.finish()):  # which matters no more
            self._warn(f"no checkpoint of {earlier}")
        if self.checkpointer.saved == self.step:
            return
        self._saved_at, self._late = time.monotonic(), False
        error = self.checkpointer.save(self.step, self.job.state, self._about())
        if stopped:
            error = error or self.checkpointer.finish()
            if error:
                raise Stopped(
                    f"told to stop by {REASONS[self._stop]}, but the checkpoint failed: {error}; "
                    f"{newest(self.checkpointer)}"
                )
        self._report(error)

    def _due(self, step: int) -> bool:
        every = self.config.run.checkpoint_every
        return bool(every) and (step % every == 0 or step == self.config.run.steps)

    def _about(self) -> dict:
        return self.job.about() | {
            "data": {**self.job.data_facts, "batches": self.batches},
            "sanity": {"losses": self.sanity.losses},
            "unevaluated": self._unevaluated,
        }

    def _report(self, error: str | None) -> None:
        """A checkpoint could not be written: go on without it, or stop."""
        if error and self.config.checkpoint.on_failure == "stop":
            raise Stopped(f"no checkpoint of {error}")
        if error:
            self._warn(f"no checkpoint of {error}")

    def _warn(self, text: str) -> None:
        if self.grid.rank == 0:
            log.warning("WARNING: %s", text)

    def _bytes(self, direction: str) -> dict[str, int]:
        """This rank's traffic since the step began, by axis of the grid."""
        table = {"data": 0, "pipeline": 0, "tensor": 0}
        for (axis, _), cell in self.grid.wire.traffic.table().items():
            if axis != "world":  # what the ranks agree on is no tensor of the training
                table[axis if axis in table else "tensor"] += cell[direction]
        return table


def newest(checkpointer: Checkpointer) -> str:
    """In words, what a job that goes on would start from."""
    if checkpointer.saved is None:
        return "nothing is saved"
    return f"the newest checkpoint is {checkpointer.root}/step-{checkpointer.saved}; go on with --resume"
