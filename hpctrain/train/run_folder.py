"""The run folder: configuration, metrics, plot and final weights. Written by rank 0 alone."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from hpctrain.config import Config, to_toml


class RunFolder:
    """runs/NAME. An older folder of the same name is kept as NAME.1, NAME.2, …

    Attributes: `path`, and `moved`, where an older run went, or None.
    """

    def __init__(self, config: Config):
        self.path = config.folder
        self.moved = None
        if self.path.exists():
            numbered = (self.path.with_name(f"{self.path.name}.{n}") for n in itertools.count(1))
            self.moved = next(path for path in numbered if not path.exists())
            self.path.rename(self.moved)
        self.path.mkdir(parents=True)
        (self.path / "config.toml").write_text(to_toml(config), encoding="utf-8")
        self._metrics = (self.path / "metrics.jsonl").open("w", encoding="utf-8", buffering=1)
        self.history: list[dict] = []

    def log(self, record: dict) -> None:
        self.history.append(record)
        self._metrics.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._metrics.close()

    def plot(self) -> Path:
        return plot_losses(self.history, self.path / "loss.png")


def plot_losses(history: list[dict], path: Path) -> Path:
    """Training and validation loss over the steps, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([r["step"] for r in history], [r["loss"] for r in history], label="training", linewidth=1)
    evaluated = [r for r in history if "val_loss" in r]
    axes.plot([r["step"] for r in evaluated], [r["val_loss"] for r in evaluated], "o-", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
