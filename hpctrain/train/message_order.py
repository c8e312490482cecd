"""The order of messages of a message driven pipeline, kept in the run folder and repeated by another run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from hpctrain import comm, files
from hpctrain.config import Config
from hpctrain.grid import Grid
from hpctrain.pipeline.ampnet import Record
from hpctrain.train.sanity import Stopped
from hpctrain.train.trainer import Trainer

MESSAGES = "messages.jsonl"
LARGEST = 1 << 30  # bytes

log = logging.getLogger("hpctrain")


class MessageOrder:
    """With `pipeline.record`, the first rank keeps a line of each batch: its number and, of every rank, the names of
    the messages in the order in which they were worked on. With `pipeline.replay`, each batch takes its order from such
    a run. Without either nothing is done.

    Every job begins with a line of its settings. A full disk does not end the training: a batch is then left out. An
    empty line follows what may have been cut short, by the end of the last job or a full disk.

    Raises:
        ValueError, OSError: on every rank, for a run that recorded nothing, and one of other settings: its ranks would
            wait for messages that never come.
    """

    def __init__(self, config: Config, grid: Grid, trainer: Trainer):
        self._grid, self._path, options = grid, config.folder / MESSAGES, config.pipeline
        self._records, self._replays = options.record, bool(options.replay)
        self._torn = True  # whether the last line may be
        if not (self._records or self._replays):
            return
        self._driven = trainer.message_driven
        keys, every = self._driven.options.max_active_keys, self._driven.options.min_update_frequency
        self._facts = {
            "grid.pipeline": grid.pipeline.size, "train.microbatches": config.train.microbatches,
            "pipeline.max_active_keys": keys, "pipeline.min_update_frequency": every,
        }  # fmt: skip
        with comm.together(grid.world):
            self._orders = self._read(Path(options.replay) / MESSAGES) if self._replays else {}
            if self._records and grid.rank == 0:
                self._append(self._facts)

    def before(self, batch: int) -> None:
        """The batch of this number is trained on next.

        Raises:
            Stopped: on every rank, where the recorded run had no such batch.
        """
        if self._replays:
            if batch not in self._orders:
                raise Stopped(
                    f"pipeline.replay has batches {min(self._orders)} to {max(self._orders)}, and no {batch}; use "
                    "fewer run.steps"
                )
            self._driven.replay = self._orders[batch]
        if self._records:
            self._driven.record = Record()

    def after(self, batch: int) -> None:
        """It was trained on. Collective."""
        if self._records:
            assert self._driven.record is not None  # `before` made it
            ranks = self._grid.comm.gather(self._driven.record.runs[0])
            if ranks is not None:
                try:
                    self._append({"batch": batch, "ranks": ranks})
                except OSError as error:
                    log.warning("WARNING: %s lacks batch %d: %s", self._path, batch, error)

    def _append(self, line: dict[str, Any]) -> None:
        torn, self._torn = self._torn, True  # until it is written
        with open(self._path, "a", encoding="utf-8") as file:
            file.write("\n" * torn + json.dumps(line) + "\n")
        self._torn = False

    def _read(self, path: Path) -> dict[int, Record]:
        """This rank's orders by the number of the batch, the last of each."""
        facts, orders, others = {}, {}, None
        try:
            lines = files.read_bounded(path, LARGEST).decode(errors="replace").splitlines()
        except OSError as error:
            raise ValueError(
                f"pipeline.replay: {error}; use the folder of another run, which had pipeline.record=true"
            ) from error
        for line in lines:
            try:
                found = json.loads(line)
                if "batch" not in found:
                    facts = found
                    continue
                others = others if facts == self._facts else facts
                orders[found["batch"]] = Record.of([found["ranks"][self._grid.pipeline.rank]])
            except (ValueError, IndexError, KeyError, TypeError):
                continue  # cut short, damaged, or of fewer ranks, which the settings tell
        if others is not None or not orders:
            raise ValueError(
                f"pipeline.replay: {path} is of a run with {_said(others or {})}, and this one has "
                f"{_said(self._facts)}; use the settings of the run that was recorded"
            )
        return orders


def _said(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in facts.items()) or "no batches"
