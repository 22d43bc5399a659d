"""A federation as HTML: sizes, and the classes of each client."""

from collections.abc import Iterator, Sequence
from statistics import median

from fedtailor.analysis.formatting import count_of, evenly_spaced, shorten
from fedtailor.data.federation import Federation
from fedtailor.reporting.notebook.markup import block, html_table, svg, svg_rectangle, svg_text

_MAX_CLIENTS = 40
_MAX_CELLS = 2000  # of the histogram, so that a notebook stays small
_MIN_CLIENTS = 5  # of the histogram; with more classes than that allows, only the sizes are shown
_MAX_NAME = 18  # characters of a client's name
_ROW, _SIZE_WIDTH = 15, 120  # pixels


def federation_html(fed: Federation) -> str:
    """Return the sizes of a federation, and the training samples of each client by class."""
    rows = [
        [f"{kind} samples", *(_number(value) for value in (sum(sizes), min(sizes), median(sizes), max(sizes)))]
        for kind, sizes in {"training": [*map(len, fed.train)], "test": [*map(len, fed.test)]}.items()
    ]
    table = html_table(["", "total", "smallest client", "median", "largest client"], rows)
    classes = fed.classes if fed.classes and _MAX_CELLS // fed.classes >= _MIN_CLIENTS else 0
    shown = evenly_spaced(range(fed.num_clients), min(_MAX_CLIENTS, _MAX_CELLS // max(classes, 1)))
    notes = ["Bars: training samples of each client."]
    if classes:
        notes.insert(0, "Columns: classes; a stronger color means a larger fraction of the client's training samples.")
    if len(shown) < fed.num_clients:
        notes.append(f"{len(shown)} of {fed.num_clients:,} clients are shown.")
    return block(repr(fed), table, _figure(fed, shown, classes), note=" ".join(notes))


def _figure(fed: Federation, shown: Sequence[int], classes: int) -> str:
    """Draw one row per client: its name, its classes, and its number of training samples."""
    names = [_short(fed.names[client]) for client in shown]
    left, cell = 10 + 6.5 * max(map(len, names)), max(4.0, min(18.0, 400 / max(classes, 1)))
    bars, largest = left + cell * classes + (10 if classes else 0), max(map(len, fed.train))
    parts = [svg_text(left + cell * (label + 0.5), 11, label, "middle") for label in range(classes) if cell > 12]
    top = _ROW if parts else 0
    for row, (client, name) in enumerate(zip(shown, names, strict=True)):
        y, size = top + row * _ROW, len(fed.train[client])
        width = _SIZE_WIDTH * size / largest
        hint = f"{name}: {count_of(size, 'training sample')}"
        parts += [
            svg_text(left - 6, y + 11, name, "end"),
            *(_cells(fed, client, name, left, y, cell) if classes else ()),
        ]
        parts += [
            svg_rectangle(bars, y + 3, width, _ROW - 6, 0.6, hint),
            svg_text(bars + width + 4, y + 11, f"{size:,}"),
        ]
    return svg(bars + _SIZE_WIDTH + 60, top + _ROW * len(shown), "Training samples of each client", *parts)


def _cells(fed: Federation, client: int, name: str, left: float, y: float, cell: float) -> Iterator[str]:
    """Draw the classes of a client that it has samples of."""
    counts = fed.class_counts(fed.train[client]) or []
    for label, count in enumerate(counts):
        if count:
            title = label if fed.class_names is None else shorten(fed.class_names[label])
            hint = f"{name}: {count_of(count, 'training sample')} of class {title}"
            yield svg_rectangle(left + cell * label, y + 1, cell - 1, _ROW - 2, 0.15 + 0.85 * count / sum(counts), hint)


def _short(name: str) -> str:
    name = shorten(name)
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"


def _number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")
