"""What a job leaves when it has trained to its end: exported weights, and a sample of its text."""

from __future__ import annotations

import contextlib
import logging

from hpctrain import files
from hpctrain.models.export import export
from hpctrain.plan import Machine
from hpctrain.plan.outcome import outcome
from hpctrain.train.generate import generate
from hpctrain.train.run_folder import PLAN, last_losses
from hpctrain.train.sanity import Stopped
from hpctrain.train.session import Session

log = logging.getLogger("hpctrain")


def finish(session: Session) -> None:
    """Export the trained weights and generate. Collective.

    Raises:
        Stopped: on every rank, where the weights cannot be written.
    """
    config, grid, tokens = session.config, session.grid, session.data.tokens
    end, sample = tokens.end_of_document, None
    tokenizer = tokens.tokenizer if session.folder else None
    strategy = session.trainer.strategy
    average = strategy.averaged_weights() if "export" in config.train.ema_use else contextlib.nullcontext()
    with average, strategy.full_weights():
        try:
            export(session.spec, session.model, grid, config.folder / "model", end, tokenizer)
        except (ValueError, OSError) as error:
            raise Stopped(
                f"trained to the end, but the weights are not exported: {error}; "
                f"{session.checkpointer.describe_newest()}"
            ) from error
        if count := config.run.sample:
            ids = generate(
                session.model, grid, [end], count, tokens.vocabulary, session.key / "sample",
                documents=end if config.data.documents == "masked" else None,
            )  # fmt: skip
            sample = tokens.tokenizer.decode(ids)
    if session.folder:
        print(last_losses(session.folder.history))
        if config.run.machine:
            _tell_outcome(session)
        if sample:
            print(f"sample:\n{sample}")
        print(f"results: {session.folder.path}/", flush=True)


def _tell_outcome(session: Session) -> None:
    """What the plan had said beside what was measured: printed, and plan.json in the run folder. For rank 0 alone."""
    folder = session.folder
    assert folder is not None  # rank 0 has it
    try:
        machine = Machine.load(session.config.run.machine)
    except (ValueError, OSError) as error:  # moved or edited meanwhile, which must not end a training that went well
        log.warning("WARNING: what the training took is not compared with the plan: %s", error)
        return
    try:
        told = outcome(session.config, machine, folder.history, folder.ranks)
    except ValueError as error:  # too few steps, after a training that went well
        print(f"plan for {machine.name}: {error}")
        return
    print(told.text())
    folder.write(PLAN, told.to_json())
    if told.wrong and files.regular(session.config.run.machine):
        print(f"to set its figures right: hpctrain plan --learn {folder.path} --machine {session.config.run.machine}")
