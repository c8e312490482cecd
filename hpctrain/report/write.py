"""The report of a run, as one HTML file in its folder, with the figures of its ranks as CSV."""

from __future__ import annotations

import csv
import time
from pathlib import Path

from hpctrain import page
from hpctrain.report import figures
from hpctrain.report.run import (
    AXIS_HEADER,
    PLAN_HEADER,
    RANK_HEADER,
    SHOWN,
    Run,
    axis_rows,
    facts,
    plan_rows,
    rank_rows,
    read,
    sentence,
    warnings,
)
from hpctrain.train.metric_loggers import flat


def write(folder: Path) -> Path:
    """Write report.html and metrics.csv into a run folder; returns the former.

    Raises:
        ValueError: for a folder without metrics.
    """
    run = read(folder)
    _write_csv(run, folder / "metrics.csv")
    out = folder / "report.html"
    out.write_text(page.page(f"Run {folder.resolve().name}", _parts(run)), encoding="utf-8")
    return out


def _parts(run: Run) -> list[str]:
    ended = run.about.get("time") or (run.folder / "metrics.jsonl").stat().st_mtime
    parts = [page.paragraph(sentence(run) + ".", "lead")]
    parts += [page.paragraph(time.strftime("%Y-%m-%d %H:%M", time.localtime(ended)), "facts")]
    parts += [page.paragraph(fact, "facts") for fact in facts(run)]
    parts += [page.paragraph(warning, "warning") for warning in warnings(run)]
    parts.append(page.figures(figures.figures(run)))
    if run.ranks:
        parts += [page.heading("Traffic"), page.table(AXIS_HEADER, axis_rows(run))]
        parts += [page.heading("Ranks"), page.table(RANK_HEADER, rank_rows(run), left=(1, 2))]
        place = "/".join(run.ranks[0]["coords"])
        lines = (
            f"Parts of a step in ms, over the {run.ranks[0]['steps']:,} steps of the job. A rank's place is {place}."
        )
        if len(run.ranks) > SHOWN:
            lines += f" {len(run.ranks) - SHOWN} ranks in between are in ranks.json."
        parts.append(page.paragraph(lines, "facts"))
    machine, rows, wrong = plan_rows(run.folder)
    if rows:
        parts += [page.heading(f"Plan for {machine}, parts of rank 0"), page.table(PLAN_HEADER, rows)]
        parts += [page.paragraph(each, "warning") for each in wrong]
    known = ("metrics.jsonl", "metrics.csv", "ranks.json", "plan.json", "loss.png")
    names = [name for name in known if (run.folder / name).exists()]
    parts.append(page.links(names))
    config = run.folder / "config.toml"
    if config.exists():
        parts.append(page.folded("Configuration", config.read_text(encoding="utf-8")))
    return parts


def _write_csv(run: Run, path: Path) -> None:
    """A line a step, a column a number; those of tables by names such as time/compute."""
    rows = [dict(flat(record)) for record in run.records]
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)
