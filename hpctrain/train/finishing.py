"""What a job leaves when it has trained to its end: exported weights, and a sample of its text."""

from __future__ import annotations

import contextlib

from hpctrain.models.export import export
from hpctrain.plan import Machine
from hpctrain.plan.learn import compare, table
from hpctrain.train.generate import generate
from hpctrain.train.run_folder import last_losses
from hpctrain.train.session import Session


def finish(session: Session) -> None:
    """Export the trained weights and generate. Collective."""
    config, grid, tokens = session.config, session.grid, session.data.tokens
    end, sample = tokens.end_of_document, None
    tokenizer = tokens.tokenizer if session.folder else None
    strategy = session.trainer.strategy
    average = strategy.averaged_weights() if "export" in config.train.ema_use else contextlib.nullcontext()
    with average, strategy.full_weights():
        export(session.spec, session.model, grid, config.folder / "model", end, tokenizer)
        if count := config.run.sample:
            ids = generate(
                session.model, grid, [end], count, tokens.vocabulary, session.key / "sample",
                documents=end if config.data.documents == "masked" else None,
            )  # fmt: skip
            sample = tokens.tokenizer.decode(ids)
    if session.folder:
        print(last_losses(session.folder.history))
        if config.run.machine:
            print(table(compare(config, Machine.load(config.run.machine), session.folder.history)))
        if sample:
            print(f"sample:\n{sample}")
        print(f"results: {session.folder.path}/", flush=True)
