"""Figures of the data split: the classes and the number of samples of each client."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fedtailor.analysis.comparability import label_clients
from fedtailor.analysis.formatting import count_of, evenly_spaced, make_unique, round_digits, shorten
from fedtailor.analysis.run_summary import Comparison, RunSummary
from fedtailor.data.federation import Federation
from fedtailor.reporting.figures.clients import first_of_each_split
from fedtailor.reporting.figures.figure import MAX_ROWS, Choice, Figure, Option, Table
from fedtailor.reporting.figures.similarity import class_counts

_MAX_CLIENTS = 600  # columns; with more clients, an evenly spaced subset is drawn
_MAX_SPLITS = 6
_MAX_LABELS = 40  # clients; with more, their names would overlap
# From transparent to blue, so that missing classes have the color of the page in both themes.
_COLOR_SCALE = [[0, "rgba(0,114,178,0)"], [0.0001, "rgba(0,114,178,0.14)"], [1, "rgba(0,114,178,1)"]]


@dataclass(frozen=True)
class _Split:
    """The names and sizes of all clients, and their training samples per class, if these are known."""

    title: str
    names: Sequence[str]
    train: Sequence[int]
    test: Sequence[int]
    counts: Sequence[Sequence[int]] | None


def split_figure(group: Comparison) -> Figure:
    """Draw classes by clients, one split at a time; without class counts, draw the clients' sizes."""
    shown = sorted(first_of_each_split(group), key=lambda run_summary: run_summary.seed)[:_MAX_SPLITS]
    return _draw([_split_of_run(run_summary) for run_summary in shown], _class_names(shown))


def _class_names(shown: Sequence[RunSummary]) -> list[str] | None:
    """Return the names of the classes if the runs recorded the same ones, one per class."""
    inputs = [run_summary.run.info.get("inputs") or {} for run_summary in shown]
    names = [[str(name) for name in found.get("class_names") or ()] for found in inputs]
    known = bool(shown) and all(
        own == names[0] and len(own) == f.get("classes") for own, f in zip(names, inputs, strict=True)
    )
    return names[0] if known else None


def federation_figure(fed: Federation) -> Figure:
    """Draw how the data of a federation are split into clients."""
    counts = [found for own in fed.train if (found := fed.class_counts(own)) is not None]
    train, test = ([len(own) for own in part] for part in (fed.train, fed.test))
    return _draw([_Split("", fed.names, train, test, counts or None)], fed.class_names)


def _split_of_run(run_summary: RunSummary) -> _Split:
    clients = run_summary.run.info["clients"]
    names = [str(client["name"]) for client in clients]
    train, test = ([client[part] for client in clients] for part in ("train", "test"))
    repeat = run_summary.run.experiment["data"].get("repeat")
    title = f"seed {run_summary.seed}" if repeat is None else f"split {repeat}"
    return _Split(title, names, train, test, class_counts(run_summary.run))


def _draw(splits: Sequence[_Split], class_names: Sequence[str] | None = None) -> Figure:
    known = [split.counts for split in splits if split.counts is not None]
    return _heat_map(splits, known, class_names) if len(known) == len(splits) else _size_figure(splits[0])


def split_sentence(group: Comparison) -> str:
    """Return how the data are split, in one sentence."""
    run = group.first
    data, clients = run.experiment["data"], run.info["clients"]
    how = f" by {data['partition']}" if data.get("partition") else ""
    how += f" (α = {data['alpha']})" if data.get("partition") == "dirichlet" and "alpha" in data else ""
    train, test = (sum(client[part] for client in clients) for part in ("train", "test"))
    splits = len(first_of_each_split(group))
    note = f"; the seeds use {splits} different splits" if splits > 1 else ""
    note = f"; each client's samples are split anew {splits} times" if group.is_repeated else note
    name = "data" if data.get("name", "own data") == "own data" else f"{data['name']} data"
    samples = f"{count_of(train, 'training sample')} and {count_of(test, 'test sample')} in total"
    return f"The {name} are split{how} into {count_of(len(clients), 'client')} with {samples}{note}."


def _heat_map(
    splits: Sequence[_Split], counts: Sequence[Sequence[Sequence[int]]], class_names: Sequence[str] | None
) -> Figure:
    views = [_ordered_columns(split, rows) for split, rows in zip(splits, counts, strict=True)]
    first, classes = views[0], len(counts[0][0])
    gap = 0 if len(first["x"]) > 60 else 1
    titles = make_unique([shorten(name) for name in class_names]) if class_names else [str(k) for k in range(classes)]
    data = [{
        "type": "heatmap", "x": first["x"], "y": titles, "z": first["z"],
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
        Option(split.title, {"x": [view["x"]], "z": [view["z"]], "text": [view["text"]]})
        for split, view in zip(splits, views, strict=True)
    ]
    choices = [Choice("split", options)] if len(options) > 1 else []
    columns = ["client", "training samples", *(f"class {title}" for title in titles)]
    rows = [[shorten(name), sum(row), *row] for name, row in zip(splits[0].names, counts[0], strict=True)][:MAX_ROWS]
    summary = _heat_map_summary(splits[0], counts[0])
    return Figure("split", "Classes per client", summary, data, layout, Table(columns, rows), (), choices)


def _ordered_columns(split: _Split, counts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Group clients by their most frequent class, the largest fraction of it first."""

    def sort_key(client: int) -> tuple[int, float]:
        row, total = counts[client], max(sum(counts[client]), 1)
        return row.index(max(row)), -max(row) / total

    ordered = evenly_spaced(sorted(range(len(counts)), key=sort_key), _MAX_CLIENTS)
    percents = [[100 * count / max(sum(counts[client]), 1) for count in counts[client]] for client in ordered]
    names = label_clients(split.names)
    return {
        "x": [names[client] for client in ordered],
        "z": [[round_digits(row[k], 3) for row in percents] for k in range(len(counts[0]))],
        "text": [[counts[client][k] for client in ordered] for k in range(len(counts[0]))],
    }


def _heat_map_summary(split: _Split, counts: Sequence[Sequence[int]]) -> str:
    held = median(sum(count > 0 for count in row) for row in counts)
    top = median(max(row) / max(sum(row), 1) for row in counts)
    note = f"; {_MAX_CLIENTS} of {len(counts)} clients are drawn" if len(counts) > _MAX_CLIENTS else ""
    return (
        f"The median client has {held:g} of {len(counts[0])} classes, and {100 * top:.0f} % of its samples belong to "
        f"one class; clients have between {min(split.train):,} and {max(split.train):,} training samples{note}."
    )


def _size_figure(split: _Split) -> Figure:
    order = sorted(range(len(split.train)), key=lambda client: -split.train[client])
    sizes = [split.train[client] for client in order]
    names = [shorten(split.names[client]) for client in order]
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
    rows = [[name, split.train[client], split.test[client]] for name, client in zip(names, order, strict=True)]
    table = Table(["client", "training samples", "test samples"], rows[:MAX_ROWS])
    return Figure("split", "Training samples per client", summary, data, layout, table)
