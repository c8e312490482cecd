"""Pages to show: one self-contained HTML file, for a screen, a phone and paper."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence

STYLE = """
:root { color-scheme: light }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 1240px; padding: 0 1rem; color: #222;
  background: #fff }
h1 { font-size: 1.5rem; margin: 0 0 .3rem } h2 { font-size: 1.15rem; margin: 1.6rem 0 .3rem } p { margin: .4rem 0 }
.lead { font-size: 1.1rem } .facts { color: #555; font-size: .9rem; overflow-wrap: anywhere }
.warning { background: #fff4d6; border-left: 4px solid #e0a100; padding: .4rem .7rem }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: .6rem;
  margin: .8rem 0 }
.figures img { width: 100%; border: 1px solid #ddd; border-radius: 4px; box-sizing: border-box }
table { border-collapse: collapse; font-size: 12px; width: 100% }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .4rem; text-align: right; white-space: nowrap }
th { vertical-align: bottom; white-space: normal } .left { text-align: left }
.wide { overflow-x: auto; margin: 1rem 0 }
tr.faint td { color: #888 } details { margin: .5rem 0 }
pre { font-size: 12px; background: #f6f6f6; padding: .5rem; overflow-x: auto }
@media print {
  @page { margin: 15mm }
  body { font-size: 10pt; margin: 0; max-width: none; padding: 0 }
  .figures { grid-template-columns: repeat(2, 1fr) } .figures img, tr, .warning { break-inside: avoid }
  .wide { overflow: visible } table { font-size: 6.5pt } th, td { padding: .1rem .2rem; white-space: normal }
  details { display: none }
}
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A whole document. The parts are HTML, of the functions below."""
    body = "\n".join(parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>'
        f"<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def paragraph(text: str, kind: str = "") -> str:
    """`kind` is lead, facts or warning, or nothing.

    >>> paragraph("1 < 2", "warning")
    '<p class="warning">1 &lt; 2</p>'
    """
    return f"<p{_class(kind)}>{html.escape(text)}</p>"


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def figures(pictures: Mapping[str, bytes]) -> str:
    """PNGs by name, beside each other where there is room."""
    images = (
        f'<img alt="{html.escape(name)}" src="data:image/png;base64,{base64.b64encode(content).decode()}">'
        for name, content in pictures.items()
    )
    return f'<div class="figures">{"".join(images)}</div>'


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], faint: Sequence[bool] = (), left: Sequence[int] = (0,)
) -> str:
    """One that scrolls by itself where it is too wide.

    Args:
        faint: of each row, whether it is shown in grey.
        left: numbers of the columns of words.
    """

    def cells(tag, texts):
        aligned = (_class("left" if number in left else "") for number in range(len(texts)))
        return "".join(f"<{tag}{how}>{html.escape(text)}</{tag}>" for how, text in zip(aligned, texts))

    lines = [
        f"<tr{_class('faint' if number < len(faint) and faint[number] else '')}>{cells('td', texts)}</tr>"
        for number, texts in enumerate(rows)
    ]
    return f'<div class="wide"><table><tr>{cells("th", header)}</tr>{"".join(lines)}</table></div>'


def folded(title: str, text: str) -> str:
    """Text that is shown when it is asked for."""
    return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"


def links(names: Iterable[str]) -> str:
    """To files beside the page."""
    names = [html.escape(name) for name in names]
    return '<p class="facts">Figures: ' + ", ".join(f'<a href="{name}">{name}</a>' for name in names) + "</p>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
