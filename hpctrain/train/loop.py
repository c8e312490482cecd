"""A training job from its first step to its last: train, measure, validate, save, and stop where there is a reason."""

from __future__ import annotations

import math
import socket
import time
from typing import Any

from hpctrain.data_parallel.alike import differing
from hpctrain.data_parallel.asynchronous import WorkerNotFinite
from hpctrain.train.announce import introduce, job_facts, warn
from hpctrain.train.finishing import finish
from hpctrain.train.learning_rate import learning_rate
from hpctrain.train.progress import Progress
from hpctrain.train.sanity import BadStep, Stopped, StoppedAlone
from hpctrain.train.saving import check_save, save_when_due
from hpctrain.train.session import Session, restore
from hpctrain.train.signals import REASONS
from hpctrain.train.time_split import bytes_by_axis, time_split
from hpctrain.train.tracing import StepTracer


def train(session: Session) -> str:
    """Train, evaluate, export, generate. Returns why it stopped early, if it did; a checkpoint is then there.

    Raises:
        BadStep, Stopped: on every rank, where the job must not go on.
        StoppedAlone: on one rank, likewise; the others wait for it.
    """
    folder = session.folder
    if folder:
        introduce(session)
    reason = take_steps(session)
    if folder:
        folder.close()
    if not reason:
        finish(session)
    elif folder:
        print(f"stopped by {reason} after step {session.position.step}; saved, go on with --resume", flush=True)
    if folder:
        folder.plot()
    return reason


def take_steps(session: Session) -> str:
    """Train to the last step, or until there is a reason to stop, which is returned. Raises as `train`."""
    config, folder, agreement = session.config, session.folder, session.agreement
    steps, every, compare_every = config.run.steps, config.run.eval_every, config.sanity.check_every
    validation = session.data.samples.validation_batches(
        session.grid, config.train.batch, config.run.eval_batches, session.schedule, session.device
    )
    progress = Progress(steps) if folder else None
    tracer = StepTracer(config, session.grid, session.world, session.device) if config.run.profile else None
    try:
        evaluate_what_a_stop_left(session, validation)
        while session.position.step < steps and not agreement.stop:
            if tracer:
                tracer.before(session.position.step + 1)
            record = train_step(session)
            if tracer:
                tracer.after(session.position.step)
            if record is None:
                continue  # rolled back
            position = session.position
            position.unevaluated = None
            if position.step == steps or (every and position.step % every == 0):
                position.unevaluated = None if evaluate(session, record, validation) else record
            if folder and progress:
                folder.log(record)
                progress.update(record)
            if compare_every and (position.step % compare_every == 0 or agreement.save_due(position.step)):
                compare_ranks(session)
            save_when_due(session)
        agreement.finish()
        if tracer:
            tracer.finish()
        tell_totals(session)
    finally:
        if progress:
            progress.close()
    check_save(session, session.checkpointer.finish())
    unfinished = session.position.step < steps or session.position.unevaluated
    return REASONS[agreement.stop] if unfinished else ""


def train_step(session: Session) -> dict[str, Any] | None:
    """One step, and its line of metrics; None where it led back to a checkpoint. Collective."""
    config, position, trainer, agreement = session.config, session.position, session.trainer, session.agreement
    traffic = session.grid.transport.traffic
    began = time.perf_counter()
    traffic.clear()
    options = config.train
    rate = learning_rate(
        position.step, config.run.steps, options.lr, options.warmup, options.schedule,
        None if isinstance(options.min_lr, str) else options.min_lr, options.decay_steps,
    )  # fmt: skip
    for group in trainer.optimizer.param_groups:
        group["lr"] = rate
    batch = session.data.samples.training_step(
        session.grid, position.batches, config.train.batch, session.schedule, session.device, position.step
    )
    reading = time.perf_counter() - began

    session.order.before(position.batches)
    try:
        loss, norm, overflow = trainer.forward_backward(batch)
    except WorkerNotFinite as error:
        here = session.sanity.bad(2, error.loss, error.norm)
        said = session.sanity.diverged(here, position.step + 1, rate, options.clip, alone=True)
        raise StoppedAlone(f"worker {error.worker}, {said}") from error
    session.order.after(position.batches)
    bad = agreement.judge(loss, 0.0 if overflow else norm, began)  # an overflow is left out, but a stop is heeded
    if bad is None:
        if not overflow:  # of a scaled loss: the step is left out, and the scale lowered
            trainer.update(norm)
        if math.isfinite(loss):
            session.sanity.good(loss, norm)
        results: dict[str, Any] = {"loss": _finite(loss), "grad_norm": _finite(norm)}
    elif leave_out(session, bad, rate):
        results = {"loss": None, "grad_norm": None, "skipped": str(bad)}
    else:
        return None

    position.step += 1
    position.batches += 1
    seconds = time.perf_counter() - began
    session.speeds.add(seconds)
    tokens = config.train.batch * config.model.context
    record = {
        "step": position.step,
        **results,
        "lr": rate,
        "tokens": tokens * position.step,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "epochs": session.data.samples.epochs(config.train.batch * position.batches),
        "time": time_split(traffic, seconds, reading),
        "bytes_sent": bytes_by_axis(traffic, "sent"),
        "bytes_received": bytes_by_axis(traffic, "received"),
        **{name: _finite(value) for name, value in trainer.report().items()},
    }
    session.totals.add(record)
    if stalled := session.checkpointer.take_stall():
        record["checkpoint_seconds"] = stalled
    if agreement.phase_done:
        agreement.phase_done = False
        check_save(session, session.checkpointer.poll())
    return record


def leave_out(session: Session, bad: BadStep, rate: float) -> bool:
    """What the configuration says about a bad step: leave it out (True), go back to a checkpoint (False), or raise."""
    config, position = session.config.sanity, session.position
    policy = getattr(config, bad.kind)
    session.sanity.bad_steps += 1
    if policy == "stop":
        raise session.sanity.diverged(bad, position.step + 1, rate, session.config.train.clip)
    if session.sanity.bad_steps > config.limit:
        raise Stopped(f"{bad}; {session.sanity.bad_steps} bad steps are more than sanity.limit = {config.limit}")
    if policy == "skip":
        warn(session.grid, f"step {position.step + 1} is skipped: {bad}")
        return True
    check_save(session, session.checkpointer.finish())
    if session.checkpointer.saved is None or not restore(session):
        raise Stopped(f"step {position.step + 1}: {bad}; there is no checkpoint to go back to")
    back = session.position.step
    warn(session.grid, f"step {position.step + 1}: {bad}; back to step {back}, and on with the data after it")
    session.position.batches = position.batches + 1
    if session.folder:
        session.folder.go_back(back)
    return False


def evaluate(session: Session, record: dict[str, Any], validation: list) -> bool:
    """Add the validation loss to a step's record; False where the job is told to stop before that is known."""
    averaged = "validation" in session.config.train.ema_use
    loss = session.trainer.evaluate(validation, session.agreement.stop_in_validation(), averaged)
    if loss is not None:
        record["val_loss"] = _finite(loss)
    return loss is not None


def evaluate_what_a_stop_left(session: Session, validation: list) -> None:
    """The validation of the last step of the job before, if that was stopped in it."""
    position, folder = session.position, session.folder
    record = position.unevaluated
    if record and evaluate(session, record, validation) and folder:
        folder.go_back(position.step - 1)
        folder.log(record)
    if not session.agreement.stop:
        position.unevaluated = None


def compare_ranks(session: Session) -> None:
    """Weights that are to be alike, before they are saved, and the ranks' speeds. Raises Stopped on every rank."""
    alike = session.trainer.strategy.alike
    wrong = differing(session.state.names, session.grid) if alike else []
    mine = socket.gethostname(), wrong, session.speeds.slow()
    for rank, (host, differences, slow) in enumerate(session.world.allgather(mine)):
        for text in slow:
            warn(session.grid, f"rank {rank} on {host} is slow: {text}")
        if differences:
            raise Stopped(f"step {session.position.step}: {differences[0]}; weights are damaged, go on with --resume")
    tell_totals(session)


def tell_totals(session: Session) -> None:
    """Of every rank, in the run folder. Collective."""
    ranks = session.world.gather(session.totals.described(session.grid, session.device))
    if session.folder:
        session.folder.write_ranks(job_facts(session), ranks)


def _finite(value: Any) -> Any:
    """None, which is null in JSON, for a number that JSON has not got.

    >>> [_finite(value) for value in (1.5, math.nan, -math.inf, 2, [0.5])]
    [1.5, None, None, 2, [0.5]]
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value
