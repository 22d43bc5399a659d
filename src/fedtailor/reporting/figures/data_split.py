"""Figures of the data split: the classes and the number of samples of each client."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from fedtailor.analysis.comparability import client_labels
from fedtailor.analysis.formatting import count_of, evenly_spaced, round_digits, shorten
from fedtailor.analysis.run_summary import Comparison, RunSummary
from fedtailor.reporting.figures.clients import first_of_each_split
from fedtailor.reporting.figures.figure import MAX_ROWS, Choice, Figure, Option, Table
from fedtailor.reporting.figures.similarity import class_counts

_MAX_CLIENTS = 600  # columns; with more clients, an evenly spaced subset is drawn
_MAX_SPLITS = 6
_MAX_LABELS = 40  # clients; with more, their names would overlap
# From transparent to blue, so that missing classes have the color of the page in both themes.
_COLOR_SCALE = [[0, "rgba(0,114,178,0)"], [0.0001, "rgba(0,114,178,0.14)"], [1, "rgba(0,114,178,1)"]]


def split_figure(group: Comparison) -> Figure | None:
    """Draw classes by clients, one split at a time; without class counts, draw the clients' sizes."""
    shown = sorted(first_of_each_split(group), key=lambda run_summary: run_summary.seed)[:_MAX_SPLITS]
    counts = [class_counts(run_summary.run) for run_summary in shown]
    known = [rows for rows in counts if rows is not None]
    return _heat_map(shown, known) if len(known) == len(shown) else _size_figure(shown[0])


def split_sentence(group: Comparison) -> str:
    """Return how the data are split, in one sentence."""
    run = group.first
    data, clients = run.experiment["data"], run.info["clients"]
    how = f" by {data['partition']}" if data.get("partition") else ""
    how += f" (α = {data['alpha']})" if data.get("partition") == "dirichlet" and "alpha" in data else ""
    train, test = (sum(client[part] for client in clients) for part in ("train", "test"))
    splits = len(first_of_each_split(group))
    note = f"; the seeds use {splits} different splits" if splits > 1 else ""
    name = f"{data['name']} data" if "name" in data else "data"
    samples = f"{count_of(train, 'training sample')} and {count_of(test, 'test sample')} in total"
    return f"The {name} are split{how} into {count_of(len(clients), 'client')} with {samples}{note}."


def _heat_map(shown: Sequence[RunSummary], counts: Sequence[list[list[int]]]) -> Figure:
    views = [_ordered_columns(run_summary, rows) for run_summary, rows in zip(shown, counts, strict=True)]
    first, classes = views[0], len(counts[0][0])
    gap = 0 if len(first["x"]) > 60 else 1
    data = [{
        "type": "heatmap", "x": first["x"], "y": [str(k) for k in range(classes)], "z": first["z"],
        "text": first["text"], "zmin": 0, "zmax": 100, "colorscale": _COLOR_SCALE, "xgap": gap, "ygap": gap,
        "hovertemplate": "%{x}: %{text} samples of class %{y} (%{z:.0f} %)<extra></extra>",
        "colorbar": {"title": {"text": "% of samples", "side": "right"}, "thickness": 10, "outlinewidth": 0},
    }]  # fmt: skip
    layout = {
        "height": 150 + min(24 * classes, 420),
        "xaxis": {"type": "category", "showgrid": False, "automargin": True,
                  "title": {"text": "clients, grouped by their most frequent class", "standoff": 10},
                  "showticklabels": len(first["x"]) <= _MAX_LABELS, "ticks": ""},
        "yaxis": {"type": "category", "title": {"text": "class"}, "showgrid": False, "autorange": "reversed"},
    }  # fmt: skip
    options = [
        Option(f"seed {run_summary.seed}", {"x": [view["x"]], "z": [view["z"]], "text": [view["text"]]})
        for run_summary, view in zip(shown, views, strict=True)
    ]
    choices = [Choice("split", options)] if len(options) > 1 else []
    columns = ["client", "training samples", *(f"class {k}" for k in range(classes))]
    rows = [[shown[0].name(i), sum(row), *row] for i, row in enumerate(counts[0])][:MAX_ROWS]
    summary = _heat_map_summary(shown[0], counts[0])
    return Figure("split", "Classes per client", summary, data, layout, Table(columns, rows), (), choices)


def _ordered_columns(run_summary: RunSummary, counts: list[list[int]]) -> dict[str, Any]:
    """Group clients by their most frequent class, the largest fraction of it first."""

    def sort_key(client: int) -> tuple[int, float]:
        row, total = counts[client], max(sum(counts[client]), 1)
        return row.index(max(row)), -max(row) / total

    ordered = evenly_spaced(sorted(range(len(counts)), key=sort_key), _MAX_CLIENTS)
    percents = [[100 * count / max(sum(counts[client]), 1) for count in counts[client]] for client in ordered]
    names = client_labels(run_summary.run)
    return {
        "x": [names[client] for client in ordered],
        "z": [[round_digits(row[k], 3) for row in percents] for k in range(len(counts[0]))],
        "text": [[counts[client][k] for client in ordered] for k in range(len(counts[0]))],
    }


def _heat_map_summary(run_summary: RunSummary, counts: list[list[int]]) -> str:
    sizes = [client["train"] for client in run_summary.run.info["clients"]]
    held = median(sum(count > 0 for count in row) for row in counts)
    top = median(max(row) / max(sum(row), 1) for row in counts)
    note = f"; {_MAX_CLIENTS} of {len(counts)} clients are drawn" if len(counts) > _MAX_CLIENTS else ""
    return (
        f"The median client has {held:g} of {len(counts[0])} classes, and {100 * top:.0f} % of its samples belong to "
        f"one class; clients have between {min(sizes):,} and {max(sizes):,} training samples{note}."
    )


def _size_figure(run_summary: RunSummary) -> Figure | None:
    clients = sorted(run_summary.run.info["clients"], key=lambda client: -client["train"])
    sizes = [client["train"] for client in clients]
    names = [shorten(str(client["name"])) for client in clients]
    data = [{
        "type": "bar", "x": list(range(1, len(sizes) + 1)), "y": sizes, "text": names, "textposition": "none",
        "marker": {"color": "#0072b2"}, "hovertemplate": "%{text}: %{y} samples<extra></extra>", "showlegend": False,
    }]  # fmt: skip
    layout = {
        "height": 320, "bargap": 0.2, "xaxis": {"title": {"text": "clients, largest first"}},
        "yaxis": {"title": {"text": "training samples"}},
    }  # fmt: skip
    half = next((k + 1 for k in range(len(sizes)) if 2 * sum(sizes[: k + 1]) >= sum(sizes)), len(sizes))
    largest = "the largest client has" if half == 1 else f"the {half} largest of {len(sizes)} clients have"
    sizes_text = f"between {min(sizes):,} and {max(sizes):,} training samples"
    summary = f"Clients have {sizes_text}; {largest} at least half of all samples."
    rows = [[name, client["train"], client["test"]] for name, client in zip(names, clients, strict=True)]
    table = Table(["client", "training samples", "test samples"], rows[:MAX_ROWS])
    return Figure("split", "Training samples per client", summary, data, layout, table)
