"""Progress on rank 0: a live line on a terminal, now and then a plain line in a log."""

from __future__ import annotations

import os
import sys


def on_terminal() -> bool:
    """Whether a person watches. mpirun gives its ranks terminals of its own making, so its output counts too."""
    try:
        return sys.stdout.isatty() and os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def in_words(loss: float | None, decimals: int = 4) -> str:
    """
    >>> in_words(2.0), in_words(None)
    ('2.0000', 'not finite')
    """
    return "not finite" if loss is None else f"{loss:.{decimals}f}"


class Progress:
    """Shows step, losses and speed. On a terminal by rich; otherwise about twenty lines and every validation."""

    def __init__(self, steps: int):
        self.steps = steps
        self.every = max(1, steps // 20)
        self.bar = None
        if on_terminal():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self.bar = Progress(*columns, TextColumn("{task.fields[text]}"))
            self.task = self.bar.add_task("training", total=steps, text="")
            self.bar.start()

    def update(self, record: dict) -> None:
        loss = f"loss {record['loss']:.4f}" if record["loss"] is not None else f"skipped: {record['skipped']}"
        text = f"{loss}  {record['tokens_per_second']:,.0f} tokens/s"
        if "val_loss" in record:
            text += f"  validation {in_words(record['val_loss'])}"
        step = record["step"]
        if self.bar:
            self.bar.update(self.task, completed=step, text=text)
        elif step == 1 or step % self.every == 0 or "val_loss" in record or "skipped" in record:
            print(f"step {step:{len(str(self.steps))}d}/{self.steps}  {text}", flush=True)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
