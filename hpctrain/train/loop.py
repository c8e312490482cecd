"""The steps of a job: train, measure, save, and decide alike on all ranks what to do when something is wrong."""

from __future__ import annotations

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


AGREE_EVERY = 20  # steps, where ranks are to go at their own pace


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
        self._may_poll = False
        self.trainer.check = self._decide

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
            while self.step < steps and not self._stop:
                record = self.take_step()
                if record is None:
                    continue  # rolled back
                if self.step == steps or (every and self.step % every == 0):
                    record["val_loss"] = self.trainer.evaluate(validation)
                if folder:
                    folder.log(record)
                    progress.update(record)
                if compare and (self.step % compare == 0 or self._due(self.step)):
                    self._compare()
                self._save_when_due()
        finally:
            if progress:
                progress.close()
        self._report(self.checkpointer.finish())
        return REASONS[self._stop] if self.step < steps else ""

    def take_step(self) -> dict | None:
        """One step's record; None where it led back to a checkpoint."""
        train, steps = self.config.train, self.config.run.steps
        start = time.perf_counter()
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
        if not (self.trainer.replicas.lockstep or (self.step + 1) % AGREE_EVERY == 0 or self._due(self.step + 1)):
            self._may_poll = False
            return
        saving = self.checkpointer.busy and not self.checkpointer.phase_done
        stop = self.interrupts.code if self.interrupts else 0
        bad, self._stop, waiting = self._largest(self.sanity.judge(loss, norm), stop, int(saving))
        self._may_poll = self.checkpointer.busy and not waiting
        if bad:
            raise self.sanity.bad(bad, loss, norm)

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
        last = self.step == self.config.run.steps
        if not (self._due(self.step) or self._stop) or self.checkpointer.saved == self.step:
            return
        if self.job.folder:
            self.job.folder.sync()
        error = self.checkpointer.save(self.step, self.job.state, self._about())
        if self._stop and not last:
            error = error or self.checkpointer.finish()
            if error:
                raise Stopped(f"told to stop by {REASONS[self._stop]}, but the checkpoint failed: {error}")
        self._report(error)

    def _due(self, step: int) -> bool:
        every = self.config.run.checkpoint_every
        return bool(every) and (step % every == 0 or step == self.config.run.steps)

    def _about(self) -> dict:
        return self.job.about() | {
            "data": {**self.job.data_facts, "batches": self.batches},
            "sanity": {"losses": self.sanity.losses},
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
