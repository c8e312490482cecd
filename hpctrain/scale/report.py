"""The report of a study: one self-contained HTML file; the same table as Markdown, CSV and JSON; and the pictures."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

from hpctrain import page
from hpctrain.scale.figures import figures
from hpctrain.scale.summary import Study, summarise

MIB = 2**20
HEADER = (
    "ranks", "grid", "tokens/s", "GFLOP/s", "least–most", "efficiency", "step s", "computing", "communication",
    "bubble", "reading", "MiB received", "formula", "lower bound", "MFU", "memory MiB",
)  # fmt: skip
MOVED = ("received", "formula", "bound")
DOUBTFUL = 0.1  # part of a rank's cores that others use


def write(folder: Path, description: dict | None = None) -> Path:
    """Write report.html, .md, .csv, .json and the PNGs of the study in `folder` that `runner.describe_study`
    describes, or the newest; returns the HTML file."""
    study = summarise(folder, description)
    return _write(folder, [study], title(study))


def compare(folders: list[Path], out: Path) -> Path:
    """Write the same of several studies over each other to the folder `out`.

    Raises:
        ValueError: when one of them holds nothing, or one is weak and another strong.
    """
    studies = [summarise(folder) for folder in folders]
    if len({study.mode for study in studies}) > 1:
        kinds = ", ".join(f"{study.name} is {study.mode}" for study in studies)
        raise ValueError(f"weak and strong studies cannot be compared: {kinds}")
    out.mkdir(parents=True, exist_ok=True)
    return _write(out, studies, " and ".join(study.name for study in studies))


def title(study: Study) -> str:
    return f"{study.mode.capitalize()} scaling of {study.name}: {study.vary} grows"


def rows(study: Study) -> list[list[str]]:
    """The table's cells, one list a point."""
    return [
        [
            str(row.ranks),
            "×".join(str(size) for size in row.grid.values()),
            f"{row.tokens_per_second:,.0f}",
            f"{row.median_flops_per_second / 1e9:,.1f}",
            f"{min(row.flops_per_second) / 1e9:,.1f}–{max(row.flops_per_second) / 1e9:,.1f}",
            "oversubscribed" if row.oversubscribed else f"{row.median_efficiency:.3f}",
            f"{row.step_seconds:.4f}",
            f"{row.seconds['compute']:.4f}",
            " + ".join(f"{row.seconds[axis]:.4f}" for axis in ("data", "sequence", "expert", "pipeline", "tensor")),
            f"{row.seconds['bubble']:.4f}",
            f"{row.seconds['reading']:.4f}",
            *(f"{sum(moved.values()) / MIB:.3f}" if moved else "–" for moved in (row.received, row.formula, row.bound)),
            f"{100 * row.mfu:.1f} %",
            f"{row.memory / MIB:,.0f}",
        ]
        for row in study.rows
    ]


def notes(study: Study) -> list[str]:
    """What a reader must know to judge the figures."""
    about = study.about
    repeats, first = len(study.rows[0].flops_per_second), study.rows[0].ranks
    lines = [
        f"{repeats} repeats of {about['steps']} steps; medians, and the least and the most. Efficiency is model FLOP/s "
        f"a rank over those of {first} rank(s).",
        where(study),
        "Grids are replica×ring×pipeline×ulysses×x×y×z. Communication is that of data + sequence + expert + pipeline + "
        "tensor, the mean over ranks; the bubble is what stages wait for their neighbours. Bytes are the busiest "
        "rank's; the lower bound takes every matrix product by itself.",
        "Efficiency compares a point with the first one. MFU compares it with the rate at which the same ranks, all at "
        "once, multiply matrices of 1024²: where ranks slow each other down (memory, clock), that rate falls too, and "
        "efficiency can fall while MFU does not.",
    ]
    if first != study.first:
        lines.append(f"The point of {study.first} rank(s), which efficiency should be over, is not measured yet.")
    if any(row.oversubscribed for row in study.rows):
        lines.append(
            "Points with more ranks than cores share them in time: they show that it works, not how it scales."
        )
    return lines


def where(study: Study) -> str:
    """When and on what it was measured."""
    about = study.about
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(about["time"]))
    text = (
        f"{when}; {about['processor']}; {about['mpi']}; {about['threads']} thread(s) a rank; hosts "
        f"{', '.join(about['hosts'])}; commit {about['commit']}; modules {', '.join(about['modules']) or 'none'}."
    )
    if about["several"]:
        text += f" This is the newest measurement: in {', '.join(about['several'])} others differ."
    return text


def markdown(studies: list[Study], heading: str) -> str:
    lines = [f"# {heading}", ""]
    for study in studies:
        if len(studies) > 1:
            lines += [f"## {title(study)}", ""]
        lines += [sentence(study), "", *(f"**{warning}**\n" for warning in warnings(study))]
        lines += ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
        lines += ["| " + " | ".join(cells) + " |" for cells in rows(study)]
        lines += ["", *(f"- {note}" for note in notes(study)), ""]
    return "\n".join(lines)


def sentence(study: Study) -> str:
    """The result."""
    first, fair = study.rows[0], [row for row in study.rows if not row.oversubscribed]
    crowded = [str(row.ranks) for row in study.rows if row.oversubscribed]
    said = f"{first.tokens_per_second:,.0f} tokens/s on {first.ranks} rank(s)"
    if len(fair) > 1:
        last, one = fair[-1], len(fair[-1].efficiency) == 1
        spread = "" if one else f" ({min(last.efficiency):.3f} to {max(last.efficiency):.3f})"
        said += (
            f", {last.tokens_per_second:,.0f} on {last.ranks}: efficiency {last.median_efficiency:.3f}{spread} of "
            f"{study.mode} scaling"
        )
    if crowded:
        said += f"; {', '.join(crowded)} ranks have more ranks than cores, and say nothing of scaling"
    return said + "."


def warnings(study: Study) -> list[str]:
    """What makes the figures doubtful."""
    found = []
    if (repeats := min(len(row.flops_per_second) for row in study.rows)) < 3:
        found.append(
            f"{repeats} repeat(s) of a point: what differs by chance cannot be told from what scales (--repeat 3)."
        )
    threads = study.about["threads"]
    busy = [row for row in study.rows if not row.oversubscribed and row.lacking > DOUBTFUL * threads]
    if busy:
        worst = max(busy, key=lambda row: row.lacking)
        found.append(
            f"Others used the cores meanwhile, up to {worst.lacking:.1f} of those that {worst.ranks} rank(s) needed: "
            f"the points of {', '.join(str(row.ranks) for row in busy)} ranks are slower than they should be."
        )
    return found


def data(study: Study) -> list[dict]:
    """The table as numbers, for report.json and report.csv."""
    return [
        {
            "study": study.name, "mode": study.mode, "vary": study.vary, "ranks": row.ranks,
            "grid": "x".join(str(size) for size in row.grid.values()), "tokens_per_second": row.tokens_per_second,
            "flops_per_second": row.median_flops_per_second, "least_flops_per_second": min(row.flops_per_second),
            "most_flops_per_second": max(row.flops_per_second), "repeats": len(row.flops_per_second),
            "efficiency": None if row.oversubscribed else row.median_efficiency, "oversubscribed": row.oversubscribed,
            "cores_lacking": row.lacking, "step_seconds": row.step_seconds,
            **{f"seconds_{part}": seconds for part, seconds in row.seconds.items()},
            **{f"bytes_{of}": sum(moved.values()) if (moved := getattr(row, of)) else None for of in MOVED},
            "mfu": row.mfu, "memory": row.memory,
        }
        for row in study.rows
    ]  # fmt: skip


def _write(folder: Path, studies: list[Study], heading: str) -> Path:
    pictures = figures(studies)
    for name, content in pictures.items():
        (folder / f"{name}.png").write_bytes(content)
    (folder / "report.md").write_text(markdown(studies, heading), encoding="utf-8")
    lines = [line for study in studies for line in data(study)]
    (folder / "report.json").write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    with (folder / "report.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    several = len(studies) > 1
    parts = [
        page.paragraph(f"{study.name}: {sentence(study)}" if several else sentence(study), "lead") for study in studies
    ]
    parts += [page.paragraph(where(study), "facts") for study in studies]
    parts += [page.paragraph(warning, "warning") for study in studies for warning in warnings(study)]
    parts.append(page.figures(pictures))
    for study in studies:
        parts += _section(study, several)
    parts.append(page.links(["report.csv", "report.json", "report.md"]))
    out = folder / "report.html"
    out.write_text(page.page(heading, parts), encoding="utf-8")
    return out


def _section(study: Study, several: bool) -> list[str]:
    return [
        *([page.heading(title(study))] if several else []),
        page.table(HEADER, rows(study), [row.oversubscribed for row in study.rows], left=(1,)),
        *(page.paragraph(note) for note in notes(study)),
        *(page.folded(f"Configuration, {row.ranks} ranks", row.config) for row in study.rows),
    ]
