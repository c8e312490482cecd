"""`hpctrain pack`: text files into HDF5 token shards."""

from __future__ import annotations

import argparse
import sys

SUMMARY = "pack text into checksummed HDF5 token shards"


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("text", nargs="+", metavar="TEXT", help="UTF-8 file, directory, or python-stdlib")
    command.add_argument("-o", "--output", required=True, metavar="DATA.h5")
    command.add_argument(
        "--tokenizer", default="bytes", help='"bytes" (default) or a Hugging Face tokenizers JSON file'
    )
    command.add_argument("--shard-tokens", type=int, default=2**28, metavar="N", help="tokens a shard at most (2^28)")


def run(options: argparse.Namespace) -> None:
    from rich.progress import Progress

    from hpctrain.data import pack
    from hpctrain.data.tokenizers import tokenizer_from_option

    tokenizer = tokenizer_from_option(options.tokenizer)
    with Progress(disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("packing")
        counts = pack(
            options.text,
            options.output,
            tokenizer,
            options.shard_tokens,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    print(", ".join(f"{count:,} {what}" for what, count in counts.items()) + f" in {options.output}")
