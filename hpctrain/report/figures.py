"""The pictures of a run's report, each as a PNG."""

from __future__ import annotations

import io
import statistics
from typing import TYPE_CHECKING

from hpctrain.report.run import AXES, MIB, PARTS, Run
from hpctrain.train.loss_plot import loss_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE, DPI = (6, 3.4), 130
COLOURS = {
    "compute": "#4c78a8", "data": "#f58518", "sequence": "#b279a2", "expert": "#ff9da6", "tensor": "#e45756",
    "pipeline": "#72b7b2", "bubble": "#b8b8b8", "reading": "#54a24b", "agreeing": "#eeca3b",
}  # fmt: skip
FEW = 16  # ranks that all have their number
MOST = 120  # points of a curve, beyond which several steps are one


def figures(run: Run) -> dict[str, bytes]:
    """{name: PNG}; one rank alone has no traffic."""
    loss = _png(loss_figure(run.records, "Loss", SIZE))
    pictures = {"loss": loss, "throughput": throughput(run), "time by step": by_step(run)}
    if run.ranks:
        pictures["time by rank"] = by_rank(run)
        if len(run.ranks) > 1:
            pictures["traffic by rank"] = traffic(run)
        pictures["memory by rank"] = memory(run)
    return pictures


def throughput(run: Run) -> bytes:
    """Tokens a second of every step, and the median."""
    figure, axes = _new("Throughput", "step", "tokens/s")
    speeds = [record["tokens_per_second"] for record in run.records]
    axes.plot([record["step"] for record in run.records], speeds, ".", markersize=3, color=COLOURS["compute"])
    median = statistics.median(run.steady)
    axes.axhline(median, linestyle=":", color="#666", label=f"median {median:,.0f}")
    axes.set_ylim(0, 1.15 * max(speeds))
    axes.legend(fontsize=8)
    return _png(figure)


def by_step(run: Run) -> bytes:
    """Where the time of rank 0 went, over the steps; each point is the mean of as many steps."""
    figure, axes = _new("Time of a step, rank 0", "step", "ms")
    together = -(-len(run.records) // MOST)
    groups = [run.records[start : start + together] for start in range(0, len(run.records), together)]
    heights = [[1e3 * statistics.fmean(record["time"][part] for record in group) for group in groups] for part in PARTS]
    axes.stackplot(
        [group[0]["step"] for group in groups], heights, labels=PARTS, colors=[COLOURS[part] for part in PARTS]
    )
    axes.set_ylim(bottom=0)
    _legend_beside(axes)
    return _png(figure)


def by_rank(run: Run) -> bytes:
    """Where the time of each rank went, mean over the steps of the job."""
    values = {part: [1e3 * rank["time"][part] / max(1, rank["steps"]) for rank in run.ranks] for part in PARTS}
    return _stacked(run, "Time of a step by rank", "ms", values)


def traffic(run: Run) -> bytes:
    values = {
        axis: [rank["bytes_received"].get(axis, 0) / max(1, rank["steps"]) / MIB for rank in run.ranks] for axis in AXES
    }
    return _stacked(run, "Received in a step by rank", "MiB", values)


def memory(run: Run) -> bytes:
    """Of the process, and of the device where there is one."""
    values = {"process": [rank["memory"] / MIB for rank in run.ranks]}
    if any(rank["device_memory"] for rank in run.ranks):
        values = {"device": [rank["device_memory"] / MIB for rank in run.ranks]}
    return _stacked(run, f"Most memory of the {next(iter(values))}", "MiB", values)


def _stacked(run: Run, title: str, unit: str, values: dict[str, list[float]]) -> bytes:
    from matplotlib.ticker import MaxNLocator

    figure, axes = _new(title, "rank", unit)
    ranks, bottom = [rank["rank"] for rank in run.ranks], [0.0] * len(run.ranks)
    for name, heights in values.items():
        if any(heights):
            axes.bar(
                ranks, heights, 0.8 if len(ranks) < 50 else 1.0, bottom, color=COLOURS.get(name, "#4c78a8"), label=name
            )
        bottom = [low + height for low, height in zip(bottom, heights)]
    if len(ranks) <= FEW:
        axes.set_xticks(ranks)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(-0.6, len(ranks) - 0.4)
    if len(values) > 1 and any(bottom):
        _legend_beside(axes)
    return _png(figure)


def _new(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def _legend_beside(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI)
    return out.getvalue()
