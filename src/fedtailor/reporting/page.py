"""Render sections with answers, figures, and tables as one self-contained HTML file."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.resources import files
from math import isfinite
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedtailor.reporting.figures.figure import Figure, Table
from fedtailor.runs.records import nan_to_none
from fedtailor.version import VERSION

GENERATOR_TAG = '<meta name="generator" content="FedTailor'  # identifies a file as a report


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
    scripts = [plotly_script(), read_static("figures.js") + read_static("page.js")]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_script_hash, scripts))}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    chapters = [(chapter, f"{n}-" if len(page.chapters) > 1 else "") for n, chapter in enumerate(page.chapters, 1)]
    return TEMPLATES.get_template("report.html").render(
        page=page, chapters=chapters, policy=policy, style=read_static("page.css"), scripts=scripts, version=VERSION
    )  # fmt: skip


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


def _element_id(key: str) -> str:
    """Return a key as a valid element id."""
    return "".join(char if char.isalnum() or char in "-_." else "-" for char in key)


def _drawing(figure: Figure) -> Any:
    choices = [{"options": [{"traces": o.traces, "layout": o.layout} for o in c.options]} for c in figure.choices]
    return nan_to_none({"data": figure.data, "layout": figure.layout, "frames": figure.frames, "choices": choices})


def _numeric_columns(table: Table) -> list[bool]:
    """Return which columns contain only numbers, which are right-aligned."""
    return [
        bool(table.rows) and all(_is_number(row[k]) for row in table.rows if k < len(row))
        for k in range(len(table.columns))
    ]


def _cell_text(value: Any) -> str:
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    """Return whether a cell is right-aligned with the other numbers of its column."""
    text = str(value).strip(" %").replace("−", "-").replace(",", "")
    if text not in ("", "–", "never", "None"):
        try:
            float(text)
        except ValueError:
            return False
    return True


def _make_templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("fedtailor.reporting"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    templates.filters |= {
        "cell": _cell_text, "drawing": _drawing, "element_id": _element_id, "numeric": _numeric_columns,
    }  # fmt: skip
    return templates


TEMPLATES = _make_templates()
