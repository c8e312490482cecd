"""The picture of a run's losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST = 20  # losses, below which a mean over some of them says no more than they do


def plot_losses(history: list[dict], path: Path, title: str) -> Path:
    """Training and validation loss and the learning rate over the steps, as a PNG."""
    loss_figure(history, title).savefig(path, dpi=120)
    return path


def loss_figure(history: list[dict], title: str, size: tuple[float, float] = (8, 4.5)) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    taken = [r for r in history if r["loss"] is not None]
    steps, losses = [r["step"] for r in taken], [r["loss"] for r in taken]
    mean = smoothed(losses)
    axes.plot(
        steps, losses, label="training", linewidth=1, color="#4c78a8", alpha=0.35 if mean else 1, marker=_marker(steps)
    )
    if mean:
        axes.plot(steps, mean, label=f"training, mean of {window(len(losses))} steps", linewidth=1.5, color="#4c78a8")
    evaluated = [r for r in history if r.get("val_loss") is not None]
    if evaluated:
        validation = [r["val_loss"] for r in evaluated]
        axes.plot([r["step"] for r in evaluated], validation, "o-", label="validation", color="#e45756", markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.3)
    rates = axes.twinx()
    rates.plot([r["step"] for r in history], [r["lr"] for r in history], ":", color="#888", label="learning rate")
    rates.set_ylabel("learning rate", color="#666")
    rates.set_ylim(bottom=0)
    rates.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    handles = [handle for each in (axes, rates) for handle in each.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, fontsize=8)
    return figure


def window(count: int) -> int:
    """Losses that are averaged, an odd number."""
    return count // 50 * 2 + 5


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of each loss and of its neighbours; at the ends, of as many as there are on both sides. Nothing of few.

    >>> smoothed([1.0, 2.0])
    []
    >>> smoothed([0.0, 3.0, 0.0, *[1.0] * 20])[:4]
    [0.0, 1.0, 1.0, 1.2]
    """
    if len(losses) < LEAST:
        return []
    half, means = window(len(losses)) // 2, []
    for place in range(len(losses)):
        reach = min(half, place, len(losses) - 1 - place)
        near = losses[place - reach : place + reach + 1]
        means.append(sum(near) / len(near))
    return means


def _marker(steps: Sequence[int]) -> str | None:
    return "." if len(steps) < LEAST else None
