"""Figures of the clients' gains and losses over local training."""

from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from statistics import mean, median
from typing import Any

from fedtailor.analysis.formatting import (
    capitalize,
    count_of,
    evenly_spaced,
    join_names,
    method_in_text,
    round_digits,
)
from fedtailor.analysis.run_summary import Client, Comparison
from fedtailor.reporting.figures.clients import (
    GAIN_COLOR,
    LOSS_COLOR,
    MAX_METHODS,
    MAX_POINTS,
    MAX_ROWS,
    NamedClients,
    named_clients,
)
from fedtailor.reporting.figures.drawing import axis_heading, log_axis, rows_axis, rows_height
from fedtailor.reporting.figures.figure import Choice, Figure, Option, Table


def gain_sentences(group: Comparison) -> list[str]:
    """Return the answer to "Which clients gain over local training, and which lose?"."""
    if group.baseline is None:
        return [
            "This question cannot be answered: local training is not among these runs.",
            "Add a run of local training: 'fedtailor compare' always includes it, and 'fedtailor run --method local' "
            "runs only this baseline.",
        ]
    others = [label for label in group.methods if label != group.baseline and _gains(group, label)]
    if not others and len(group.methods) > 1:
        return [
            "This question cannot be answered: no client has scores with both local training and a federated method."
        ]
    if not others:
        return ["This question cannot be answered: local training is the only method here."]
    best = others[0]
    gains, named = _gains(group, best), named_clients(group)
    better, worse = (sum(sign * gain > 0 for gain in gains.values()) for sign in (1, -1))
    same, finite = len(gains) - better - worse, _finite(gains)
    diverged = f" ({len(gains) - len(finite)} diverged)" if len(finite) < len(gains) else ""
    rank = "the best federated method here" if len(others) > 1 else "the only federated method here"
    answer = [
        f"With {best}, {rank}, {better} of {count_of(len(gains), 'client')}{_split_clause(gains)} "
        f"{_score(better)} better than with local training, {worse} {_score(worse)} worse{diverged}, and {same} "
        f"{_score(same)} the same; {_median_clause(group, median(gains.values()))}."
    ]
    top, bottom = (choose(finite, key=lambda client: finite[client], default=None) for choose in (max, min))
    extremes = []
    if top is not None and finite[top] > 0:
        extremes.append(f"{named[top][1]} gains the most ({group.fmt.gap(finite[top])})")
    if bottom is not None and finite[bottom] < 0:
        extremes.append(f"{named[bottom][1]} loses the most ({group.fmt.gap(finite[bottom])})")
    if extremes:
        answer.append(capitalize("; ".join(extremes)) + ".")
    harmful = [label for label in others if _more_clients_lose(group, label)]
    if harmful:
        answer.append(f"More clients lose than gain with {join_names(harmful, 8)}.")
    return answer


def _score(count: int) -> str:
    return "scores" if count == 1 else "score"


def _split_clause(gains: Mapping[Client, float]) -> str:
    """Return a note if clients come from several splits, where equal names denote different clients."""
    splits = len({split for split, _ in gains})
    return f" (from {splits} splits)" if splits > 1 else ""


def _gains(group: Comparison, label: str, moment: str = "trained") -> dict[Client, float]:
    """Return each client's gain over local training, −∞ if it diverged; omit clients whose local training diverged."""
    if group.baseline is None or label == group.baseline:
        return {}
    gaps = group.gaps(label, group.baseline, moment)
    return {client: gap for client, (gap, _) in gaps.items() if not isnan(gap)}


def _finite(gains: Mapping[Client, float]) -> dict[Client, float]:
    return {client: gain for client, gain in gains.items() if isfinite(gain)}


def _median_clause(group: Comparison, gain: float) -> str:
    return f"the median gain is {_gain_text(group, gain)}" if isfinite(gain) else "the median client diverged"


def _gain_text(group: Comparison, gain: float) -> str:
    return f"{group.fmt.signed(gain)} {'points' if group.fmt.unit else f'in {group.fmt.name}'}"


def _more_clients_lose(group: Comparison, label: str) -> bool:
    gains = _gains(group, label).values()
    return sum(gain < 0 for gain in gains) > sum(gain > 0 for gain in gains)


def gain_fractions(group: Comparison) -> Figure | None:
    """Draw the fractions of clients that score better and worse than with local training, per method."""
    found = {label: gains for label in group.methods if (gains := list(_gains(group, label).values()))}
    if not found:
        return None
    labels, finite = list(found), {label: list(filter(isfinite, gains)) for label, gains in found.items()}
    better = [100 * sum(gain > 0 for gain in found[label]) / len(found[label]) for label in labels]
    worse = [100 * sum(gain < 0 for gain in found[label]) / len(found[label]) for label in labels]

    def bars(name: str, values: Sequence[float], sign: int, color: str) -> dict[str, Any]:
        return {
            "type": "bar", "orientation": "h", "name": name, "y": labels, "x": [round_digits(sign * v) for v in values],
            "marker": {"color": color}, "text": [f"{value:.0f} %" for value in values], "textposition": "outside",
            "customdata": [round_digits(value, 3) for value in values], "cliponaxis": False, "showlegend": False,
            "hovertemplate": f"%{{y}}: %{{customdata}} % score {name}<extra></extra>",
        }  # fmt: skip

    data = [bars("worse", worse, -1, LOSS_COLOR), bars("better", better, 1, GAIN_COLOR)]
    limit = 1.45 * max([*better, *worse, 1])  # leaves space for the percentages on narrow screens
    sides = (("◀ worse", -8, "right", LOSS_COLOR), ("better than local training ▶", 8, "left", GAIN_COLOR))
    annotations = [
        {"text": text, "xref": "x", "x": 0, "yref": "paper", "y": 1, "yanchor": "bottom", "yshift": 4, "xshift": shift,
         "xanchor": anchor, "showarrow": False, "font": {"color": color}}
        for text, shift, anchor, color in sides
    ]  # fmt: skip
    layout = {
        "height": rows_height(len(labels)) - 20, "yaxis": rows_axis(labels), "barmode": "relative", "bargap": 0.35,
        "xaxis": {"range": [-limit, limit], "showticklabels": False, "showgrid": False, "zeroline": True},
        "annotations": annotations, "margin": {"t": 34, "b": 12},
    }  # fmt: skip
    rows = [
        [label, len(found[label]), sum(g > 0 for g in found[label]), sum(g == 0 for g in found[label]),
         sum(g < 0 for g in found[label]), len(found[label]) - len(finite[label]),
         *(group.fmt.signed(average(finite[label])) if finite[label] else "–" for average in (mean, median))]
        for label in labels
    ]  # fmt: skip
    columns = [
        "method", "clients", "better", "same", "worse", "diverged (counted as worse)",
        f"mean gain, {group.fmt.gap_heading} (without diverged)", "median gain",
    ]  # fmt: skip
    summary = _fractions_summary(labels, better, worse)
    return Figure("gainers", "Clients that gain and lose", summary, data, layout, Table(columns, rows))


def _fractions_summary(labels: Sequence[str], better: Sequence[float], worse: Sequence[float]) -> str:
    with_any = f"with {method_in_text(labels[0])}" if len(labels) == 1 else "with any method"
    if not max(better):
        gain, lose = f"No client gains {with_any}", "none loses"
    else:
        gain, lose = f"The fraction of clients that gain {_largest(labels, better)}", f"no client loses {with_any}"
    return f"{gain}; {f'the fraction that lose {_largest(labels, worse)}' if max(worse) else lose}."


def _largest(labels: Sequence[str], values: Sequence[float]) -> str:
    """Return the methods with the largest value, and the value."""
    if len(labels) == 1:
        return f"is {values[0]:.0f} %"
    top = [label for label, value in zip(labels, values, strict=True) if value == max(values)]
    return f"is largest with {join_names(top, 3)} ({max(values):.0f} %)"


def gain_by_size(group: Comparison) -> Figure | None:
    """Draw each client's gain over its number of training samples, for one method at a time."""
    labels = [label for label in group.methods if _finite(_gains(group, label))][:MAX_METHODS]
    if not labels:
        return None
    named = named_clients(group)
    views = [_gain_points(group, label, named) for label in labels]
    attributes = ("x", "y", "text", "marker.color", "marker.symbol")
    data = [{
        "type": "scatter", "mode": "markers", "x": views[0]["x"], "y": views[0]["y"], "text": views[0]["text"],
        "marker": {"size": 9, "opacity": 0.75, "color": views[0]["marker.color"], "symbol": views[0]["marker.symbol"]},
        "showlegend": False, "hovertemplate": "%{text}: %{y:+.3~g}, %{x} samples<extra></extra>",
    }]  # fmt: skip
    sizes = [x for view in views for x in view["x"]]
    layout = {
        "height": 420, "annotations": [axis_heading(f"gain over local training ({group.fmt.gap_heading})")],
        "xaxis": {"title": {"text": "training samples of the client"}, "zeroline": False} | log_axis(sizes),
        "yaxis": {"zeroline": True}, "margin": {"t": 34},
    }  # fmt: skip
    options = [
        Option(label, {name: [view[name]] for name in attributes}) for label, view in zip(labels, views, strict=True)
    ]
    choices = [Choice("method", options)] if len(options) > 1 else []
    summary, table = _gains_summary(group, labels[0], named), _gains_table(group, labels, named)
    return Figure("gains", "Gain over local training by client size", summary, data, layout, table, (), choices)


def _gain_points(group: Comparison, label: str, named: NamedClients) -> dict[str, list[Any]]:
    gains = _finite(_gains(group, label))
    ordered = evenly_spaced(sorted(gains, key=lambda client: gains[client]), MAX_POINTS)  # includes both extremes
    values = [gains[client] for client in ordered]
    return {
        "x": [_train_size(named, client) for client in ordered],
        "y": [round_digits(group.fmt.factor * gain) for gain in values],
        "text": [named[client][1] for client in ordered],
        "marker.color": [GAIN_COLOR if gain > 0 else LOSS_COLOR if gain < 0 else "#7f7f7f" for gain in values],
        "marker.symbol": ["triangle-up" if gain > 0 else "triangle-down" if gain < 0 else "circle" for gain in values],
    }


def _train_size(named: NamedClients, client: Client) -> int:
    return int(named[client][0].run.info["clients"][client[1]]["train"])


def _gains_summary(group: Comparison, label: str, named: NamedClients) -> str:
    """Compare the half of clients with fewer samples with the other half."""
    gains, total = _finite(_gains(group, label)), len(_gains(group, label))
    ordered = sorted(gains, key=lambda client: _train_size(named, client))
    omitted = f"; {count_of(total - len(gains), 'client')} diverged and are not drawn" if len(gains) < total else ""
    half = len(ordered) // 2
    if not half:
        return f"With {label}, the gain of the only client is {_gain_text(group, gains[ordered[0]])}{omitted}."
    small, large = (mean(gains[client] for client in part) for part in (ordered[:half], ordered[-half:]))
    return (
        f"With {label}, the mean gain is {_gain_text(group, small)} for the half of the clients with fewer samples and "
        f"{_gain_text(group, large)} for the half with more samples (▲ gain, ▼ loss){omitted}."
    )


def _gains_table(group: Comparison, labels: Sequence[str], named: NamedClients) -> Table:
    gains = {label: _gains(group, label) for label in labels}
    first = gains[labels[0]]
    ordered = sorted(first, key=lambda client: -first[client])
    shown = ordered if len(ordered) <= MAX_ROWS else [*ordered[: MAX_ROWS // 2], *ordered[-MAX_ROWS // 2 :]]
    rows = []
    for client in shown:
        values = [_format_gain(group, gains[label].get(client)) for label in labels]
        rows.append([named[client][1], _train_size(named, client), *values])
    return Table(["client", "training samples", *(f"gain with {label}" for label in labels)], rows)


def _format_gain(group: Comparison, gain: float | None) -> str:
    return group.fmt.signed(gain) if gain is None or isfinite(gain) else "diverged"
