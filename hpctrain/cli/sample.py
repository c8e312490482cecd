"""`hpctrain sample`: text that a trained model writes."""

from __future__ import annotations

import argparse
import math

from hpctrain.cli.trained import add_source, on_all_ranks

SUMMARY = "let a run or a Hugging Face folder continue a text"
EPILOG = "On several ranks: mpirun -n 4 hpctrain sample runs/mine --prompt 'def ' grid.tensor=2 grid.pipeline=2"


def add_options(command: argparse.ArgumentParser) -> None:
    add_source(command)
    command.add_argument("--prompt", default="", help="the text to continue; without it a document begins")
    command.add_argument("--tokens", type=int, default=100, metavar="N", help="at most, unless the document ends (100)")
    command.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token each time (0.8)")
    command.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest; 0: from all")
    command.add_argument("--top-p", type=float, default=1.0, metavar="P", help="from the likeliest that reach P")
    command.add_argument("--seed", type=int, default=0, help="of the draws, which no grid changes (0)")


def run(options: argparse.Namespace) -> int:
    return on_all_ranks(options, _sample)


def _sample(options: argparse.Namespace, trained, world) -> None:
    from hpctrain import comm
    from hpctrain.randomness import RngKey
    from hpctrain.train.generate import generate

    with comm.together(world):
        hot = 0 <= options.temperature < math.inf  # nor is it no number
        if options.tokens < 1 or not hot or options.top_k < 0 or not 0 < options.top_p <= 1:
            raise ValueError(
                "--tokens must be at least 1, --temperature and --top-k finite and at least 0, --top-p above 0 and at "
                f"most 1, got {options.tokens}, {options.temperature}, {options.top_k} and {options.top_p}"
            )
        tokenizer = trained.tokenizer
        prompt = tokenizer.encode(options.prompt).tolist() or [tokenizer.end_of_document]
    ids = generate(
        trained.model, trained.grid, prompt, options.tokens, tokenizer.vocabulary, RngKey(options.seed) / "sample",
        options.temperature, options.top_k, options.top_p, tokenizer.end_of_document,
        tokenizer.end_of_document if trained.config.data.documents == "masked" else None,
    )  # fmt: skip
    if world.rank == 0:
        print(options.prompt + tokenizer.decode(ids), flush=True)
