"""Text into tokens, by several processes where that is wanted, in the order of the text."""

from __future__ import annotations

import collections
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from hpctrain.data.documents import Piece
from hpctrain.data.tokenizers import Tokenizer, tokenizer_from_description

Waiting = collections.deque[tuple[list[Piece], Future[list[np.ndarray]]]]

_tokenizer: Tokenizer  # of a process that encodes

TOGETHER = 1 << 20  # characters that a process is given at once


def encoded(pieces: Iterable[Piece], tokenizer: Tokenizer, processes: int = 1) -> Iterator[tuple[Piece, np.ndarray]]:
    """Each piece with its tokens. With several processes a few batches of pieces are under way at a time, from as many
    inputs as they reach into; what comes out is the same, in the same order.

    Raises:
        ValueError: for a text that the tokenizer cannot encode.
        ChildProcessError: where one of the processes was killed.
    """
    if processes < 2:
        for piece in pieces:
            yield piece, tokenizer.encode(piece.text)
        return
    # not forked: h5py and others have threads and locks
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), _begin, (tokenizer.description,)
    )  # fmt: skip
    waiting: Waiting = collections.deque()
    try:
        for batch in _batches(pieces):
            waiting.append((batch, pool.submit(_encode, [piece.text for piece in batch])))
            if len(waiting) >= 2 * processes:
                yield from _next(waiting)
        while waiting:
            yield from _next(waiting)
    except BaseException as error:
        # Where processes were killed, Python before 3.11.5 goes on writing to their pipe, for which `shutdown` waits;
        # without this last end of it, the writing fails.
        pool._call_queue._reader.close()  # type: ignore[attr-defined]
        if isinstance(error, BrokenProcessPool):
            raise ChildProcessError(
                f"one of {processes} processes that encode text was killed, as the system does where memory is short; "
                "use fewer processes"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _next(waiting: Waiting) -> Iterator[tuple[Piece, np.ndarray]]:
    batch, future = waiting.popleft()
    yield from zip(batch, future.result(), strict=True)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= TOGETHER:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _begin(description: str) -> None:
    """In a process of its own, of which there is one a core."""
    global _tokenizer
    os.setpgrp()  # out of reach of signals to the parent's group: killed while it sends, it would hang the parent
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in (signal.SIGINT, signal.SIGHUP):  # which a terminal sends to all: the parent decides
        signal.signal(number, signal.SIG_IGN)
    _tokenizer = tokenizer_from_description(description)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent cannot end its processes, and they would wait for work for good."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(texts: list[str]) -> list[np.ndarray]:
    return [_tokenizer.encode(text) for text in texts]
