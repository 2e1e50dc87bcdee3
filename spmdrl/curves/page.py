"""One HTML file that needs no other: style, script and numbers are inside."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib import resources

from spmdrl.curves.panels import PanelData, Style
from spmdrl.curves.svg import draw_panel, legend

__all__ = ["Cell", "curves_section", "document", "section", "table"]

Cell = str | int | float | None


def document(title: str, subtitle: str, sections: Iterable[str]) -> str:
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title>"
        f"<style>\n{_asset('page.css')}</style></head>\n<body>\n"
        f'<h1>{html.escape(title)}</h1>\n<p class="sub">{html.escape(subtitle)}</p>\n'
        f"{''.join(sections)}<script>\n{_asset('page.js')}</script>\n</body></html>\n"
    )


def section(title: str, content: str) -> str:
    return f"<section>\n<h2>{html.escape(title)}</h2>\n{content}\n</section>\n"


def curves_section(panels: Sequence[PanelData], labels: Sequence[str], style: Style) -> str:
    drawn = "\n".join(draw_panel(panel, style) for panel in panels)
    return f'{legend(labels)}\n<div class="panels">\n{drawn}\n</div>\n'


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Numbers stand to the right."""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    return f'<div class="wide"><table>\n<tr>{heads}</tr>\n{body}</table></div>'


def _cell(value: Cell) -> str:
    if value is None:
        return '<td class="n">–</td>'
    if isinstance(value, str):
        return f"<td>{html.escape(value)}</td>"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return f'<td class="n">{shown}</td>'


def _asset(name: str) -> str:
    return (resources.files("spmdrl.curves") / name).read_text()
