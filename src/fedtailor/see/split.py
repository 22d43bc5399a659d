"""The data split: which client has which classes, and how much."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from fedtailor.reading import called
from fedtailor.scale import counted, tidy
from fedtailor.see.clients import MOST_ROWS
from fedtailor.see.digest import Digest, Group
from fedtailor.see.drawing import evenly, short
from fedtailor.see.figure import Choice, Figure, Option, Table

_MOST_CLIENTS = 600  # columns; beyond, every so many clients one is drawn
_MOST_SPLITS = 6
# from nothing to blue, so that a class that a client lacks is as dark or light as the page
_SHADES = [[0, "rgba(0,114,178,0)"], [0.0001, "rgba(0,114,178,0.14)"], [1, "rgba(0,114,178,1)"]]


def split(group: Group) -> Figure | None:
    """Classes × clients, a split at a time; without classes, how many samples clients have."""
    splits: dict[str, Digest] = {}
    for digest in group.digests:
        splits.setdefault(digest.split, digest)
    shown = sorted(splits.values(), key=lambda digest: digest.seed)[:_MOST_SPLITS]
    counts = [_counts(digest) for digest in shown]
    known = [rows for rows in counts if rows is not None]
    return _heat_map(shown, known) if len(known) == len(shown) else _sizes(shown[0])


def how_split(group: Group) -> str:
    """How the data came to clients, in words."""
    run = group.first
    data, clients = run.experiment["data"], run.info["clients"]
    way = f" by {data['partition']}" if data.get("partition") else ""
    way += f" (α = {data['alpha']})" if data.get("partition") == "dirichlet" and "alpha" in data else ""
    train, test = (sum(client[part] for client in clients) for part in ("train", "test"))
    splits = len({digest.split for digest in group.digests})
    anew = f"; every seed splits it anew, {splits} times in all" if splits > 1 else ""
    name = str(data.get("name", "own data"))
    into = f"{counted(len(clients), 'client')} with {counted(train, 'training sample')}"
    return f"{name} is split{way} into {into} and {counted(test, 'test sample')}{anew}."


def _counts(digest: Digest) -> list[list[int]] | None:
    """Client -> its training samples of each class, where that is known of everyone."""
    found = [client.get("classes") for client in digest.run.info["clients"]]
    good = all(isinstance(own, list) and own and all(type(count) is int for count in own) for own in found)
    return [list(own) for own in found if own is not None] if good and len({len(own) for own in found}) == 1 else None


def _heat_map(shown: Sequence[Digest], counts: Sequence[list[list[int]]]) -> Figure:
    views = [_view(digest, rows) for digest, rows in zip(shown, counts, strict=True)]
    first = views[0]
    data = [{
        "type": "heatmap", "x": first["x"], "y": [str(k) for k in range(len(counts[0][0]))], "z": first["z"],
        "text": first["text"], "zmin": 0, "zmax": 100, "colorscale": _SHADES, "xgap": 1, "ygap": 1,
        "hovertemplate": "%{x}: %{text} samples of class %{y} (%{z:.0f} %)<extra></extra>",
        "colorbar": {"title": {"text": "% of the client's"}, "thickness": 10, "outlinewidth": 0},
    }]  # fmt: skip
    if len(first["x"]) > 60:
        data[0] |= {"xgap": 0, "ygap": 0}
    classes = len(counts[0][0])
    layout = {
        "height": 150 + min(24 * classes, 420),
        "xaxis": {"type": "category", "showticklabels": False, "showgrid": False},
        "annotations": [{"text": "clients, ordered by their largest class", "xref": "paper", "x": 0.5, "yref": "paper",
                         "y": 0, "yanchor": "top", "yshift": -12, "showarrow": False}],
        "yaxis": {"type": "category", "title": {"text": "class"}, "showgrid": False, "autorange": "reversed"},
    }  # fmt: skip
    options = [
        Option(f"seed {digest.seed}", {"x": [view["x"]], "z": [view["z"]], "text": [view["text"]]})
        for digest, view in zip(shown, views, strict=True)
    ]
    choices = [Choice("split of", options)] if len(options) > 1 else []
    heads = ["client", "training samples", *(f"class {k}" for k in range(classes))]
    rows = [[shown[0].name(i), sum(own), *own] for i, own in enumerate(counts[0])][:MOST_ROWS]
    return Figure(
        "split", "Who has which data", _says(shown[0], counts[0]), data, layout, Table(heads, rows), (), choices
    )


def _view(digest: Digest, counts: list[list[int]]) -> dict[str, Any]:
    """Clients side by side that have the same largest class, the surest first."""

    def place(client: int) -> tuple[int, float]:
        own, total = counts[client], max(sum(counts[client]), 1)
        return own.index(max(own)), -max(own) / total

    ordered = evenly(sorted(range(len(counts)), key=place), _MOST_CLIENTS)
    parts = [[100 * count / max(sum(counts[client]), 1) for count in counts[client]] for client in ordered]
    names = called(digest.run)
    return {
        "x": [names[client] for client in ordered],
        "z": [[short(part[k], 3) for part in parts] for k in range(len(counts[0]))],
        "text": [[counts[client][k] for client in ordered] for k in range(len(counts[0]))],
    }


def _says(digest: Digest, counts: list[list[int]]) -> str:
    sizes = [client["train"] for client in digest.run.info["clients"]]
    held = median(sum(count > 0 for count in own) for own in counts)
    top = median(max(own) / max(sum(own), 1) for own in counts)
    some = f"; {_MOST_CLIENTS} of {len(counts)} clients are drawn" if len(counts) > _MOST_CLIENTS else ""
    return (
        f"The median client has {held:g} of {len(counts[0])} classes, and {100 * top:.0f} % of its samples are of one "
        f"of them; clients have from {min(sizes):,} to {max(sizes):,} training samples{some}."
    )


def _sizes(digest: Digest) -> Figure | None:
    """Clients by how many training samples they have."""
    clients = sorted(digest.run.info["clients"], key=lambda client: -client["train"])
    sizes = [client["train"] for client in clients]
    names = [tidy(str(client["name"])) for client in clients]
    data = [{
        "type": "bar", "x": list(range(1, len(sizes) + 1)), "y": sizes, "text": names, "textposition": "none",
        "marker": {"color": "#0072b2"}, "hovertemplate": "%{text}: %{y} samples<extra></extra>", "showlegend": False,
    }]  # fmt: skip
    layout = {
        "height": 320, "bargap": 0.2, "xaxis": {"title": {"text": "clients, the largest first"}},
        "yaxis": {"title": {"text": "training samples"}},
    }  # fmt: skip
    half = next((k + 1 for k in range(len(sizes)) if 2 * sum(sizes[: k + 1]) >= sum(sizes)), len(sizes))
    says = (
        f"Clients have from {min(sizes):,} to {max(sizes):,} training samples; the largest "
        f"{'has' if half == 1 else f'{half} of {len(sizes)} have'} half of all."
    )
    rows = [[name, client["train"], client["test"]] for name, client in zip(names, clients, strict=True)]
    return Figure("split", "Who has how much data", says, data, layout,
                  Table(["client", "training samples", "test samples"], rows[:MOST_ROWS]))  # fmt: skip
