"""A simulated schedule as text for a terminal and as a picture: one row a rank, the numbers are microbatches."""

from __future__ import annotations

from pathlib import Path

from hpctrain.pipeline.actions import BACKWARD, FORWARD, INPUT_GRADIENT, REDUCE, UPDATE, WEIGHT_GRADIENT, Action
from hpctrain.pipeline.simulate import Simulation, Span

LETTERS = {FORWARD: "F", BACKWARD: "B", INPUT_GRADIENT: "I", WEIGHT_GRADIENT: "W"}
COLOURS = {
    FORWARD: "#8ecae6",
    BACKWARD: "#95d5b2",
    INPUT_GRADIENT: "#b7e4c7",
    WEIGHT_GRADIENT: "#ffd166",
    REDUCE: "#cdb4db",
    UPDATE: "#adb5bd",
}


def text(simulation: Simulation, width: int = 100) -> str:
    """One line a rank, of at most `width` characters after the rank's number: F, B, I or W and the microbatch where it
    fits; dots are idle time. Reductions and updates are left out.

    >>> from hpctrain.pipeline import schedule
    >>> print(text(schedule("1f1b", ranks=2, microbatches=3).simulate(), width=24))
    rank 0 F0F1....B0--F2B1--..B2--
    rank 1 ..F0B0--F1B1--F2B2--....
    """
    if not simulation.makespan:
        return "\n".join(f"rank {rank}" for rank in range(len(simulation.busy)))
    times = {edge for rank in simulation.spans for span in rank for edge in (span.start, span.end)}
    whole = all(abs(time * 2 - round(time * 2)) < 1e-9 for time in times)  # then columns can be exact
    scale = width / simulation.makespan
    if whole:
        step = 1 if all(abs(time - round(time)) < 1e-9 for time in times) else 2
        scale = max(1, int(scale / step)) * step
    digits = len(str(len(simulation.busy) - 1))
    lines = []
    for rank, spans in enumerate(simulation.spans):
        row = ["."] * round(simulation.makespan * scale)
        for span in spans:
            for action, start, end in _parts(span):
                if action.kind in LETTERS:
                    first, last = round(start * scale), round(end * scale)
                    label = f"{LETTERS[action.kind]}{action.microbatch}"
                    label = label if len(label) <= last - first else label[:1]
                    row[first:last] = label.ljust(last - first, "-")[: last - first]
        lines.append(f"rank {rank:>{digits}} " + "".join(row)[:width])
    return "\n".join(lines)


def picture(simulation: Simulation, path: str | Path, title: str = "") -> None:
    """Write the timeline as an image; the file's ending names the format. Dark edges mark the second stage of
    a rank, or the second replica.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks, actions = len(simulation.busy), sum(len(rank) for rank in simulation.spans)
    width = min(40.0, max(8.0, 0.35 * actions / ranks))
    figure = Figure(figsize=(width, 1.4 + 0.45 * ranks), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    drawn = set()
    for rank, spans in enumerate(simulation.spans):
        nearest = min((_home(span.actions[0]) for span in spans), default=None)
        for span in spans:
            for action, start, end in _parts(span):
                if end <= start or action.kind not in COLOURS:
                    continue
                drawn.add(action.kind)
                own = _home(action) == nearest
                axes.barh(
                    rank,
                    end - start,
                    left=start,
                    height=0.9,
                    color=COLOURS[action.kind],
                    edgecolor="white" if own else "#495057",
                    linewidth=0.8,
                )
                if action.kind in LETTERS and (end - start) / simulation.makespan * width > 0.12:
                    number = f"{action.microbatch}" + (f".{action.slice}" if action.slice else "")
                    axes.text((start + end) / 2, rank, number, ha="center", va="center", fontsize=7)
    axes.set(ylim=(ranks - 0.45, -0.55), xlim=(0, simulation.makespan or 1), xlabel="time", ylabel="rank", title=title)
    axes.set_yticks(range(ranks))
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour, label=kind.replace("_", " ")) for kind, colour in COLOURS.items() if kind in drawn]
    if any(_home(a) != _home(s[0].actions[0]) for s in simulation.spans if s for p in s for a in p.actions):
        handles.append(Patch(facecolor="white", edgecolor="#495057", label="the rank's other stages (dark edge)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)), frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _home(action: Action) -> tuple[int, int]:
    return action.replica, action.stage


def _parts(span: Span):
    """(action, start, end); a fused pair is drawn as its forward's part and then its backward's."""
    if len(span.actions) == 1:
        yield span.actions[0], span.start, span.end
    else:
        middle = span.start + (span.end - span.start) / 3
        yield span.actions[0], span.start, middle
        yield span.actions[1], middle, span.end
