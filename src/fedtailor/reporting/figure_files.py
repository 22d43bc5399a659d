"""Write the figures of the report as image files for papers and slides.

Kaleido draws them with plotly.js in an installed Chromium or Chrome, so that they look as in the report.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedtailor.analysis.formatting import make_unique
from fedtailor.errors import ConfigError, RunError, reason, unknown_name
from fedtailor.reporting.figures.figure import Figure
from fedtailor.reporting.page import Page
from fedtailor.reporting.plotting import WIDTH, to_plotly
from fedtailor.reporting.report import build_page
from fedtailor.runs.files import safe_file_name, write_atomic, write_errors
from fedtailor.runs.run import Run
from fedtailor.version import VERSION

FORMATS = ("svg", "pdf", "png")
_PNG_SCALE = 2  # pixels per pixel of the layout; the other formats are vector graphics
_CAPTIONS = "captions.md"  # lists the files that may be replaced
_HEADING = "# Figures by FedTailor"
_BROWSER_HINT = "install one ('apt-get install chromium', for example), or set BROWSER_PATH to its program"


def write_figures(runs: Sequence[Run], folder: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write all figures of the report on these runs to a folder, and return the files.

    The formats are svg, pdf, and png. A file is named after its figure, as in `Run.plot`, such as curves.svg; if the
    runs belong to several experiments, the name starts with the number of the chapter. `captions.md` contains the title
    and the summary of each figure. Files of an earlier call are replaced; any other existing file is kept and raises
    `RunError`.

    >>> write_figures([], "figures", ["gif"])
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: There is no image format 'gif'; there are svg, pdf, png.
    """
    check_formats(formats)
    return save_figures(build_page(runs), Path(folder), formats)


def check_formats(formats: Sequence[str]) -> None:
    """Raise an error for a format that does not exist."""
    for name in formats:
        if name not in FORMATS:
            raise unknown_name("image format", name, FORMATS)
    if not formats:
        raise ConfigError(f"No image format was given; there are {', '.join(FORMATS)}.")


def save_figures(page: Page, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write all figures of a report to a folder, and return the files."""
    figures = _named_figures(page)
    if not figures:
        raise RunError("These runs have no figures.")
    paths = {(name, form): folder / f"{name}.{form}" for name in figures for form in dict.fromkeys(formats)}
    with write_errors(f"The folder '{folder}' cannot be used"):
        captions = _read_captions(folder)
        if foreign := [path for path in paths.values() if path.exists() and path.stem not in captions]:
            raise _foreign_file(foreign[0])
    images = _render({name: to_plotly(figure) for name, figure in figures.items()}, list(paths))
    captions |= {name: " ".join(f"{figure.title}. {figure.summary}".split()) for name, figure in figures.items()}
    sections = [f"## {name}\n\n{text}\n" for name, text in captions.items()]
    with write_errors(f"The figures cannot be written to '{folder}'"):
        folder.mkdir(parents=True, exist_ok=True)
        # The captions come first, so that a call that failed can be repeated.
        write_atomic(folder / _CAPTIONS, "\n".join([f"{_HEADING} {VERSION}\n", *sections]).encode())
        for (name, form), path in paths.items():
            image = images[name, form]
            write_atomic(path, _with_fixed_ids(image, name) if form == "svg" else image)
    return list(paths.values())


def _with_fixed_ids(image: bytes, name: str) -> bytes:
    """Replace the random numbers in the ids of an SVG file, so that the same figure always gives the same file.

    >>> _with_fixed_ids(b'<g class="trace1a2b3c" clip-path="url(#clip4d5e6fx)" fill="#1a2b3c"/>', "curves")
    b'<g class="trace191f5c" clip-path="url(#clipccc7afx)" fill="#1a2b3c"/>'
    """
    fixed: dict[bytes, bytes] = {}

    def replace(found: re.Match[bytes]) -> bytes:
        new = sha256(f"{name} {len(fixed)}".encode()).hexdigest()[:6].encode()
        return found[1] + fixed.setdefault(found[2], new)

    return re.sub(rb"(defs-|clip|legend|trace)([0-9a-f]{6})", replace, image)


def _read_captions(folder: Path) -> dict[str, str]:
    """Return the captions of the figures that earlier calls wrote to a folder; only these may be replaced."""
    if not (path := folder / _CAPTIONS).exists():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.startswith(_HEADING):
        raise _foreign_file(path)
    return dict(re.findall(r"^## (.+)\n\n(.+)$", text, re.MULTILINE))


def _foreign_file(path: Path) -> RunError:
    return RunError(f"'{path}' exists and was not written by FedTailor. Choose another folder.")


def _named_figures(page: Page) -> dict[str, Figure]:
    """Return all figures by the names of their files."""
    several = len(page.chapters) > 1
    named = [
        (safe_file_name(f"{number}-{figure.key}" if several else figure.key), figure)
        for number, chapter in enumerate(page.chapters, 1)
        for section in chapter.sections
        for figure in section.figures
    ]
    return dict(zip(make_unique([name for name, _ in named]), [figure for _, figure in named], strict=True))


def _render(figures: Mapping[str, Any], wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], bytes]:
    """Return the images, all drawn by one browser."""
    with ThreadPoolExecutor(1) as thread:  # a notebook already runs an event loop in the main thread
        return thread.submit(asyncio.run, _draw(figures, wanted)).result()


async def _draw(figures: Mapping[str, Any], wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], bytes]:
    try:
        from kaleido import Kaleido
        from kaleido.errors import ChromeNotFoundError
    except ImportError as error:
        raise ConfigError("Image files need kaleido: pip install 'fedtailor[figures]'.") from error
    try:
        async with Kaleido(mathjax=False) as browser:  # MathJax would be loaded from the network
            return {
                (name, form): await browser.calc_fig(
                    figures[name],
                    {"format": form, "width": WIDTH, "height": figures[name].layout.height,
                     "scale": _PNG_SCALE if form == "png" else 1},
                )
                for name, form in wanted
            }  # fmt: skip
    except ChromeNotFoundError as error:
        raise ConfigError(f"No Chromium or Chrome was found, which draws image files; {_BROWSER_HINT}.") from error
    except Exception as error:  # the browser can fail in many ways
        raise ConfigError(
            f"The browser that draws image files failed: {reason(error, True)}; {_BROWSER_HINT}."
        ) from error
