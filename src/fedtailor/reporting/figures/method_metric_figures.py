"""Figures of the methods' metrics: layer conflicts (FedLAG), residuals (FedAPM), variances and gains (Self-FL), and all
other metrics that methods record.

A custom method may use the same metric names for other quantities. Each figure is therefore drawn only if the recorded
values have the shape that it needs.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from math import isfinite
from statistics import median
from typing import Any

import numpy as np

from fedtailor.analysis.comparability import client_labels, first_seed_runs, is_local_baseline
from fedtailor.analysis.formatting import ScoreFormat, format_p, percent, round_digits, shorten
from fedtailor.analysis.statistics import SIGNIFICANCE_LEVEL, rank_correlation
from fedtailor.reporting.figures.drawing import log_axis, round_trace, rounds_layout
from fedtailor.reporting.figures.figure import COLORS, Figure, Table
from fedtailor.reporting.figures.method_metrics import (
    array_metric,
    band_figure,
    client_metric,
    remaining_metrics_figure,
    scalar_metric,
)
from fedtailor.runs.run import Run

_MAX_LINES = 10
DrawnMetrics = tuple[Figure | None, Sequence[str]]  # a figure, and the metrics that need no other figure


def draw_method_metrics(runs: Sequence[Run], local_runs: Sequence[Run] = ()) -> list[Figure]:
    """Return the figures of the method metrics of each method's first seed.

    Actual gains are drawn if local training is among `runs` or `local_runs`.
    """
    figures: list[Figure] = []
    for run in first_seed_runs(runs):
        shown: list[str] = []
        local = next((other for other in [*runs, *local_runs] if is_local_baseline(other, run)), None)
        drawn = [draw(run) for draw in (_conflicts, _residual, _drift, _variances, _steps)] + [_gains(run, local)]
        for figure, names in drawn:
            figures += [figure] if figure is not None else []
            shown += names
        rest = remaining_metrics_figure(run, shown)
        figures += [rest] if rest is not None else []
    return figures


# ---- FedLAG


def _conflicts(run: Run) -> DrawnMetrics:
    """Draw the fraction of client pairs in conflict, per layer."""
    used = ("conflicts", "personal")
    counts, chosen = (array_metric(run, name) for name in used)
    pairs = {record["round"]: len(record["clients"]) * (len(record["clients"]) - 1) / 2 for record in run.records}
    rounds = [number for number in counts if number in chosen and pairs.get(number)]
    sizes = {len(arrays[number]) for arrays in (counts, chosen) for number in rounds}
    if len(sizes) != 1 or not max(sizes):
        return None, ()
    (layers,) = sizes
    known = [shorten(str(name)) for name in run.info.get("layers", [])]
    names = known if len(known) == layers else [f"layer {k + 1}" for k in range(layers)]
    fractions = {n: counts[n] / pairs[n] for n in rounds}
    personal = {n: [name for k, name in enumerate(names) if chosen[n][k] > 0] for n in rounds}
    top = sorted(range(layers), key=lambda k: -sum(fractions[n][k] for n in rounds))[:_MAX_LINES]
    data: list[dict[str, Any]] = []
    for k in sorted(top):
        sizes_of_markers = [10 if chosen[n][k] > 0 else 4 for n in rounds]
        trace = round_trace(names[k], {n: float(fractions[n][k]) for n in rounds}, len(data))
        data.append(trace | {"mode": "lines+markers", "marker": {"size": sizes_of_markers}})
    last = rounds[-1]
    most = int(np.argmax(fractions[last]))
    summary = (
        f"In round {last}, the clients of {run.method_title} conflict most in {names[most]} "
        f"({percent(fractions[last][most])} of client pairs); personal layers: {', '.join(personal[last]) or 'none'}."
    )
    rows = [[n, *(percent(fraction) for fraction in fractions[n]), ", ".join(personal[n])] for n in rounds]
    title = "client pairs in conflict"
    layout = rounds_layout(title, rounds)
    layout["yaxis"] |= {"tickformat": ".0%"}
    return Figure(f"conflicts-{run.method}", f"Layer conflicts: {run.method_title} (large markers: personal layers)",
                  summary, data, layout, Table(["round", *names, "personal layers"], rows)), used  # fmt: skip


# ---- FedAPM


def _residual(run: Run) -> DrawnMetrics:
    """Draw the stationarity residual, and the Lyapunov value, which should never increase."""
    found = {name: scalar_metric(run, name) for name in ("residual", "lyapunov")}
    series = {name: values for name, values in found.items() if values}
    if "residual" not in series:
        return None, ()
    titles = {"residual": "residual", "lyapunov": "Lyapunov value"}
    data = [round_trace(titles[name], values, k) for k, (name, values) in enumerate(series.items())]
    residual = list(series["residual"].values())
    layout = rounds_layout("residual", series["residual"]) | {"showlegend": False}
    summary = f"The residual of {run.method_title} changes from {residual[0]:.3g} to {residual[-1]:.3g}"
    if "lyapunov" in series:
        values = list(series["lyapunov"].values())
        increases = sum(later > before for before, later in pairwise(values))
        steps = f"{increases} of {len(values) - 1} steps" if increases else "no step"
        summary += f"; the Lyapunov value changes from {values[0]:.3g} to {values[-1]:.3g} and increases in {steps}"
        data[1]["yaxis"] = "y2"
        layout["yaxis"] |= {"domain": [0.56, 1]}
        layout["xaxis"] |= {"anchor": "y2"}
        layout["yaxis2"] = {"title": {"text": "Lyapunov value"}} | log_axis(values) | {"domain": [0, 0.44]}
    layout["yaxis"] |= log_axis(residual)
    rows = [[n, *(f"{values.get(n, float('nan')):.4g}" for values in series.values())] for n in series["residual"]]
    title = "Residual and Lyapunov value" if "lyapunov" in series else "Residual"
    table = Table(["round", *(titles[name] for name in series)], rows)
    return Figure(f"residual-{run.method}", f"{title}: {run.method_title}", summary + ".", data, layout,
                  table), list(series)  # fmt: skip


def _drift(run: Run) -> DrawnMetrics:
    if not scalar_metric(run, "residual"):
        return None, ()
    return band_figure(
        run, "drift", client_metric(run, "drift"), "Drift of clients from the shared parameters", "‖uᵢ − u‖",
        lambda first, last: f"The median drift of {run.method_title}'s clients is {last:.3g} in the last round and was "
        f"{first:.3g} in the first round.",
    ), ("drift",)  # fmt: skip


# ---- Self-FL


def _variances(run: Run) -> DrawnMetrics:
    """Draw the variances within clients, σ_m², and between clients, σ_0²."""
    known = {n: [float(v) for v in array if v >= 0] for n, array in array_metric(run, "variances").items()}
    within, between = {n: values for n, values in known.items() if values}, scalar_metric(run, "between")
    figure = band_figure(run, "uncertainties", within, "Variance within and between clients", "variance", lambda *_: "")
    if figure is None or not between:
        # Self-FL records −1 for unknown variances; if all are unknown, no other figure should draw them either.
        return None, ("variances",) if known and between and not within else ()
    last_within, last_between = median(within[max(within)]), list(between.values())[-1]
    larger, use = ("larger", "local data") if last_between > last_within else ("smaller", "other clients")
    summary = (
        f"In the last round, the variance between clients (σ₀² = {last_between:.3g}) is {larger} than the median "
        f"variance within clients (σₘ² = {last_within:.3g}), so {run.method_title} relies more on {use}."
    )
    data = [*figure.data, round_trace("between clients, σ₀²", between, 1)]
    rows = [[*row, f"{between.get(int(row[0]), float('nan')):.4g}"] for row in figure.table.rows]
    all_values = [*between.values(), *chain.from_iterable(within.values())]
    layout = dict(figure.layout) | {"yaxis": figure.layout["yaxis"] | log_axis(all_values)}
    table = Table([*figure.table.columns, "between clients"], rows)
    return replace(figure, summary=summary, data=data, layout=layout, table=table), ("variances", "between")


def _steps(run: Run) -> DrawnMetrics:
    if not array_metric(run, "gains", run.num_clients):
        return None, ()
    return band_figure(
        run, "steps", client_metric(run, "steps"), "Local steps", "steps per round",
        lambda first, last: f"The median client of {run.method_title} takes {last:.0f} steps in the last round and "
        f"took {first:.0f} in the first round.",
    ), ("steps",)  # fmt: skip


def _gains(run: Run, local: Run | None) -> DrawnMetrics:
    """Draw the gain that Self-FL predicts for each client and the actual gain over local training."""
    found = array_metric(run, "gains", run.num_clients)
    if not found or not scalar_metric(run, "between"):
        return None, ()
    names, predicted = client_labels(run), found[max(found)]
    fmt, sign = ScoreFormat(run.info["score"]), 1 if run.info["higher_is_better"] else -1
    baseline, scores = ({} if one is None else one.scores(one.info["ranked_by"]) for one in (local, run))
    actual = {
        c: sign * (scores[c] - baseline[c]) for c in scores if c in baseline and isfinite(scores[c] - baseline[c])
    }
    clients = [c for c in range(len(names)) if isfinite(predicted[c]) and (c in actual or not actual)]
    if not clients:
        return None, ()
    top = max(clients, key=lambda client: predicted[client])
    same = len(clients) > 1 and len({float(predicted[client]) for client in clients}) == 1
    prediction = "the same gain for all clients" if same else f"the largest gain for {names[top]}"
    summary = f"{run.method_title} predicts {prediction} (GAIN {predicted[top]:.3g})"
    x, y = predicted[clients], np.array([actual.get(client, 0.0) for client in clients])
    if actual and (correlated := rank_correlation(x, y)) is not None:
        correlation, p = correlated
        kind = "positively" if correlation > 0 else "negatively"
        kind = f"{kind} correlated" if p < SIGNIFICANCE_LEVEL else "not significantly correlated"
        summary += f"; predicted and actual gains are {kind} (rank correlation {correlation:.2f}, {format_p(p)})"
    elif not actual:
        summary += "; actual gains are unknown, because local training with this seed is not among these runs"
    trace = {
        "type": "scatter", "mode": "markers", "x": [round_digits(v) for v in x],
        "y": [round_digits(fmt.factor * v) for v in y], "text": [names[client] for client in clients],
        "marker": {"color": COLORS[0], "size": 8, "opacity": 0.8}, "showlegend": False,
        "hovertemplate": "%{text}: predicted %{x:.3g}, actual %{y:.3g}<extra></extra>",
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "predicted gain (GAIN)"}},
        "yaxis": {"title": {"text": f"gain over local training ({fmt.gap_heading})"}},
    }
    rows = [[names[c], f"{predicted[c]:.4g}", fmt.signed(actual.get(c))] for c in clients]
    table = Table(["client", "predicted gain (GAIN)", f"actual gain, {fmt.gap_heading}"], rows)
    title = f"Predicted and actual gains: {run.method_title}"
    return Figure(f"gains-{run.method}", title, summary + ".", [trace], layout, table), ("gains",)
