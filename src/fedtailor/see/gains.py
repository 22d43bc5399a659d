"""Who gains over training alone, and who loses."""

from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from statistics import mean, median
from typing import Any

from fedtailor.scale import counted
from fedtailor.see.clients import GAIN, LOSS, MOST_DOTS, MOST_METHODS, MOST_ROWS, owners
from fedtailor.see.digest import Client, Digest, Group
from fedtailor.see.drawing import capital, evenly, heading, listed, powers_axis, rows_axis, rows_height, short
from fedtailor.see.figure import Choice, Figure, Option, Table


def who_gains(group: Group) -> list[str]:
    """The answer in words."""
    if group.alone is None:
        return [
            "Training alone is not among these runs, so this cannot be answered.",
            "Add it: fedtailor compare always has it, and fedtailor run --method local does it alone.",
        ]
    others = [label for label in group.methods if label != group.alone and _gains(group, label)]
    if not others and len(group.methods) > 1:
        return ["No client is known both with a federated method and alone, so this cannot be answered."]
    if not others:
        return ["There is only training alone here: nobody can gain over it or lose."]
    best = others[0]
    gains, named = _gains(group, best), owners(group)
    better, worse = (sum(sign * gain > 0 for gain in gains.values()) for sign in (1, -1))
    known = _finite(gains)
    lost = f" ({len(gains) - len(known)} diverged)" if len(known) < len(gains) else ""
    everyone, do = counted(len(gains), "client"), "does" if 1 in (better, len(gains)) else "do"
    answer = [
        f"With {best}, {'the best' if len(others) > 1 else 'the only'} federated method here, {better} of {everyone}"
        f"{_in_splits(gains)} {do} better than alone, {worse} {'does' if worse == 1 else 'do'} worse{lost} and "
        f"{len(gains) - better - worse} as well; the median client {_middle(group, median(gains.values()))}."
    ]
    top, bottom = (choose(known, key=lambda client: known[client], default=None) for choose in (max, min))
    ends = []
    if top is not None and known[top] > 0:
        ends.append(f"{named[top][1]} gains most ({group.scale.gap(known[top])})")
    if bottom is not None and known[bottom] < 0:
        ends.append(f"{named[bottom][1]} loses most ({group.scale.gap(known[bottom])})")
    if ends:
        answer.append(capital("; ".join(ends)) + ".")
    hurting = [label for label in others if _more_lose(group, label)]
    if hurting:
        answer.append(f"More clients lose than gain with {listed(hurting, 8)}.")
    return answer


def _in_splits(gains: Mapping[Client, float]) -> str:
    """Clients of other splits are others, though they are called the same."""
    splits = len({split for split, _ in gains})
    return f" (of {splits} splits)" if splits > 1 else ""


def _gains(group: Group, label: str, moment: str = "trained") -> dict[Client, float]:
    """Every client's gain over training alone, −∞ where it diverged; left out is who diverged alone."""
    if group.alone is None or label == group.alone:
        return {}
    gaps = group.gaps(label, group.alone, moment)
    return {client: gap for client, (gap, _) in gaps.items() if not isnan(gap)}


def _finite(gains: Mapping[Client, float]) -> dict[Client, float]:
    """Without those that diverged."""
    return {client: gain for client, gain in gains.items() if isfinite(gain)}


def _middle(group: Group, gain: float) -> str:
    if not isfinite(gain):
        return "diverged"
    return f"gains {group.scale.signed(gain)} {'points' if group.scale.unit else f'in {group.scale.name}'}"


def _more_lose(group: Group, label: str) -> bool:
    gains = _gains(group, label).values()
    return sum(gain < 0 for gain in gains) > sum(gain > 0 for gain in gains)


def shares(group: Group) -> Figure | None:
    """For every method the share of clients that do better and worse than alone."""
    found = {label: gains for label in group.methods if (gains := list(_gains(group, label).values()))}
    if not found:
        return None
    labels, known = list(found), {label: list(filter(isfinite, gains)) for label, gains in found.items()}
    better = [100 * sum(gain > 0 for gain in found[label]) / len(found[label]) for label in labels]
    worse = [100 * sum(gain < 0 for gain in found[label]) / len(found[label]) for label in labels]

    def bars(name: str, values: Sequence[float], sign: int, colour: str) -> dict[str, Any]:
        return {
            "type": "bar", "orientation": "h", "name": name, "y": labels, "x": [short(sign * v) for v in values],
            "marker": {"color": colour}, "text": [f"{value:.0f} %" for value in values], "textposition": "outside",
            "customdata": [short(value, 3) for value in values], "cliponaxis": False, "showlegend": False,
            "hovertemplate": f"%{{y}}: %{{customdata}} % do {name}<extra></extra>",
        }  # fmt: skip

    data = [bars("worse", worse, -1, LOSS), bars("better", better, 1, GAIN)]
    reach = 1.45 * max([*better, *worse, 1])  # with room for the numbers on a phone
    names = [
        {"text": text, "xref": "x", "x": 0, "yref": "paper", "y": 1, "yanchor": "bottom", "yshift": 4, "xshift": shift,
         "xanchor": anchor, "showarrow": False, "font": {"color": colour}}
        for text, shift, anchor, colour in (("◀ worse", -8, "right", LOSS), ("better than alone ▶", 8, "left", GAIN))
    ]  # fmt: skip
    layout = {
        "height": rows_height(len(labels)) - 20, "yaxis": rows_axis(labels), "barmode": "relative", "bargap": 0.35,
        "xaxis": {"range": [-reach, reach], "showticklabels": False, "showgrid": False, "zeroline": True},
        "annotations": names, "margin": {"t": 34, "b": 12},
    }  # fmt: skip
    any_of = f"with {labels[0]}" if len(labels) == 1 else "with any method"
    says = f"{_most(labels, better)} the largest share of clients do better than alone, {max(better):.0f} %"
    says = says if max(better) > 0 else f"No client does better than alone {any_of}"
    if len(labels) > 1 and max(worse) > 0:
        says += f"; {_most(labels, worse)} the largest share do worse, {max(worse):.0f} %"
    elif not max(worse):
        says += f"; none does worse {any_of}" if max(better) > 0 else "; none does worse"
    says += "."
    rows = [
        [label, len(found[label]), sum(g > 0 for g in found[label]), sum(g == 0 for g in found[label]),
         sum(g < 0 for g in found[label]), len(found[label]) - len(known[label]),
         *(group.scale.signed(middle(known[label])) if known[label] else "–" for middle in (mean, median))]
        for label in labels
    ]  # fmt: skip
    heads = [
        "method", "clients", "better", "as well", "worse", "of these diverged",
        f"mean gain, {group.scale.gap_heading}, of the others", "median gain",
    ]  # fmt: skip
    return Figure("gainers", "Better or worse than alone", says, data, layout, Table(heads, rows))


def _most(labels: Sequence[str], values: Sequence[float]) -> str:
    """Who has the largest value, all of them where several have it."""
    first = [label for label, value in zip(labels, values, strict=True) if value == max(values)]
    return f"{listed(first, 3)} {'lets' if len(first) == 1 else 'let'}"


def gain_by_size(group: Group) -> Figure | None:
    """Every client's gain over training alone against how much data it has; one method at a time."""
    labels = [label for label in group.methods if _finite(_gains(group, label))][:MOST_METHODS]
    if not labels:
        return None
    named = owners(group)
    views = [_view(group, label, named) for label in labels]
    attributes = ("x", "y", "text", "marker.color", "marker.symbol")
    data = [{
        "type": "scatter", "mode": "markers", "x": views[0]["x"], "y": views[0]["y"], "text": views[0]["text"],
        "marker": {"size": 9, "opacity": 0.75, "color": views[0]["marker.color"], "symbol": views[0]["marker.symbol"]},
        "showlegend": False, "hovertemplate": "%{text}: %{y:+.3~g}, %{x} samples<extra></extra>",
    }]  # fmt: skip
    sizes = [x for view in views for x in view["x"]]
    layout = {
        "height": 420, "annotations": [heading(f"gain over training alone: {group.scale.gap_heading}")],
        "xaxis": {"title": {"text": "training samples of the client"}, "zeroline": False} | powers_axis(sizes),
        "yaxis": {"zeroline": True}, "margin": {"t": 34},
    }  # fmt: skip
    options = [
        Option(label, {name: [view[name]] for name in attributes}) for label, view in zip(labels, views, strict=True)
    ]
    choices = [Choice("method", options)] if len(options) > 1 else []
    says, table = _says_gains(group, labels[0], named), _gains_table(group, labels, named)
    return Figure("gains", "Gain over training alone, by the size of a client", says, data, layout, table, (), choices)


def _view(group: Group, label: str, named: dict[Client, tuple[Digest, str]]) -> dict[str, list[Any]]:
    gains = _finite(_gains(group, label))
    ordered = evenly(sorted(gains, key=lambda client: gains[client]), MOST_DOTS)  # so that both ends are there
    values = [gains[client] for client in ordered]
    return {
        "x": [_samples(named, client) for client in ordered],
        "y": [short(group.scale.factor * gain) for gain in values],
        "text": [named[client][1] for client in ordered],
        "marker.color": [GAIN if gain > 0 else LOSS if gain < 0 else "#7f7f7f" for gain in values],
        "marker.symbol": ["triangle-up" if gain > 0 else "triangle-down" if gain < 0 else "circle" for gain in values],
    }


def _samples(named: dict[Client, tuple[Digest, str]], client: Client) -> int:
    return int(named[client][0].run.info["clients"][client[1]]["train"])


def _says_gains(group: Group, label: str, named: dict[Client, tuple[Digest, str]]) -> str:
    """The smaller half of the clients beside the larger."""
    gains, everyone = _finite(_gains(group, label)), len(_gains(group, label))
    ordered = sorted(gains, key=lambda client: _samples(named, client))
    lost = f"; {everyone - len(gains)} diverged and are not drawn" if len(gains) < everyone else ""
    half = len(ordered) // 2
    if not half:
        return f"With {label} the only client gains {group.scale.signed(gains[ordered[0]])}."
    small, large = (mean(gains[client] for client in some) for some in (ordered[:half], ordered[-half:]))
    unit = " points" if group.scale.unit else ""
    return (
        f"With {label} the half of the clients with fewer samples gains {group.scale.signed(small)}{unit} on average, "
        f"the half with more {group.scale.signed(large)}{unit} (▲ gains, ▼ loses){lost}."
    )


def _gains_table(group: Group, labels: Sequence[str], named: dict[Client, tuple[Digest, str]]) -> Table:
    gains = {label: _gains(group, label) for label in labels}
    first = gains[labels[0]]
    ordered = sorted(first, key=lambda client: -first[client])
    shown = ordered if len(ordered) <= MOST_ROWS else [*ordered[: MOST_ROWS // 2], *ordered[-MOST_ROWS // 2 :]]
    rows = []
    for client in shown:
        row = [_shown(group, gains[label].get(client)) for label in labels]
        rows.append([named[client][1], _samples(named, client), *row])
    return Table(["client", "training samples", *(f"gain with {label}" for label in labels)], rows)


def _shown(group: Group, gain: float | None) -> str:
    return group.scale.signed(gain) if gain is None or isfinite(gain) else "diverged"
