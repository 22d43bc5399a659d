"""The page: sections with answers and figures as one HTML file that needs no network."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from importlib.resources import files
from math import isfinite
from typing import Any

from fedtailor.errors import Refused
from fedtailor.see.figure import Choice, Figure, Table
from fedtailor.version import VERSION

MARK = '<meta name="generator" content="FedTailor'  # by which a report is known again
_MOST_BUTTONS = 4  # of a choice; more are a list


@dataclass(frozen=True)
class Section:
    """A question, its answer in words, then figures; tables and commands where there are any."""

    key: str
    title: str
    answer: Sequence[str]
    figures: Sequence[Figure] = ()
    tables: Sequence[tuple[str, Table]] = ()
    commands: Sequence[str] = ()
    quiet: bool = False  # its words are no answer, so they are not set large


@dataclass(frozen=True)
class Chapter:
    """Sections on one experiment; the title is empty where there is but one."""

    title: str
    sections: Sequence[Section]


@dataclass(frozen=True)
class Page:
    """All there is to show."""

    title: str
    about: str  # below the title
    chapters: Sequence[Chapter]
    notes: Sequence[str] = field(default_factory=tuple)  # what a reader must know before


def html(page: Page) -> str:
    """The whole file."""
    plotly, script, style = plotly_script(), static("figures.js") + static("page.js"), static("page.css")
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; style-src 'unsafe-inline'; "
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
{MARK} {escape(VERSION)}">
<meta name="color-scheme" content="light dark">
<title>{escape(page.title)}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the answers</a>
<header>
<button type="button" id="theme">Dark</button>
<h1>{escape(page.title)}</h1>
<p class="about">{escape(page.about)}</p>
{notes}
</header>
<nav aria-label="Contents">
{_contents(page)}
</nav>
<main id="main" tabindex="-1">
{main}
</main>
<footer><p>Made by FedTailor {escape(VERSION)}. This file asks no network for anything.</p></footer>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def static(name: str) -> str:
    """One of our own files for pages."""
    return (files("fedtailor.see") / "static" / name).read_text(encoding="utf-8").replace("\r\n", "\n")


def plotly_script() -> str:
    """Plotly's own script, as its package brings it."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise Refused("Figures need plotly: pip install 'fedtailor[see]'.") from error
    return str(get_plotlyjs()).replace("\r\n", "\n").replace("</script", "<\\/script")


def _hash(script: str) -> str:
    """By which a browser knows the scripts that may run: these and no others."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _name(number: int, key: str, page: Page) -> str:
    """A key that is one word, and unique among chapters."""
    word = "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in key)
    return f"{number + 1}-{word}" if len(page.chapters) > 1 else word


def _contents(page: Page) -> str:
    parts = []
    for number, chapter in enumerate(page.chapters):
        links = "".join(
            f'<li><a href="#{_name(number, section.key, page)}">{escape(section.title)}</a></li>'
            for section in chapter.sections
        )
        heading = f"<p>{escape(chapter.title)}</p>" if chapter.title else ""
        parts.append(f"{heading}<ol>{links}</ol>" if links else "")
    return "\n".join(parts)


def _chapter(chapter: Chapter, number: int, page: Page) -> str:
    heading = f'<h2 class="chapter">{escape(chapter.title)}</h2>\n' if chapter.title else ""
    return heading + "\n".join(_section(section, number, page) for section in chapter.sections)


def _section(section: Section, number: int, page: Page) -> str:
    name = _name(number, section.key, page)
    answer = "\n".join(
        f'<p class="{"answer" if place == 0 and not section.quiet else "more"}">{escape(text)}</p>'
        for place, text in enumerate(section.answer)
    )
    parts = [
        f'<section id="{name}" aria-labelledby="{name}-title">',
        f'<h2 id="{name}-title">{escape(section.title)}</h2>',
    ]
    parts += [answer, *(_figure(figure, _name(number, figure.key, page)) for figure in section.figures)]
    parts += [_commands(section.commands)] if section.commands else []
    parts += [f"<h3>{escape(title)}</h3>\n{_table(table, title)}" for title, table in section.tables]
    return "\n".join([*parts, "</section>"])


def _commands(commands: Sequence[str]) -> str:
    """Commands below each other, to be copied at once; lines break between words alone."""
    lines = (" ".join(f"<span>{escape(word)}</span>" for word in command.split(" ")) for command in commands)
    return (
        '<div class="command"><pre tabindex="0" role="region" aria-label="Commands">'
        f"<code>{chr(10).join(lines)}</code></pre>"
        '<button type="button" class="copy">Copy</button></div>'
    )


def _figure(figure: Figure, name: str) -> str:
    shown = {
        "data": figure.data,
        "layout": figure.layout,
        "frames": figure.frames,
        "choices": [{"options": [{"traces": o.traces, "layout": o.layout} for o in c.options]} for c in figure.choices],
    }
    height = int(figure.layout.get("height", 420))
    controls = "".join(_choice(choice, f"{name}-{place}") for place, choice in enumerate(figure.choices))
    controls += _slider(figure, name)
    return f"""<figure data-figure="{escape(figure.key)}" id="figure-{name}" aria-labelledby="figure-{name}-title">
<figcaption><h3 id="figure-{name}-title">{escape(figure.title)}</h3>
<p>{escape(figure.says)}</p></figcaption>
{f'<div class="controls">{controls}</div>' if controls else ""}
<div class="plot" role="img" aria-label="{escape(figure.title)}: {escape(figure.says)}" style="height:{height}px"></div>
<details><summary>Numbers<span class="hidden"> of {escape(figure.title)}</span></summary>
{_table(figure.table, figure.title)}
</details>
<script type="application/json">{to_json(shown)}</script>
</figure>"""


def _choice(choice: Choice, name: str) -> str:
    """A few options as buttons of which one is chosen, many as a list."""
    if len(choice.options) > _MOST_BUTTONS:
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
    """For figures that move: one that keys and screen readers understand. The figure is drawn as its last frame."""
    if len(figure.frames) < 2:
        return ""
    names, last = [str(frame.get("name", "")) for frame in figure.frames], len(figure.frames) - 1
    own = f"figure-{name}-frame"
    return (
        f'<div class="choice slider"><label for="{own}">round</label><input type="range" id="{own}" min="0" '
        f'max="{last}" value="{last}" step="1" data-frames="{escape(json.dumps(names))}" '
        f'aria-valuetext="round {escape(names[-1])}" autocomplete="off">'
        f'<output for="{own}">{escape(names[-1])}</output></div>'
    )


def _table(table: Table, title: str) -> str:
    numeric = [all(_is_number(row[k]) for row in table.rows if k < len(row)) for k in range(len(table.heads))]
    kinds = [' class="number"' if some and table.rows else "" for some in numeric]
    heads = "".join(f'<th scope="col"{kind}>{escape(str(h))}</th>' for h, kind in zip(table.heads, kinds, strict=True))
    rows = "\n".join("<tr>" + "".join(_cells(row, kinds)) + "</tr>" for row in table.rows)
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="Numbers: {escape(title)}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table></div>"
    )


def _cells(row: Sequence[Any], kinds: Sequence[str]) -> list[str]:
    texts = [_text(value) for value in row]
    first = f'<th scope="row">{escape(texts[0])}</th>' if texts else ""
    return [first, *(f"<td{kind}>{escape(text)}</td>" for text, kind in zip(texts[1:], kinds[1:], strict=False))]


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    """Whether a cell lines up with others by its digits."""
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
    """For a script element: no sign that could end it, and null for what is no number.

    >>> to_json({"name": "</script>", "score": float("nan")})
    '{"name":"\\\\u003c/script>","score":null}'
    """
    return json.dumps(_plain(value), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float, bool)) else _plain(_unwrapped(value))


def _unwrapped(value: Any) -> Any:
    """Arrays and numbers of numpy as Python's."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
