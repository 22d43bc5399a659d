"""Figures of the cost of methods: bytes transferred and training time."""

from collections.abc import Mapping
from math import log10
from statistics import mean
from typing import Any

from fedtailor.analysis.formatting import format_bytes, format_duration, format_megabytes, method_in_text, round_digits
from fedtailor.analysis.run_summary import Comparison
from fedtailor.reporting.figures.curves import mean_curve, mean_spent
from fedtailor.reporting.figures.drawing import (
    axis_heading,
    is_muted,
    log_axis,
    method_styles,
    rows_axis,
    rows_height,
    space_out,
)
from fedtailor.reporting.figures.figure import Figure, Table


def total_cost(group: Comparison, label: str) -> dict[str, float]:
    """Return the bytes up and down and the seconds of one run, averaged over seeds."""
    run_summaries = group.methods[label]
    total = mean(run_summary.bytes[-1] if run_summary.bytes else 0 for run_summary in run_summaries)
    up = mean(run_summary.bytes_up for run_summary in run_summaries)
    seconds = mean(run_summary.seconds[-1] if run_summary.seconds else 0.0 for run_summary in run_summaries)
    return {"up": up, "down": total - up, "bytes": total, "seconds": seconds}


def bytes_to_match_local(group: Comparison, label: str) -> float | None:
    """Return the bytes transferred until a method first reaches the final score of local training; None if never."""
    target = None if group.baseline is None else group.score(group.baseline)
    positions, scores = mean_curve(group, label)
    if target is None or label == group.baseline:
        return None
    reached = next((p for p, s in zip(positions, scores, strict=True) if group.sign * (s - target) >= 0), None)
    return None if reached is None else 1e6 * mean_spent(group, label, "bytes", [reached])[0]


def cost_sentences(group: Comparison) -> list[str]:
    """Return the answer to "What did it cost?"."""
    costs = {label: total_cost(group, label) for label in group.methods}
    best = next(iter(costs))
    answer = [
        _best_cost_sentence(
            best, costs[best], max(1, mean(run_summary.num_selected for run_summary in group.methods[best]))
        )
    ]
    senders = [label for label in costs if costs[label]["bytes"] > 0]
    if len(senders) > 1:
        low, high = (choose(senders, key=lambda label: costs[label]["bytes"]) for choose in (min, max))
        least, most = (format_bytes(costs[label]["bytes"]) for label in (low, high))
        answer.append(
            f"All methods that communicate transfer {least} in total."
            if least == most
            else f"Among the methods that communicate, {low} transfers the least ({least} in total) and {high} the "
            f"most ({most})."
        )
    if len(costs) > 1:
        low, high = (choose(costs, key=lambda label: costs[label]["seconds"]) for choose in (min, max))
        least, most = (format_duration(costs[label]["seconds"]) for label in (low, high))
        if least != most:
            answer.append(f"{low} trains fastest ({least}); {method_in_text(high)} takes longest ({most}).")
    engines = {(run_summary.run.info["engine"], run_summary.run.info["device"]) for run_summary in group.summaries}
    if len(engines) > 1:
        names = ", ".join(sorted(f"{engine} on {device}" for engine, device in engines))
        answer.append(f"The runs used different engines or devices ({names}), so times are only roughly comparable.")
    return answer


def _best_cost_sentence(best: str, cost: dict[str, float], participations: float) -> str:
    time = format_duration(cost["seconds"])
    if not cost["bytes"]:
        return f"{best} transfers no data and trains for {time}."
    total, up, down = (format_bytes(cost[key]) for key in ("bytes", "up", "down"))
    return (
        f"{best} transfers {total} in total ({up} up, {down} down), {format_bytes(cost['bytes'] / participations)} per "
        f"selected client and round, and trains for {time}."
    )


def score_by_bytes(group: Comparison) -> Figure | None:
    """Draw the final scores over the bytes transferred."""
    totals = {label: total_cost(group, label)["bytes"] for label in group.methods if group.score(label) is not None}
    senders = {label: total for label, total in totals.items() if total > 0}
    if not senders or len(group.methods) < 2:
        return None
    styles, factor = method_styles(group), group.fmt.factor
    scores = {label: factor * (group.score(label) or 0) for label in totals}
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "markers", "x": [round_digits(total / 1e6)], "y": [round_digits(scores[label])],
            "name": label, "text": [label], "marker": {"size": 11, "color": styles[label]["color"]},
            "showlegend": False, "hovertemplate": "%{text}: %{y:.4~g}, %{x:.3~g} MB<extra></extra>",
            "cliponaxis": False,
        }
        for label, total in senders.items()
    ]  # fmt: skip
    log = log_axis(total / 1e6 for total in senders.values())
    annotations = [
        axis_heading(f"{group.fmt.heading} (last round)"),
        *_method_names(group, senders, scores, bool(log)),
    ]
    shapes = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": scores[label], "y1": scores[label],
         "line": {"color": styles[label]["color"], "width": 1.4, "dash": "dash"}}
        for label in totals if label not in senders
    ]  # fmt: skip
    layout = {
        "height": 420, "annotations": annotations, "shapes": shapes, "margin": {"t": 34},
        "xaxis": {"title": {"text": "total megabytes transferred (up and down)"}, "zeroline": False}
        | (log or {"rangemode": "tozero"}), "yaxis": {"zeroline": False},
    }  # fmt: skip
    title = f"{group.fmt.title} and bytes transferred"
    return Figure("bytes", title, _bytes_summary(group, senders), data, layout, _cost_table(group))


def _method_names(
    group: Comparison, senders: Mapping[str, float], scores: Mapping[str, float], log: bool
) -> list[dict[str, Any]]:
    """Return the methods' names next to their points, or above their lines if they send nothing, without overlap."""
    styles, pooled = method_styles(group), [label for label in group.methods if group.is_centralized(label)]
    named = [label for label in scores if not is_muted(styles[label])]
    text_height = (max(scores.values()) - min(scores.values())) / 330 * 16
    wanted = [scores[label] + (0 if label in senders else 0.6 * text_height) for label in named]
    center = (max(senders.values()) + (min(senders.values()) if log else 0)) / 2
    lines = [scores[label] for label in scores if label not in senders]
    annotations = []
    for label, y in zip(named, space_out(wanted, text_height), strict=True):
        annotation: dict[str, Any] = {"showarrow": False, "y": round_digits(y), "font": {"size": 12}}
        if label in senders:
            left, x = senders[label] > center, senders[label] / 1e6
            annotation |= {"text": label}  # next to its dot
            annotation |= {"x": round_digits(log10(x) if log else x)}
            annotation |= {"xanchor": "right" if left else "left", "xshift": -9 if left else 9}
            crossing = next((line for line in lines if abs(line - y) < text_height / 2), None)
            annotation |= {} if crossing is None else {"yshift": 10 if y >= crossing else -10}
        else:
            near = [
                senders[other] > center for other in senders if abs(scores[other] - scores[label]) < 2 * text_height
            ]
            left = 2 * sum(near) >= len(near)  # the side with fewer points
            annotation |= {"text": f"{label}{'' if label in pooled else ' (transfers no data)'}", "xref": "paper"}
            annotation |= {"x": 0 if left else 1, "xanchor": "left" if left else "right"}
        annotations.append(annotation)
    return annotations


def _bytes_summary(group: Comparison, senders: dict[str, float]) -> str:
    best, cheapest = next(iter(senders)), min(senders, key=lambda label: senders[label])  # on a tie, the better one
    total, start = format_bytes(senders[best]), f"Among the methods that communicate, {best} ranks first"
    if best == cheapest:
        unique = sum(other == senders[best] for other in senders.values()) == 1
        return f"{start} and {'transfers the least' if unique else 'no other method transfers less'} ({total})."
    gap = group.sign * ((group.score(best) or 0) - (group.score(cheapest) or 0))
    return (
        f"{start} with {total}; the cheapest, {cheapest}, transfers {100 * senders[cheapest] / senders[best]:.0f} % of "
        f"that and is {group.fmt.gap(gap)} {'worse' if gap >= 0 else 'better'} on test data."
    )


def training_time(group: Comparison) -> Figure | None:
    """Draw the training time per method; return None if there is only one method."""
    if len(group.methods) < 2:
        return None
    labels = sorted(group.methods, key=lambda label: total_cost(group, label)["seconds"])
    values = [total_cost(group, label)["seconds"] for label in labels]
    styles = method_styles(group)
    data = [{
        "type": "bar", "orientation": "h", "y": labels, "x": [round_digits(value) for value in values],
        "showlegend": False, "marker": {"color": [styles[label]["color"] for label in labels]},
        "text": [format_duration(value) for value in values], "textposition": "outside", "cliponaxis": False,
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }]  # fmt: skip
    layout = {
        "height": rows_height(len(labels)), "yaxis": rows_axis(labels), "bargap": 0.4,
        "xaxis": {"title": {"text": "seconds of training per run"}, "range": [0, 1.15 * (max(values) or 1)]},
    }  # fmt: skip
    fastest, slowest = labels[0], labels[-1]
    ratio = values[-1] / values[0] if values[0] > 0 else 0
    summary = f"{slowest} trains for {format_duration(values[-1])} per run"
    if ratio >= 1.05:
        summary += f", {ratio:.1f} times as long as {method_in_text(fastest)}; methods take different numbers of steps."
    else:
        summary += ", hardly longer than the other methods." if ratio else "."
    return Figure("seconds", "Training time", summary, data, layout, _cost_table(group))


def _cost_table(group: Comparison) -> Table:
    rows = []
    for label in group.methods:
        cost, reached = total_cost(group, label), bytes_to_match_local(group, label)
        until_local = "never" if reached is None else format_megabytes(reached)
        epsilon = next((d.epsilon for d in group.methods[label] if d.epsilon is not None), None)
        rows.append([
            label, group.fmt.plain(group.score(label)), format_megabytes(cost["up"]), format_megabytes(cost["down"]),
            f"{cost['seconds']:.2f}", "" if group.baseline in (None, label) else until_local,
            "" if epsilon is None else f"{epsilon:.3g}",
        ])  # fmt: skip
    columns = ["method", group.fmt.heading, "MB up", "MB down", "seconds", "MB until as good as local training", "ε"]
    keep = [k for k in range(len(columns)) if k < 5 or any(row[k] for row in rows)]
    return Table([columns[k] for k in keep], [[row[k] for k in keep] for row in rows])
