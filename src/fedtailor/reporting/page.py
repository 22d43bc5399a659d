"""Render sections with answers, figures, and tables as one self-contained HTML file."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from importlib.resources import files
from math import isfinite
from typing import Any

from fedtailor.reporting.figures.figure import Choice, Figure, Table
from fedtailor.version import VERSION

GENERATOR_TAG = '<meta name="generator" content="FedTailor'  # identifies a file as a report
_MAX_BUTTONS = 4  # per choice; more options become a drop-down list


@dataclass(frozen=True)
class Section:
    """A question, its answer in sentences, and optional figures, tables, and commands."""

    key: str
    title: str
    answer: Sequence[str]
    figures: Sequence[Figure] = ()
    tables: Sequence[tuple[str, Table]] = ()
    commands: Sequence[str] = ()
    is_reference: bool = False  # without an answer: the first sentence is not set in large type


@dataclass(frozen=True)
class Chapter:
    """The sections on one experiment; the title is empty if there is only one chapter."""

    title: str
    sections: Sequence[Section]


@dataclass(frozen=True)
class Page:
    """The content of the whole page."""

    title: str
    subtitle: str
    chapters: Sequence[Chapter]
    notes: Sequence[str] = field(default_factory=tuple)  # warnings below the subtitle


def render_page(page: Page) -> str:
    """Return the page as an HTML document."""
    plotly, script, style = plotly_script(), read_static("figures.js") + read_static("page.js"), read_static("page.css")
    policy = (
        f"default-src 'none'; script-src {_script_hash(plotly)} {_script_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    main = "\n".join(_chapter(chapter, number, page) for number, chapter in enumerate(page.chapters))
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in page.notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
{GENERATOR_TAG} {escape(VERSION)}">
<meta name="color-scheme" content="light dark">
<title>{escape(page.title)}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to content</a>
<header>
<button type="button" id="theme">Dark</button>
<h1>{escape(page.title)}</h1>
<p class="about">{escape(page.subtitle)}</p>
{notes}
</header>
<nav aria-label="Contents">
{_contents(page)}
</nav>
<main id="main" tabindex="-1">
{main}
</main>
<footer><p>Created by FedTailor {escape(VERSION)}. This file makes no network requests.</p></footer>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def read_static(name: str) -> str:
    """Return the text of a file in `static/`."""
    return (files("fedtailor.reporting") / "static" / name).read_text(encoding="utf-8").replace("\r\n", "\n")


def plotly_script() -> str:
    """Return the plotly.js that is part of the plotly package."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    return str(get_plotlyjs()).replace("\r\n", "\n").replace("</script", "<\\/script")


def _script_hash(script: str) -> str:
    """Return the hash with which the Content-Security-Policy allows a script."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _element_id(number: int, key: str, page: Page) -> str:
    """Return a valid element id for a key, unique among chapters."""
    word = "".join(char if char.isalnum() or char in "-_." else "-" for char in key)
    return f"{number + 1}-{word}" if len(page.chapters) > 1 else word


def _contents(page: Page) -> str:
    parts = []
    for number, chapter in enumerate(page.chapters):
        links = "".join(
            f'<li><a href="#{_element_id(number, section.key, page)}">{escape(section.title)}</a></li>'
            for section in chapter.sections
        )
        heading = f"<p>{escape(chapter.title)}</p>" if chapter.title else ""
        parts.append(f"{heading}<ol>{links}</ol>" if links else "")
    return "\n".join(parts)


def _chapter(chapter: Chapter, number: int, page: Page) -> str:
    heading = f'<h2 class="chapter">{escape(chapter.title)}</h2>\n' if chapter.title else ""
    return heading + "\n".join(_section(section, number, page) for section in chapter.sections)


def _section(section: Section, number: int, page: Page) -> str:
    name = _element_id(number, section.key, page)
    answer = "\n".join(
        f'<p class="{"answer" if k == 0 and not section.is_reference else "more"}">{escape(text)}</p>'
        for k, text in enumerate(section.answer)
    )
    parts = [
        f'<section id="{name}" aria-labelledby="{name}-title">',
        f'<h2 id="{name}-title">{escape(section.title)}</h2>',
    ]
    parts += [answer, *(_figure(figure, _element_id(number, figure.key, page)) for figure in section.figures)]
    parts += [_commands(section.commands)] if section.commands else []
    parts += [f"<h3>{escape(title)}</h3>\n{_table(table, title)}" for title, table in section.tables]
    return "\n".join([*parts, "</section>"])


def _commands(commands: Sequence[str]) -> str:
    """Return commands with a button that copies all of them; lines break only between words."""
    lines = (" ".join(f"<span>{escape(word)}</span>" for word in command.split(" ")) for command in commands)
    return (
        '<div class="command"><pre tabindex="0" role="region" aria-label="Commands">'
        f"<code>{chr(10).join(lines)}</code></pre>"
        '<button type="button" class="copy">Copy</button></div>'
    )


def _figure(figure: Figure, name: str) -> str:
    content = {
        "data": figure.data,
        "layout": figure.layout,
        "frames": figure.frames,
        "choices": [{"options": [{"traces": o.traces, "layout": o.layout} for o in c.options]} for c in figure.choices],
    }
    height = int(figure.layout.get("height", 420))
    controls = "".join(_choice(choice, f"{name}-{k}") for k, choice in enumerate(figure.choices))
    controls += _slider(figure, name)
    return f"""<figure data-figure="{escape(figure.key)}" id="figure-{name}" aria-labelledby="figure-{name}-title">
<figcaption><h3 id="figure-{name}-title">{escape(figure.title)}</h3>
<p>{escape(figure.summary)}</p></figcaption>
{f'<div class="controls">{controls}</div>' if controls else ""}
<div class="plot" role="img" aria-label="{escape(f"{figure.title}: {figure.summary}")}" style="height:{height}px"></div>
<details><summary>Table<span class="hidden"> of {escape(figure.title)}</span></summary>
{_table(figure.table, figure.title)}
</details>
<script type="application/json">{to_json(content)}</script>
</figure>"""


def _choice(choice: Choice, name: str) -> str:
    """Return a few options as radio buttons, or many as a drop-down list."""
    if len(choice.options) > _MAX_BUTTONS:
        options = "".join(f'<option value="{k}">{escape(o.name)}</option>' for k, o in enumerate(choice.options))
        return (
            f'<label class="choice">{escape(choice.label)} <select data-choice="{name[-1]}">{options}</select></label>'
        )
    buttons = "".join(
        f'<label><input type="radio" name="{name}" value="{k}" data-choice="{name[-1]}"{" checked" if k == 0 else ""}>'
        f"<span>{escape(option.name)}</span></label>"
        for k, option in enumerate(choice.options)
    )
    return f'<fieldset class="choice"><legend>{escape(choice.label)}</legend>{buttons}</fieldset>'


def _slider(figure: Figure, name: str) -> str:
    """Return an accessible slider over the frames of a figure, which is initially drawn with its last frame."""
    if len(figure.frames) < 2:
        return ""
    names, last = [str(frame.get("name", "")) for frame in figure.frames], len(figure.frames) - 1
    slider_id = f"figure-{name}-frame"
    return (
        f'<div class="choice slider"><label for="{slider_id}">round</label><input type="range" id="{slider_id}" '
        f'min="0" max="{last}" value="{last}" step="1" data-frames="{escape(json.dumps(names))}" '
        f'aria-valuetext="round {escape(names[-1])}" autocomplete="off">'
        f'<output for="{slider_id}">{escape(names[-1])}</output></div>'
    )


def _table(table: Table, title: str) -> str:
    numeric = [all(_is_number(row[k]) for row in table.rows if k < len(row)) for k in range(len(table.columns))]
    classes = [' class="number"' if right and table.rows else "" for right in numeric]
    header = "".join(
        f'<th scope="col"{css}>{escape(str(column))}</th>' for column, css in zip(table.columns, classes, strict=True)
    )
    rows = "\n".join("<tr>" + "".join(_cells(row, classes)) + "</tr>" for row in table.rows)
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="Table: {escape(title)}">'
        f"<table><thead><tr>{header}</tr></thead><tbody>\n{rows}\n</tbody></table></div>"
    )


def _cells(row: Sequence[Any], classes: Sequence[str]) -> list[str]:
    texts = [_cell_text(value) for value in row]
    first = f'<th scope="row">{escape(texts[0])}</th>' if texts else ""
    return [first, *(f"<td{css}>{escape(text)}</td>" for text, css in zip(texts[1:], classes[1:], strict=False))]


def _cell_text(value: Any) -> str:
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    """Return whether a cell is right-aligned with the other numbers of its column."""
    if value is None or isinstance(value, (int, float)):
        return True
    text = str(value).strip(" %").replace("−", "-").replace(",", "")
    if text in ("", "–", "never"):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


def to_json(value: Any) -> str:
    """Return JSON that is safe inside a script element, with null for values that are not finite.

    >>> to_json({"name": "</script>", "score": float("nan")})
    '{"name":"\\\\u003c/script>","score":null}'
    """
    return json.dumps(_to_plain(value), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(part) for part in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float, bool)) else _to_plain(_from_numpy(value))


def _from_numpy(value: Any) -> Any:
    """Return numpy arrays and scalars as Python values, and anything else as a string."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
