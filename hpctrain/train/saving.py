"""When a job saves, and what it does about a checkpoint that could not be written."""

from __future__ import annotations

from hpctrain.train.announce import warn
from hpctrain.train.sanity import Stopped
from hpctrain.train.session import Session, about
from hpctrain.train.signals import REASONS


def save_when_due(session: Session) -> None:
    """Save after a step where its number, the clock or a stop asks for it; that of a stop is written before this
    returns. Collective.

    Raises:
        Stopped: on every rank, where it cannot be written and the job is to stop, or does stop.
    """
    agreement, checkpointer, position = session.agreement, session.checkpointer, session.position
    stopped = agreement.stop and (position.step < session.config.run.steps or position.unevaluated)
    if not agreement.save_due(position.step) or checkpointer.saved == position.step:
        return
    if session.folder:
        session.folder.sync()
    if stopped and (earlier := checkpointer.finish()):  # which matters no more
        warn(session.grid, f"no checkpoint of {earlier}")
    if checkpointer.saved == position.step:
        return
    agreement.save_begins()
    error = checkpointer.save(position.step, session.state, about(session))
    if stopped:
        error = error or checkpointer.finish()
        if error:
            raise Stopped(
                f"told to stop by {REASONS[agreement.stop]}, but the checkpoint failed: {error}; "
                f"{checkpointer.describe_newest()}"
            )
    check_save(session, error)


def check_save(session: Session, error: str | None) -> None:
    """Where a checkpoint could not be written (`error` says why): go on without it, or raise Stopped on every rank."""
    if error and session.config.checkpoint.on_failure == "stop":
        raise Stopped(f"no checkpoint of {error}")
    if error:
        warn(session.grid, f"no checkpoint of {error}")
