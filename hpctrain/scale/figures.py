"""The pictures of a report, each as a PNG."""

from __future__ import annotations

import io
import itertools

from hpctrain.scale.summary import Study

SIZE, DPI = (6, 3.3), 130
PARTS = {
    "compute": "#4c78a8", "data": "#f58518", "sequence": "#b279a2", "expert": "#ff9da6", "tensor": "#e45756",
    "pipeline": "#72b7b2", "bubble": "#b8b8b8", "reading": "#54a24b", "agreeing": "#eeca3b",
}  # fmt: skip
COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#b279a2")
CROWDED = "hollow: more ranks than cores, not scaling"


def figures(studies: list[Study]) -> dict[str, bytes]:
    """{name: PNG} of one study, or of several over each other."""
    pictures = {"throughput": throughput(studies), "efficiency": efficiency(studies)}
    if len(studies) == 1:
        (study,) = studies
        pictures |= {"time": time_split(study), "bytes": bytes_moved(study), "mfu": mfu(study), "memory": memory(study)}
    return pictures


def throughput(studies: list[Study]) -> bytes:
    """Speed over ranks, the spread of the repeats, and the ideal from each study's first point."""
    from matplotlib.ticker import LogLocator

    figure, axes = _new("model GFLOP/s", studies)
    for study, colour in zip(studies, itertools.cycle(COLOURS)):
        _spread(axes, study, colour, [[speed / 1e9 for speed in row.flops_per_second] for row in study.rows])
        first = study.rows[0]
        ideal = [first.median_flops_per_second / first.ranks * row.ranks / 1e9 for row in study.rows]
        axes.plot(
            [row.ranks for row in study.rows], ideal, ":", color=colour, label="ideal" if len(studies) == 1 else None
        )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(base=2, subs=(1, 1.25, 1.5, 1.75)))  # several, of two ranks too
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.3g}")
    axes.set_title("Throughput")
    return _png(figure, axes)


def efficiency(studies: list[Study]) -> bytes:
    """Efficiency over ranks; points with more ranks than cores have none."""
    figure, axes = _new("efficiency", studies)
    for study, colour in zip(studies, itertools.cycle(COLOURS)):
        fair = [row for row in study.rows if not row.oversubscribed]
        _spread(axes, study, colour, [row.efficiency for row in fair], fair)
    axes.axhline(1, linestyle=":", color="grey")
    axes.set_ylim(0, max([1.15, *(1.05 * max(row.efficiency) for study in studies for row in study.rows)]))
    axes.set_title(f"{studies[0].mode.capitalize()} scaling efficiency")
    return _png(figure, axes)


def time_split(study: Study) -> bytes:
    """Where a step's time goes, mean over ranks."""
    figure, axes = _new("seconds a step", [study], logarithmic=False)
    labels = [_label(row) for row in study.rows]
    bottom = [0.0] * len(labels)
    for part, colour in PARTS.items():
        heights = [row.seconds[part] for row in study.rows]
        axes.bar(labels, heights, 0.6, bottom, color=colour, label=part)
        bottom = [low + height for low, height in zip(bottom, heights)]
    axes.set_ylim(0, 1.05 * max(bottom))
    axes.set_title("Time of a step")
    return _png(figure, axes, outside=True)


def bytes_moved(study: Study) -> bytes:
    """What the busiest rank receives, beside the formula and the lower bound."""
    figure, axes = _new("MiB received a step", [study], logarithmic=False)
    for shift, (name, colour) in enumerate((("received", "#4c78a8"), ("formula", "#f58518"), ("bound", "#54a24b"))):
        heights = [sum((getattr(row, name) or {}).values()) / 2**20 for row in study.rows]
        places = [place + (shift - 1) * 0.27 for place in range(len(heights))]
        axes.bar(
            places, heights, 0.25, color=colour, label={"received": "counted", "bound": "lower bound"}.get(name, name)
        )
    axes.set_xticks(range(len(study.rows)), [_label(row) for row in study.rows])
    axes.set_title("Bytes of the busiest rank")
    return _png(figure, axes, outside=True)


def mfu(study: Study) -> bytes:
    """Share of the peak that the same ranks were measured to have."""
    return _bars(study, "Model FLOP utilisation", "% of the measured peak", [100 * row.mfu for row in study.rows])


def memory(study: Study) -> bytes:
    return _bars(study, "Memory", "MiB of the largest rank", [row.memory / 2**20 for row in study.rows])


def _bars(study, title, ylabel, heights) -> bytes:
    figure, axes = _new(ylabel, [study], logarithmic=False)
    axes.bar([_label(row) for row in study.rows], heights, 0.5, color="#4c78a8")
    axes.set_title(title)
    return _png(figure)


def _label(row) -> str:
    return f"{row.ranks}*" if row.oversubscribed else str(row.ranks)


def _new(ylabel, studies, logarithmic=True):
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    crowded = any(row.oversubscribed for study in studies for row in study.rows)
    axes.set(xlabel="ranks" if logarithmic or not crowded else "ranks (*: more than cores, not scaling)", ylabel=ylabel)
    if logarithmic:
        ranks = sorted({row.ranks for study in studies for row in study.rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.grid(alpha=0.3)
    return figure, axes


def _spread(axes, study, colour, values, rows=None):
    """A line through the medians with bars from the least to the most; hollow where there are more ranks than cores."""
    import statistics

    rows = study.rows if rows is None else rows
    ranks, middle = [row.ranks for row in rows], [statistics.median(each) for each in values]
    low = [m - min(each) for m, each in zip(middle, values)]
    high = [max(each) - m for m, each in zip(middle, values)]
    label = f"{study.name} ({study.vary})"
    axes.errorbar(ranks, middle, [low, high], color=colour, capsize=4, linewidth=1.5, label=label)
    for hollow in (False, True):
        chosen = [i for i, row in enumerate(rows) if row.oversubscribed == hollow]
        face = "white" if hollow else colour
        axes.plot(
            [ranks[i] for i in chosen], [middle[i] for i in chosen], "o", color=colour, markerfacecolor=face,
            label=CROWDED if hollow and chosen else None,
        )  # fmt: skip


def _png(figure, axes=None, outside=False) -> bytes:
    """With a legend on `axes`, or beside them."""
    if outside:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    elif axes:
        axes.legend(fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
