"""The report of a study: one self-contained HTML file, the same table as Markdown, and the pictures beside them."""

from __future__ import annotations

import base64
import html
from pathlib import Path

from hpctrain.scale.figures import figures
from hpctrain.scale.summary import Study, summarise

MIB = 2**20
HEADER = (
    "ranks", "grid", "tokens/s", "GFLOP/s", "least–most", "efficiency", "step s", "computing", "communication",
    "bubble", "reading", "MiB received", "formula", "lower bound", "MFU", "memory MiB",
)  # fmt: skip
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 1240px; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem; margin: 0 0 .3rem } p { margin: .4rem 0 }
.figures { display: grid; grid-template-columns: repeat(2, 1fr); gap: .6rem }
.figures img { width: 100%; border: 1px solid #ddd; border-radius: 4px }
table { border-collapse: collapse; font-size: 12px; margin: 1rem 0; width: 100% }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .4rem; text-align: right; white-space: nowrap }
th { white-space: normal } td:nth-child(2), th:nth-child(2) { text-align: left }
.wide { overflow-x: auto }
tr.crowded td { color: #888 } details { margin: .5rem 0 } pre { font-size: 12px; background: #f6f6f6; padding: .5rem }
"""


def write(folder: Path, description: dict | None = None) -> Path:
    """Write report.html, report.md and the PNGs of the study in `folder` that `runner.describe_study`
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
            " + ".join(f"{row.seconds[axis]:.4f}" for axis in ("data", "sequence", "pipeline", "tensor")),
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
        f"{about['mpi']}; {about['threads']} thread(s) a rank; hosts {', '.join(about['hosts'])}; commit "
        f"{about['commit']}; modules {', '.join(about['modules']) or 'none'}.",
        "Grids are replica×ring×pipeline×ulysses×x×y×z. Communication is that of data + sequence + pipeline + tensor, "
        "the mean over ranks; the bubble is what stages wait for their neighbours. Bytes are the busiest rank's; the "
        "lower bound takes every matrix product by itself. MFU is of the rate at which the same ranks multiply "
        "matrices of 1024², measured in the job.",
    ]
    if first != study.first:
        lines.append(f"The point of {study.first} rank(s), which efficiency should be over, is not measured yet.")
    if any(row.oversubscribed for row in study.rows):
        lines.append(
            "Points with more ranks than cores share them in time: they show that it works, not how it scales."
        )
    return lines


def markdown(studies: list[Study], heading: str) -> str:
    lines = [f"# {heading}", ""]
    for study in studies:
        if len(studies) > 1:
            lines += [f"## {title(study)}", ""]
        lines += ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
        lines += ["| " + " | ".join(cells) + " |" for cells in rows(study)]
        lines += ["", *(f"- {note}" for note in notes(study)), ""]
    return "\n".join(lines)


def _write(folder: Path, studies: list[Study], heading: str) -> Path:
    pictures = figures(studies)
    for name, content in pictures.items():
        (folder / f"{name}.png").write_bytes(content)
    (folder / "report.md").write_text(markdown(studies, heading), encoding="utf-8")
    images = "".join(
        f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(content).decode()}">'
        for name, content in pictures.items()
    )
    tables = "".join(_section(study, len(studies) > 1) for study in studies)
    out = folder / "report.html"
    out.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(heading)}</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head><body><h1>{html.escape(heading)}</h1>'
        f'<div class="figures">{images}</div>{tables}</body></html>\n',
        encoding="utf-8",
    )
    return out


def _section(study: Study, several: bool) -> str:
    def cells(tag, texts):
        return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)

    heading = f"<h2>{html.escape(title(study))}</h2>" if several else ""
    lines = [
        f"<tr{' class=crowded' if row.oversubscribed else ''}>{cells('td', texts)}</tr>"
        for row, texts in zip(study.rows, rows(study))
    ]
    configs = "".join(
        f"<details><summary>Configuration, {row.ranks} ranks</summary><pre>{html.escape(row.config)}</pre></details>"
        for row in study.rows
    )
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes(study))
    return (
        f'{heading}<div class="wide"><table><tr>{cells("th", HEADER)}</tr>{"".join(lines)}</table></div>'
        f"{below}{configs}"
    )
