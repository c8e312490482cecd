"""The run folder: configuration, metrics, plot and final weights. Written by rank 0 alone."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import socket
from pathlib import Path

from hpctrain import files
from hpctrain.config import Config, to_toml


class RunFolder:
    """runs/NAME. An older folder of the same name is kept as NAME.1, NAME.2, …, unless it is to be gone on with.

    A lock keeps other jobs out until this process ends, however it ends.

    Attributes: `path`; `moved`, where an older run went, or None; `history`, the metrics of all steps.

    Raises:
        ValueError: when another job has the folder.
    """

    def __init__(self, config: Config, resume: bool = False):
        self.path = config.folder
        self.moved = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self.path.with_name(f".{self.path.name}.lock"), self.path)
        if files.status(self.path) and not resume:
            numbered = (self.path.with_name(f"{self.path.name}.{n}") for n in itertools.count(1))
            self.moved = next(path for path in numbered if not files.status(path))
            self.path.rename(self.moved)
        self.path.mkdir(exist_ok=resume)
        files.sync(self.path.parent)
        self._config = to_toml(config)
        self.history: list[dict] = []
        self._metrics = None  # until `begin`

    def begin(self, step: int) -> None:
        """Go on after `step`, with this configuration: what the metrics say of later steps is forgotten."""
        if self._metrics:
            self._metrics.close()
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if files.status(path) else []
        self.history = kept_records(lines, step)
        self._replace("config.toml", self._config)
        self._replace(path.name, "".join(json.dumps(record) + "\n" for record in self.history))
        files.sync(self.path)
        self._metrics = path.open("a", encoding="utf-8", buffering=1)

    def _replace(self, name: str, text: str) -> None:
        """Write a file under another name, and rename it once it is on disk: it is whole at any moment."""
        part = self.path / f"{name}.tmp"
        part.write_text(text, encoding="utf-8")
        files.sync(part)
        part.rename(self.path / name)

    def log(self, record: dict) -> None:
        self.history.append(record)
        self._metrics.write(json.dumps(record) + "\n")

    def sync(self) -> None:
        """The metrics, on disk: a checkpoint is of steps that are all in them."""
        os.fsync(self._metrics.fileno())

    def close(self) -> None:
        self._metrics.close()

    def plot(self) -> Path:
        return plot_losses(self.history, self.path / "loss.png")


class Lock:
    """The right to write a run folder. The system takes it back when the process ends, whatever ends it.

    Raises:
        ValueError: when another process has it.
    """

    def __init__(self, path: Path, folder: Path):
        self._file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            raise ValueError(
                f"another job is writing {folder} ({holder}); wait for it, or choose another run.name"
            ) from None
        self._file.truncate(0)
        job = f", Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}{job}\n")
        self._file.flush()


def kept_records(lines: list[str], step: int) -> list[dict]:
    """The records of steps up to `step`, the last of each; a line that was cut short is none.

    >>> kept_records(['{"step": 1}', '{"step": 2}', '{"step": 3}', '{"st'], 2)
    [{'step': 1}, {'step': 2}]
    """
    records = {}
    for line in lines:
        try:
            record = json.loads(line)
            if record["step"] <= step:
                records[record["step"]] = record
        except (ValueError, KeyError, TypeError):
            continue
    return [records[key] for key in sorted(records)]


def last_losses(history: list[dict]) -> str:
    """In words; a run that stopped early and is resumed with fewer steps than it had taken was never validated.

    >>> last_losses([{"loss": 2.0, "val_loss": 3.0}, {"loss": None}])
    'final training loss 2.0000, validation loss 3.0000 (nats a token)'
    >>> last_losses([{"loss": 2.0}]), last_losses([])
    ('final training loss 2.0000 (nats a token)', 'no losses')
    """
    last = {key: value for record in history for key, value in record.items() if value is not None}
    names = {"loss": "final training loss", "val_loss": "validation loss"}
    said = ", ".join(f"{name} {last[key]:.4f}" for key, name in names.items() if key in last)
    return f"{said} (nats a token)" if said else "no losses"


def plot_losses(history: list[dict], path: Path) -> Path:
    """Training and validation loss over the steps, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    taken = [r for r in history if r["loss"] is not None]
    axes.plot([r["step"] for r in taken], [r["loss"] for r in taken], label="training", linewidth=1)
    evaluated = [r for r in history if "val_loss" in r]
    axes.plot([r["step"] for r in evaluated], [r["val_loss"] for r in evaluated], "o-", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
