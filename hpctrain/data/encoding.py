"""Text into tokens, by several processes where that is wanted, in the order of the text."""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import numpy as np

from hpctrain.data.documents import Piece
from hpctrain.data.tokenizers import Tokenizer, tokenizer_from_description

TOGETHER = 1 << 20  # characters that a process is given at once


def encoded(pieces: Iterable[Piece], tokenizer: Tokenizer, processes: int = 1) -> Iterator[tuple[Piece, np.ndarray]]:
    """Each piece with its tokens. With several processes each has a batch of pieces at a time, from as many inputs as
    they reach into; what comes out is the same, in the same order.

    Raises:
        ValueError: for a text that the tokenizer cannot encode.
        ChildProcessError: where one of the processes was killed.
    """
    if processes < 2:
        for piece in pieces:
            yield piece, tokenizer.encode(piece.text)
        return
    workers = _Workers(processes, tokenizer)
    try:
        under_way: collections.deque[tuple[Connection, list[Piece]]] = collections.deque()
        for batch in _batches(pieces):
            done: Iterable[tuple[Piece, np.ndarray]] = ()
            if len(under_way) < processes:
                pipe = workers.start()
            else:
                pipe, earlier = under_way.popleft()
                done = workers.receive(pipe, earlier)
            workers.send(pipe, batch)
            under_way.append((pipe, batch))
            yield from done
        for pipe, batch in under_way:
            yield from workers.receive(pipe, batch)
    finally:
        workers.end()


class _Workers:
    """Processes that encode, each with a pipe of its own, which ends with either side. Those of Python's pools share
    theirs, so that one which was killed while it sent hangs the others."""

    def __init__(self, most: int, tokenizer: Tokenizer):
        self._most, self._tokenizer = most, tokenizer
        self._started: list[tuple[Connection, SpawnProcess]] = []

    def start(self) -> Connection:
        """One more."""
        context = multiprocessing.get_context("spawn")  # not forked: h5py and others have threads and locks
        pipe, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self._tokenizer.description), daemon=True)
        process.start()
        theirs.close()
        self._started.append((pipe, process))
        return pipe

    def send(self, pipe: Connection, batch: list[Piece]) -> None:
        """To a process that has sent the tokens of its last batch: it reads at once."""
        with self._while_alive():
            pipe.send([piece.text for piece in batch])

    def receive(self, pipe: Connection, batch: list[Piece]) -> Iterator[tuple[Piece, np.ndarray]]:
        """The batch that was sent there, with its tokens."""
        with self._while_alive():
            found = pipe.recv()
        if isinstance(found, Exception):
            raise found
        return zip(batch, found, strict=True)

    @contextlib.contextmanager
    def _while_alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise ChildProcessError(
                f"one of {self._most} processes that encode text was killed, as the system does where memory is short; "
                "use fewer processes"
            ) from error

    def end(self) -> None:
        for pipe, _ in self._started:
            pipe.close()
        for _, process in self._started:
            process.join()


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


def _work(pipe: Connection, description: str) -> None:
    """Of a process of its own, of which there is one a core, until the other end of its pipe is closed."""
    os.setpgrp()  # out of reach of signals to the parent's group: the parent decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in (signal.SIGINT, signal.SIGHUP):  # which a terminal sends to all
        signal.signal(number, signal.SIG_IGN)
    tokenizer = tokenizer_from_description(description)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            texts = pipe.recv()
            found: list[np.ndarray] | Exception
            try:
                found = [tokenizer.encode(text) for text in texts]
            except Exception as error:  # is raised by the parent
                found = error
            pipe.send(found)
