"""`hpctrain eval`: the loss of a trained model over text."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpctrain.cli.trained import add_source, on_all_ranks

SUMMARY = "evaluate a run or a Hugging Face folder on text: loss, perplexity, bits per byte"
EPILOG = """On several ranks: mpirun -n 4 hpctrain eval runs/mine --data data.h5 grid.tensor=2 grid.pipeline=2. With
data.documents=masked, as in the training of a run, tokens see their own document alone, whose first does not count."""


def add_options(command: argparse.ArgumentParser) -> None:
    add_source(command)
    command.add_argument("--data", required=True, metavar="DATA.h5", help="packed data, or a text file or folder")
    command.add_argument("--documents", action="store_true", help="each document by itself, a line each")
    command.add_argument("--context", type=int, metavar="N", help="tokens of a window (model.context)")
    command.add_argument("--batch", type=int, default=8, metavar="N", help="windows at a time on a replica (8)")


def run(options: argparse.Namespace) -> int:
    return on_all_ranks(options, _evaluate)


def _evaluate(options: argparse.Namespace, trained, world) -> None:
    from hpctrain import comm
    from hpctrain.data import ShardedTokens
    from hpctrain.train.evaluation import Loss, evaluate
    from hpctrain.train.training_data import packed_text

    with comm.together(world):
        longest = trained.config.model.context
        context = longest if options.context is None else options.context
        if not 1 <= context <= longest or options.batch < 1:
            raise ValueError(
                f"--context must be at most model.context = {longest}, and both it and --batch at "
                f"least 1, got {context} and {options.batch}"
            )
        path = None
        if world.rank == 0:
            is_packed = Path(options.data).suffix == ".h5"
            path = options.data if is_packed else packed_text([options.data], trained.tokenizer, trained.config.run.out)
    tokens = ShardedTokens(world.bcast(path), comm=world)
    with comm.together(world):
        theirs, ours = tokens.tokenizer, trained.tokenizer
        if (theirs.tokens(), theirs.end_of_document) != (ours.tokens(), ours.end_of_document):
            raise ValueError(f"{tokens.path} was packed by another tokenizer than that of {options.source}")
    masked = trained.config.data.documents == "masked"
    losses = evaluate(trained.model, trained.grid, tokens, context, options.batch, options.documents, masked)
    if world.rank == 0:
        for number, loss in enumerate(losses if options.documents else ()):
            print(f"document {number}: {_said(loss)}")
        whole = Loss(*(sum(getattr(loss, name) for loss in losses) for name in ("total", "tokens", "bytes")))
        print(_said(whole), flush=True)


def _said(loss) -> str:
    return (
        f"loss {loss.mean:.6f} nats a token, perplexity {loss.perplexity:.4f}, {loss.bits_per_byte:.6f} bits per byte, "
        f"{loss.tokens:,} tokens, {loss.bytes:,} bytes"
    )
