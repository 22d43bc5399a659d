"""Figures of the weights with which a method mixes the clients' models."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from fedtailor.analysis.comparability import client_labels, first_seed_runs
from fedtailor.analysis.formatting import evenly_spaced, format_p, percent
from fedtailor.analysis.statistics import SIGNIFICANCE_LEVEL, rank_correlation
from fedtailor.reporting.figures.figure import Figure, Table
from fedtailor.runs.run import Run

Matrix = np.ndarray[Any, np.dtype[np.float64]]
_METRIC = "weights"  # the method metric with one weight per pair of clients
_MAX_CELLS = 300_000  # per figure, over all rounds of the slider
_MAX_CLIENTS = 120  # rows; with more clients, similar clients are averaged
_TABLE_PAIRS = 20


def mixing_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return one figure for the first seed of each method that mixes the clients' models."""
    return [_figure(run, weights) for run in first_seed_runs(runs) if (weights := mixing_weights(run))]


def mixing_weights(run: Run) -> dict[int, Matrix]:
    """Return round -> [i, j], the fraction of client i's model that comes from client j; {} if there are none."""
    if not any(_METRIC in record["method_metrics"] for record in run.records):
        return {}
    try:
        found = {number: np.asarray(value, dtype=np.float64) for number, value in run.metric(_METRIC).items()}
    except (TypeError, ValueError):  # a custom method may record something else under this name
        return {}
    square = (run.num_clients, run.num_clients)
    return {number: _normalize_rows(value) for number, value in found.items() if value.shape == square}


def _normalize_rows(weights: Matrix) -> Matrix:
    positive = np.nan_to_num(weights).clip(min=0)
    totals = positive.sum(1, keepdims=True)
    return positive / np.where(totals > 0, totals, 1.0)


def cluster_order(weights: Matrix) -> list[int]:
    """Order clients by hierarchical clustering, so that clients that learn from each other are adjacent.

    >>> cluster_order(np.array([[0.5, 0, 0.5], [0, 1, 0], [0.5, 0, 0.5]])).index(1) != 1
    True
    """
    if len(weights) < 3:
        return list(range(len(weights)))
    mutual = (weights + weights.T) / 2
    np.fill_diagonal(mutual, 0.0)
    distance = mutual.max() - mutual
    np.fill_diagonal(distance, 0.0)
    tree = linkage(squareform(distance, checks=False), "average", optimal_ordering=len(weights) <= 300)
    return [int(client) for client in leaves_list(tree)]


def class_counts(run: Run) -> list[list[int]] | None:
    """Return each client's training samples per class; None if they are not known for all clients."""
    rows = [client.get("classes") or [] for client in run.info["clients"]]
    return rows if min(map(len, rows)) == max(map(len, rows)) > 0 else None


def class_overlap(run: Run, clients: Sequence[int] | None = None) -> Matrix | None:
    """Return the overlap of the class distributions of these clients (default: all) with those of all clients."""
    counts = class_counts(run)
    if counts is None or not all(map(sum, counts)):
        return None
    parts = np.array(counts, dtype=np.float64)
    parts /= parts.sum(1, keepdims=True)
    return np.stack([np.minimum(parts, row).sum(1) for row in (parts if clients is None else parts[[*clients]])])


def _figure(run: Run, weights: dict[int, Matrix]) -> Figure:
    last = weights[max(weights)]
    names = client_labels(run)
    groups = _groups(cluster_order(last))
    rounds = evenly_spaced(sorted(weights), max(_MAX_CELLS // len(groups) ** 2, 1))
    labels = [_group_label(group, names) for group in groups]
    cells = {number: _group_means(weights[number], groups) for number in rounds}
    largest = max((cell for rows in cells.values() for row in rows for cell in row if cell is not None), default=1.0)
    trace = {
        "type": "heatmap", "x": labels, "y": labels, "z": cells[rounds[-1]], "zmin": 0, "zmax": largest or 1.0,
        "colorscale": "Cividis", "colorbar": {"title": {"text": "weight", "side": "right"}, "tickformat": ".1~%"},
        "hovertemplate": "%{y} receives %{z:.1%} from %{x}<extra></extra>", "xgap": 1, "ygap": 1,
    }  # fmt: skip
    axis = {"type": "category", "constrain": "domain", "showgrid": False, "showticklabels": len(groups) <= 40}
    layout = {
        "xaxis": axis | {"title": {"text": "learns from"}},
        "yaxis": axis | {"title": {"text": "client"}, "autorange": "reversed", "scaleanchor": "x"},
        "height": 620,
    }
    frames = [{"name": str(number), "data": [{"z": rows}]} for number, rows in cells.items()]
    title = f"Mixing weights between clients: {run.method_title}, seed {run.experiment['seed']}"
    return Figure(f"mixing-{run.method}", title, _mixing_summary(run, last, names), [trace], layout,
                  _strongest_pairs(last, names), frames if len(frames) > 1 else ())  # fmt: skip


def _mixing_summary(run: Run, last: Matrix, names: Sequence[str]) -> str:
    others = last.copy()
    np.fill_diagonal(others, 0.0)
    i, j = divmod(int(others.argmax()), len(others))
    summary = (
        f"With {run.method_title}, clients receive {percent(others.sum(1).mean())} of their models from other clients "
        "in the last round"
    )
    if others[i, j] > 0:
        summary += f"; {names[i]} receives the most from a single client, {names[j]} ({percent(others[i, j], 1)})"
    overlap = class_overlap(run)
    if overlap is not None and (found := rank_correlation(others, overlap)) is not None:
        correlation, p = found
        finding = f"clients learn {'more' if correlation > 0 else 'less'} from clients with similar classes"
        if p >= SIGNIFICANCE_LEVEL:
            finding = "weights and similarity of classes are not significantly correlated"
        summary += f"; {finding} (rank correlation {correlation:.2f}, {format_p(p)})"
    return summary + "."


def _strongest_pairs(last: Matrix, names: Sequence[str]) -> Table:
    others = last.copy()
    np.fill_diagonal(others, 0.0)
    largest = np.argsort(-others, axis=None, kind="stable")[:_TABLE_PAIRS]
    pairs = [divmod(int(index), len(others)) for index in largest]
    rows = [[names[i], names[j], percent(others[i, j], 1)] for i, j in pairs if others[i, j] > 0]
    return Table(["client", "learns from", "weight"], rows)


def _groups(ordered: list[int]) -> list[list[int]]:
    """Split ordered clients into at most _MAX_CLIENTS groups of adjacent clients."""
    count = min(len(ordered), _MAX_CLIENTS)
    return [part.tolist() for part in np.array_split(np.array(ordered), count)]


def _group_label(group: list[int], names: Sequence[str]) -> str:
    return names[group[0]] if len(group) == 1 else f"{names[group[0]]} and {len(group) - 1} similar"


def _group_means(weights: Matrix, groups: list[list[int]]) -> list[list[float | None]]:
    """Return the mean weights between groups; the diagonal is left out because it is much larger than the rest."""
    hidden = weights.copy()
    np.fill_diagonal(hidden, np.nan)
    return [[_mean(hidden[np.ix_(rows, columns)]) for columns in groups] for rows in groups]


def _mean(cell: Matrix) -> float | None:
    known = cell[np.isfinite(cell)]
    return float(f"{known.mean():.3g}") if known.size else None
