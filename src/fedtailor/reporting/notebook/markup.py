"""Pieces of HTML and SVG; all text is escaped. Colors work on light and dark pages."""

from collections.abc import Sequence
from html import escape

_CELL = "padding: 2px 10px 2px 0; vertical-align: top; background: none; text-align:"
_SMALL = "font-size: 90%; opacity: 0.8; max-width: 60em"


def html_table(columns: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Return a table whose first `left` columns contain text; the others contain numbers.

    >>> "&lt;b&gt;" in html_table(["name", "value"], [["<b>", 3]])
    True
    """

    def row(cells: Sequence[object], tag: str) -> str:
        sides = ["left" if position < left else "right" for position in range(len(cells))]
        styled = (f'<{tag} style="{_CELL} {side}">{text(c)}</{tag}>' for c, side in zip(cells, sides, strict=True))
        return f"<tr>{''.join(styled)}</tr>"

    head = f"<thead>{row(columns, 'th')}</thead>" if any(columns) else ""
    return f'<table style="border: none">{head}<tbody>{"".join(row(cells, "td") for cells in rows)}</tbody></table>'


def text(value: object) -> str:
    """Return a value as escaped text; line breaks are kept."""
    return escape(str(value)).replace("\n", "<br>")


def block(title: str, *parts: str, note: str = "") -> str:
    """Return a titled block of HTML parts, with an optional note in small print."""
    small = f'<div style="{_SMALL}">{text(note)}</div>' if note else ""
    return f"<div><strong>{text(title)}</strong>{''.join(parts)}{small}</div>"


def svg(width: float, height: float, label: str, *parts: str) -> str:
    """Return an inline SVG image with a label for screen readers; its text has the color of the page."""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    style = "font: 11px sans-serif; fill: currentColor; display: block; max-width: 100%"
    return f'<svg {size} role="img" aria-label="{escape(label)}" style="{style}">{"".join(parts)}</svg>'


def svg_text(x: float, y: float, content: object, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(str(content))}</text>'


def svg_rectangle(x: float, y: float, width: float, height: float, opacity: float = 1.0, hint: str = "") -> str:
    """Return a blue rectangle; `hint` is shown when the pointer is over it."""
    area = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {area} fill="#0072b2" fill-opacity="{opacity:.2f}"><title>{escape(hint)}</title></rect>'
