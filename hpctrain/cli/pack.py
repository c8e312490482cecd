"""`hpctrain pack`: text, JSON Lines and Parquet into HDF5 token shards."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

SUMMARY = "pack text into checksummed HDF5 token shards"
EPILOG = (
    "Files may be text in UTF-8, JSON Lines (.jsonl, .ndjson, .json) and Parquet, plain or compressed (.gz, .zst). "
    "Each file, line or row is a document, which the tokenizer's end-of-document token ends."
)

SHOWN = 5  # places that were skipped for the same reason


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("text", nargs="+", metavar="TEXT", help="file, directory, or python-stdlib")
    command.add_argument("-o", "--output", required=True, metavar="DATA.h5")
    command.add_argument("--force", action="store_true", help="take the place of what is packed there")
    command.add_argument(
        "--tokenizer", default="bytes", help='"bytes" (default) or a Hugging Face tokenizers JSON file'
    )
    command.add_argument(
        "--field", default="", metavar="NAME", help="of JSON Lines and Parquet: the text; without it, lines are text"
    )
    command.add_argument(
        "--prompt-field", default="", metavar="NAME", help="what stands before it and counts in no loss"
    )
    command.add_argument(
        "--validation-split", type=float, default=0.0, metavar="P", help="part of the documents for DATA-validation.h5"
    )
    command.add_argument(
        "--validation", action="append", default=[], metavar="TEXT", help="or a file or directory for it; repeatable"
    )
    command.add_argument(
        "--processes", type=int, default=0, metavar="N",
        help="that tokenize (one a core for large inputs, but one in all where tokens are bytes)",
    )  # fmt: skip
    command.add_argument("--shard-tokens", type=int, default=2**28, metavar="N", help="tokens a shard at most (2^28)")


def run(options: argparse.Namespace) -> None:
    from rich.progress import Progress

    from hpctrain import files
    from hpctrain.data import pack
    from hpctrain.data.documents import Fields
    from hpctrain.data.pack import checked_output, validation_output
    from hpctrain.data.tokenizers import tokenizer_from_option

    output, fields = checked_output(options.output), Fields(options.field, options.prompt_field)
    apart = bool(options.validation_split or options.validation)
    for path in [output, validation_output(output)][: 1 + apart]:
        if files.status(path) and not options.force:
            raise ValueError(f"{path} exists; --force takes its place, or choose another output")
    skipped: dict[str, list[str]] = {}
    tokenizer = tokenizer_from_option(options.tokenizer)
    with _told(skipped), deferred_signals() as signals, Progress(disable=not sys.stdout.isatty()) as bar:
        task, shown = bar.add_task("packing"), -1

        def advance(done: int, total: int) -> None:
            nonlocal shown
            signals.writing = True
            signals.act()
            if done > shown:
                bar.update(task, completed=done, total=total)
                shown = done

        def skip(place: str, why: str) -> None:
            signals.act()
            skipped.setdefault(why, []).append(place)

        try:
            counts = pack(
                options.text,
                output,
                tokenizer,
                options.shard_tokens,
                progress=advance,
                replace=options.force,
                fields=fields,
                processes=options.processes,
                validation=options.validation_split,
                validation_sources=options.validation,
                skip=skip,
            )
        except ChildProcessError:  # the signal went to the whole process group
            signals.act()
            raise
    print(", ".join(f"{count:,} {what}" for what, count in counts.items()) + f" in {output}")


@contextlib.contextmanager
def _told(skipped: dict[str, list[str]]) -> Iterator[None]:
    """In the end what was skipped is shown, and why, also where nothing was left."""
    try:
        yield
    finally:
        for why, places in skipped.items():
            more = f", and {len(places) - SHOWN:,} more" if len(places) > SHOWN else ""
            print(f"skipped, {why}: {', '.join(places[:SHOWN])}{more}", file=sys.stderr)


class DeferredSignals:
    """Signals that ask to end. While HDF5 may be `writing` they are kept until `act`, as it calls Python, and crashes
    where a handler raises. The third ends at once all the same; `timeout` sends its signal twice."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.writing = False

    def receive(self, number: int, _: object) -> None:
        self.received.append(number)
        if not self.writing or len(self.received) > 2:
            sys.exit(128 + number)

    def act(self) -> None:
        if self.received:
            sys.exit(128 + self.received[0])


@contextlib.contextmanager
def deferred_signals() -> Iterator[DeferredSignals]:
    """In the main thread, the only one that may set handlers."""
    signals = DeferredSignals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in usual.items():
        if handler not in (signal.SIG_IGN, None):  # ignored as by nohup, or handled outside of Python
            signal.signal(number, signals.receive)
    try:
        yield signals
    finally:
        for number, handler in usual.items():
            if handler is not None:
                signal.signal(number, handler)
