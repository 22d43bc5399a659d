"""Who learns from whom: the weights with which a method mixes clients' models, over the rounds."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from fedtailor.chance import LIMIT, rank_correlation
from fedtailor.reading import called, firsts
from fedtailor.run import Run
from fedtailor.scale import percent
from fedtailor.see.drawing import evenly, p_text
from fedtailor.see.figure import Figure, Table

Matrix = np.ndarray[Any, np.dtype[np.float64]]
_NAME = "weights"  # the monitor of methods that mix clients' models: a number for every two of them
_MOST_CELLS = 300_000  # numbers in a figure, all rounds of its slider together
_MOST_CLIENTS = 120  # rows; beyond, neighbours are drawn together
_STRONGEST = 20  # pairs in the table


def neighbours(runs: Sequence[Run]) -> list[Figure]:
    """A figure for every method that mixes clients' models, of its first seed."""
    return [_figure(run, over_rounds) for run in firsts(runs) if (over_rounds := shares(run))]


def shares(run: Run) -> dict[int, Matrix]:
    """Round -> [i, j], the share that client j has in what client i gets; empty if the method mixes no clients."""
    if not any(_NAME in line["monitor"] for line in run.records):
        return {}
    try:
        found = {number: np.asarray(value, dtype=np.float64) for number, value in run.monitor(_NAME).items()}
    except (TypeError, ValueError):  # a method of one's own may call something else so
        return {}
    square = (run.num_clients, run.num_clients)
    return {number: _to_shares(value) for number, value in found.items() if value.shape == square}


def _to_shares(weights: Matrix) -> Matrix:
    positive = np.nan_to_num(weights).clip(min=0)
    totals = positive.sum(1, keepdims=True)
    return positive / np.where(totals > 0, totals, 1.0)


def order(weights: Matrix) -> list[int]:
    """Clients such that those who learn from each other stand side by side.

    >>> order(np.array([[0.5, 0, 0.5], [0, 1, 0], [0.5, 0, 0.5]])).index(1) != 1
    True
    """
    if len(weights) < 3:
        return list(range(len(weights)))
    mutual = (weights + weights.T) / 2
    np.fill_diagonal(mutual, 0.0)
    away = mutual.max() - mutual
    np.fill_diagonal(away, 0.0)
    tree = linkage(squareform(away, checks=False), "average", optimal_ordering=len(weights) <= 300)
    return [int(client) for client in leaves_list(tree)]


def likeness(run: Run, clients: Sequence[int] | None = None) -> Matrix | None:
    """How alike the classes of every two clients are, or of these to all others: the share that both have in common."""
    counts = [client.get("classes") for client in run.info["clients"]]
    if not all(isinstance(own, list) and sum(own) and len(own) == len(counts[0]) for own in counts):
        return None
    parts = np.array(counts, dtype=np.float64)
    parts /= parts.sum(1, keepdims=True)
    return np.stack([np.minimum(parts, own).sum(1) for own in (parts if clients is None else parts[[*clients]])])


def _figure(run: Run, over_rounds: dict[int, Matrix]) -> Figure:
    last = over_rounds[max(over_rounds)]
    names, ordered = called(run), order(last)
    groups = _groups(ordered)
    chosen = evenly(sorted(over_rounds), max(_MOST_CELLS // len(groups) ** 2, 1))
    labels = [_label(group, names) for group in groups]
    drawn = {number: _draw(over_rounds[number], groups) for number in chosen}
    top = max((cell for rows in drawn.values() for row in rows for cell in row if cell is not None), default=1.0)
    trace = {
        "type": "heatmap", "x": labels, "y": labels, "z": drawn[chosen[-1]], "zmin": 0, "zmax": top or 1.0,
        "colorscale": "Cividis", "colorbar": {"title": {"text": "share"}, "tickformat": ".0%"},
        "hovertemplate": "%{y} gets %{z:.1%} from %{x}<extra></extra>", "xgap": 1, "ygap": 1,
    }  # fmt: skip
    axis = {"type": "category", "constrain": "domain", "showgrid": False, "showticklabels": len(groups) <= 40}
    layout = {
        "xaxis": axis | {"title": {"text": "learns from"}},
        "yaxis": axis | {"title": {"text": "client"}, "autorange": "reversed", "scaleanchor": "x"},
        "height": 620,
    }
    frames = [{"name": str(number), "data": [{"z": rows}]} for number, rows in drawn.items()]
    seed = f", seed {run.experiment['seed']}"
    key = f"neighbours-{run.method}"
    return Figure(key, f"Who learns from whom: {run.method}{seed}", _says(run, last, names), [trace], layout,
                  _strongest(last, names), frames if len(frames) > 1 else ())  # fmt: skip


def _says(run: Run, last: Matrix, names: Sequence[str]) -> str:
    others = last.copy()
    np.fill_diagonal(others, 0.0)
    i, j = divmod(int(others.argmax()), len(others))
    said = f"At the end clients of {run.method} take {percent(others.sum(1).mean())} of what they get from others"
    if others[i, j] > 0:
        said += f", most of all {names[i]} from {names[j]} ({percent(others[i, j], 1)})"
    alike = likeness(run)
    if alike is not None and (found := rank_correlation(others, alike)) is not None:
        correlation, p = found
        more = "the more" if correlation > 0 else "less"
        how = f"they learn from each other {more}, the more alike their classes are"
        if p >= LIMIT:
            how = "whether they learn more from those with the same classes cannot be told from chance"
        said += f"; {how} (rank correlation {correlation:.2f}, {p_text(p)})"
    return said + "."


def _strongest(last: Matrix, names: Sequence[str]) -> Table:
    others = last.copy()
    np.fill_diagonal(others, 0.0)
    flat = np.argsort(-others, axis=None, kind="stable")[:_STRONGEST]
    pairs = [divmod(int(place), len(others)) for place in flat]
    rows = [[names[i], names[j], percent(others[i, j], 1)] for i, j in pairs if others[i, j] > 0]
    return Table(["client", "learns from", "share"], rows)


def _groups(ordered: list[int]) -> list[list[int]]:
    """Every client by itself, or neighbours together where there are too many to be seen."""
    count = min(len(ordered), _MOST_CLIENTS)
    return [part.tolist() for part in np.array_split(np.array(ordered), count)]


def _label(group: list[int], names: Sequence[str]) -> str:
    return names[group[0]] if len(group) == 1 else f"{names[group[0]]} and {len(group) - 1} like it"


def _draw(weights: Matrix, groups: list[list[int]]) -> list[list[float | None]]:
    """What is drawn of a round; what clients take of themselves is left out, for it would outshine the rest."""
    hidden = weights.copy()
    np.fill_diagonal(hidden, np.nan)
    whole = [[hidden[np.ix_(rows, columns)] for columns in groups] for rows in groups]
    return [[_mean(cell) for cell in row] for row in whole]


def _mean(cell: Matrix) -> float | None:
    known = cell[np.isfinite(cell)]
    return float(f"{known.mean():.3g}") if known.size else None
