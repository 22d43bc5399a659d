"""Figures of the clients' gains and losses over local training."""

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean, median
from typing import Any

from fedtailor.analysis.client_gains import (
    ClientGain,
    count_direction,
    gain_text,
    gains_over_local,
    undecided_label,
)
from fedtailor.analysis.comparison import OVERLAPPING_SPLITS
from fedtailor.analysis.formatting import (
    capitalize,
    count_of,
    evenly_spaced,
    join_names,
    method_in_text,
    round_digits,
)
from fedtailor.analysis.gain_sentences import gain_sentences
from fedtailor.analysis.run_summary import Client, Comparison
from fedtailor.reporting.figures.clients import (
    GAIN_COLOR,
    LOSS_COLOR,
    MAX_METHODS,
    MAX_POINTS,
    NamedClients,
    named_clients,
)
from fedtailor.reporting.figures.drawing import axis_heading, log_axis, rows_axis, rows_height
from fedtailor.reporting.figures.figure import MAX_ROWS, Choice, Figure, Option, Table

Gains = Mapping[Client, ClientGain]
_MAX_LABELS = 12  # clients whose names are drawn
_ERROR_BARS = ("error_y.array", "error_y.arrayminus")  # from the gain to the ends of its interval, up and down
_MARKERS = {  # by the direction of a gain
    1: {"color": GAIN_COLOR, "symbol": "triangle-up"},
    0: {"color": "#7f7f7f", "symbol": "circle"},
    -1: {"color": LOSS_COLOR, "symbol": "triangle-down"},
}


def gain_answer(group: Comparison) -> list[str]:
    """Return the answer to "Which clients gain over local training, and which lose?"."""
    if group.baseline is None:
        return [
            "This question cannot be answered: local training is not among these runs.",
            "Add a run of local training: 'fedtailor compare' always includes it, and 'fedtailor run --method local' "
            "runs only this baseline.",
        ]
    others = gains_over_local(group)
    if not others and len(group.methods) > 1:
        return [
            "This question cannot be answered: no client has scores with both local training and a federated method."
        ]
    if not others:
        return ["This question cannot be answered: local training is the only method here."]
    if group.is_repeated:  # the sentences name all clients
        return [*gain_sentences(group), OVERLAPPING_SPLITS]
    harmful = [label for label, gains in others.items() if count_direction(gains, -1) > count_direction(gains, 1)]
    return [
        *gain_sentences(group),
        *_extremes(group, next(iter(others.values()))),
        *([f"More clients lose than gain with {join_names(harmful, 8)}."] if harmful else []),
    ]


def _extremes(group: Comparison, found: Gains) -> list[str]:
    """Return a sentence with the clients that gain and lose the most, if there are any."""
    named, extremes = named_clients(group), []
    for sign, words in ((1, "gains the most"), (-1, "loses the most")):
        some = {client: sign * one.gain for client, one in _finite(found).items() if one.direction == sign}
        if some:
            client = max(some, key=lambda client: some[client])
            extremes.append(f"{named[client][1]} {words} ({group.fmt.gap(some[client])})")
    return [capitalize("; ".join(extremes)) + "."] if extremes else []


def _finite(gains: Gains) -> Gains:
    return {client: one for client, one in gains.items() if isfinite(one.gain)}


def gain_fractions(group: Comparison) -> Figure | None:
    """Draw the fractions of clients that gain and lose over local training, per method."""
    found = gains_over_local(group)
    if not found:
        return None
    labels, finite = list(found), {o: [one.gain for one in _finite(gains).values()] for o, gains in found.items()}
    better, worse = ([100 * count_direction(gains, sign) / len(gains) for gains in found.values()] for sign in (1, -1))

    def bars(name: str, values: Sequence[float], sign: int, color: str) -> dict[str, Any]:
        return {
            "type": "bar", "orientation": "h", "name": name, "y": labels, "x": [round_digits(sign * v) for v in values],
            "marker": {"color": color}, "text": [f"{value:.0f} %" for value in values], "textposition": "outside",
            "customdata": [round_digits(value, 3) for value in values], "cliponaxis": False, "showlegend": False,
            "hovertemplate": f"%{{y}}: %{{customdata}} % {name}<extra></extra>",
        }  # fmt: skip

    data = [bars("lose", worse, -1, LOSS_COLOR), bars("gain", better, 1, GAIN_COLOR)]
    limit = 1.45 * max([*better, *worse, 1])  # leaves space for the percentages on narrow screens
    sides = (("◀ lose", -8, "right", LOSS_COLOR), ("gain over local training ▶", 8, "left", GAIN_COLOR))
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
        [label, len(gains), *(count_direction(gains, sign) for sign in (1, 0, -1)), len(gains) - len(finite[label]),
         *(group.fmt.signed(average(finite[label])) if finite[label] else "–" for average in (fmean, median))]
        for label, gains in found.items()
    ]  # fmt: skip
    columns = [
        "method", "clients", "gain", undecided_label(group), "lose",
        "diverged (counted as losing)", f"mean gain, {group.fmt.gap_heading} (without diverged)", "median gain",
    ]  # fmt: skip
    summary = _fractions_summary(group, labels, better, worse)
    return Figure("gainers", "Clients that gain and lose", summary, data, layout, Table(columns, rows))


def _fractions_summary(
    group: Comparison, labels: Sequence[str], better: Sequence[float], worse: Sequence[float]
) -> str:
    beyond = {
        "within uncertainty": " (beyond the uncertainty of their own test samples)",
        "no clear difference": " (95 % intervals over redrawn splits exclude 0)",
    }.get(undecided_label(group), "")
    with_any = f"with {method_in_text(labels[0])}" if len(labels) == 1 else "with any method"
    if not max(better):
        gain, lose = f"No client gains {with_any}", "none loses"
    else:
        gain, lose = f"The fraction of clients that gain {_largest(labels, better)}", f"no client loses {with_any}"
    return f"{gain}; {f'the fraction that lose {_largest(labels, worse)}' if max(worse) else lose}{beyond}."


def _largest(labels: Sequence[str], values: Sequence[float]) -> str:
    """Return the methods with the largest value, and the value."""
    if len(labels) == 1:
        return f"is {values[0]:.0f} %"
    top = [label for label, value in zip(labels, values, strict=True) if value == max(values)]
    return f"is largest with {join_names(top, 3)} ({max(values):.0f} %)"


def gain_by_size(group: Comparison) -> Figure | None:
    """Draw each client's gain over its number of training samples, for one method at a time."""
    gains = gains_over_local(group)
    labels = [label for label in gains if _finite(gains[label])][:MAX_METHODS]
    if not labels:
        return None
    named = named_clients(group)
    views = [_gain_points(group, gains[label], named) for label in labels]
    attributes = ["x", "y", "text", "marker.color", "marker.symbol"]
    attributes += [*_ERROR_BARS, "textposition"] if group.is_repeated else []
    data = [{
        "type": "scatter", "mode": "markers", "x": views[0]["x"], "y": views[0]["y"], "text": views[0]["text"],
        "marker": {"size": 9, "opacity": 0.75, "color": views[0]["marker.color"], "symbol": views[0]["marker.symbol"]},
        "showlegend": False, "hovertemplate": "%{text}: %{y:+.3~g}, %{x} samples<extra></extra>",
    } | _intervals_and_names(group, views[0])]  # fmt: skip
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
    summary = _gains_summary(group, labels[0], gains[labels[0]], named)
    between = undecided_label(group)
    legend = {name: _MARKERS[direction] for name, direction in (("gain", 1), (between, 0), ("loss", -1))}
    table = _gains_table(group, {label: gains[label] for label in labels}, named)
    title = "Gain over local training by client size"
    return Figure("gains", title, summary, data, layout, table, (), choices, legend)


def _gain_points(group: Comparison, gains: Gains, named: NamedClients) -> dict[str, list[Any]]:
    finite = _finite(gains)
    ordered = evenly_spaced(sorted(finite, key=lambda client: finite[client].gain), MAX_POINTS)  # includes extremes
    shown = [finite[client] for client in ordered]
    return {
        "x": [_train_size(named, client) for client in ordered],
        "y": [round_digits(group.fmt.factor * one.gain) for one in shown],
        "text": [named[client][1] for client in ordered],
        "marker.color": [_MARKERS[one.direction]["color"] for one in shown],
        "marker.symbol": [_MARKERS[one.direction]["symbol"] for one in shown],
        "textposition": _label_sides([_train_size(named, client) for client in ordered]),
        **{name: [_half_widths(group, one)[side] for one in shown] for side, name in enumerate(_ERROR_BARS)},
    }


def _intervals_and_names(group: Comparison, view: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return the intervals of the clients' gains as error bars, if there are any, and the names of a few clients."""
    if not group.is_repeated:
        return {}
    ends = {name.partition(".")[2]: view[name] for name in _ERROR_BARS}
    bars = {"type": "data", "symmetric": False, "thickness": 1.6, "width": 0, "color": "#8a8a8a"} | ends
    mode = "markers+text" if len(view["x"]) <= _MAX_LABELS else "markers"
    return {"error_y": bars, "mode": mode, "textposition": view["textposition"]}


def _label_sides(sizes: Sequence[int]) -> list[str]:
    """Return where the names of points are written: towards the middle of the figure."""
    middle = (min(sizes) + max(sizes)) / 2
    return ["middle left" if size > middle else "middle right" for size in sizes]


def _half_widths(group: Comparison, one: ClientGain) -> tuple[float | None, float | None]:
    """Return the distances from the gain to the upper and the lower end of its interval."""
    low, high = (one.test.interval if one.test is not None else None) or (one.gain, one.gain)
    return round_digits(group.fmt.factor * (high - one.gain)), round_digits(group.fmt.factor * (one.gain - low))


def _train_size(named: NamedClients, client: Client) -> int:
    return int(named[client][0].run.info["clients"][client[1]]["train"])


def _gains_summary(group: Comparison, label: str, gains: Gains, named: NamedClients) -> str:
    """Compare the half of clients with fewer samples with the other half."""
    finite = {client: one.gain for client, one in _finite(gains).items()}
    ordered = sorted(finite, key=lambda client: _train_size(named, client))
    missing = len(gains) - len(finite)
    omitted = f"; {count_of(missing, 'client')} diverged and are not drawn" if missing else ""
    half = len(ordered) // 2
    if not half:
        return f"With {label}, the gain of the only client is {gain_text(group, finite[ordered[0]])}{omitted}."
    small, large = (fmean(finite[client] for client in part) for part in (ordered[:half], ordered[-half:]))
    within = {
        "within uncertainty": "; ● within the uncertainty of the client's test samples",
        "no clear difference": "; ● no clear difference; bars: 95 % intervals over redrawn splits",
    }.get(undecided_label(group), "")
    return (
        f"With {label}, the mean gain is {gain_text(group, small)} for the half of the clients with fewer samples and "
        f"{gain_text(group, large)} for the half with more samples (▲ gain, ▼ loss{within}){omitted}."
    )


def _gains_table(group: Comparison, gains: Mapping[str, Gains], named: NamedClients) -> Table:
    first = next(iter(gains.values()))
    ordered = sorted(first, key=lambda client: -first[client].gain)
    shown = ordered if len(ordered) <= MAX_ROWS else [*ordered[: MAX_ROWS // 2], *ordered[-MAX_ROWS // 2 :]]
    rows = []
    for client in shown:
        values = [_format_gain(group, own.get(client)) for own in gains.values()]
        rows.append([named[client][1], _train_size(named, client), *values])
    return Table(["client", "training samples", *(f"gain with {label}" for label in gains)], rows)


def _format_gain(group: Comparison, one: ClientGain | None) -> str:
    if one is None or not isfinite(one.gain):
        return "–" if one is None else "diverged"
    gain, interval = group.fmt.signed(one.gain), None if one.test is None else one.test.interval
    return gain if interval is None else f"{gain} ({' to '.join(map(group.fmt.signed, interval))})"
