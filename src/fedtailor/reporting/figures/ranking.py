"""Figures of the ranking of methods, and of the lead of the best method over the others."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from fedtailor.analysis.formatting import count_of, method_in_text, round_digits
from fedtailor.analysis.run_summary import Comparison
from fedtailor.analysis.verdict import PairwiseDifference
from fedtailor.reporting.figures.drawing import method_styles, rows_axis, rows_height
from fedtailor.reporting.figures.figure import Figure, Table
from fedtailor.runs.run import MOMENTS


def ranking(group: Comparison) -> Figure:
    """Draw the scores of all methods at both moments, with intervals over seeds."""
    styles, labels, factor = method_styles(group), list(group.methods), group.fmt.factor
    seed_dots = [
        {
            "type": "scatter", "mode": "markers", "x": [round_digits(factor * x) for x in scores],
            "y": [label] * len(scores), "orientation": "h", "offsetgroup": "trained", "showlegend": False,
            "marker": {"color": styles[label]["color"], "size": 5, "opacity": 0.45},
            "hovertemplate": "%{y}, one seed: %{x:.4~g}<extra></extra>",
        }
        for label in labels if len(scores := list(filter(isfinite, group.scores(label)))) > 1
    ]  # fmt: skip
    data: list[dict[str, Any]] = []
    for moment in MOMENTS:  # later traces are drawn above earlier ones
        known = [label for label in labels if group.score(label, moment) is not None]
        means = [factor * (group.score(label, moment) or 0) for label in known]
        colors = [styles[label]["color"] for label in known]
        marker: dict[str, Any] = {"size": 11, "color": colors, "line": {"width": 0}}
        if moment == "received":
            marker = {"size": 10, "color": colors, "symbol": "circle-open", "line": {"width": 1.6}}
        data += seed_dots if moment == "trained" else []
        data.append({
            "type": "scatter", "mode": "markers", "name": moment, "y": known, "marker": marker, "orientation": "h",
            "x": [round_digits(x) for x in means], "offsetgroup": moment,
            "hovertemplate": f"%{{y}}, {moment}: %{{x:.4~g}}<extra></extra>",
        } | _error_bars(means, [group.interval(label, moment) for label in known], factor))  # fmt: skip
    layout = {
        "height": rows_height(len(labels)), "yaxis": rows_axis(labels), "showlegend": False,
        "xaxis": {"title": {"text": group.fmt.heading}, "zeroline": False, "range": _axis_range(group)},
        "scattermode": "group",
    }  # fmt: skip
    return Figure("ranking", "Ranking", _ranking_summary(group), data, layout, _ranking_table(group))


def _axis_range(group: Comparison) -> list[float | None]:
    """Return the range of all scores and intervals, plus a margin."""
    known = [(label, moment) for label in group.methods for moment in MOMENTS if group.score(label, moment) is not None]
    values = [x for pair in known for x in (*group.scores(*pair), *(group.interval(*pair) or ()))] or [0.0, 1.0]
    margin = 0.05 * (max(values) - min(values)) or 0.05 * abs(max(values)) or 1.0
    return [round_digits(group.fmt.factor * x) for x in (min(values) - margin, max(values) + margin)]


def _error_bars(
    means: Sequence[float], intervals: Sequence[tuple[float, float] | None], factor: float
) -> dict[str, Any]:
    if not any(intervals):
        return {}
    up = [factor * ends[1] - x if ends else 0 for x, ends in zip(means, intervals, strict=True)]
    down = [x - factor * ends[0] if ends else 0 for x, ends in zip(means, intervals, strict=True)]
    return {"error_x": {
        "type": "data", "symmetric": False, "array": [round_digits(x) for x in up],
        "arrayminus": [round_digits(x) for x in down], "thickness": 1.6, "width": 0, "color": "#8a8a8a",
    }}  # fmt: skip


def _ranking_summary(group: Comparison) -> str:
    scored = group.scored
    if not scored:
        return "No run has a trained score in its last round."
    best, last, fmt = scored[0], scored[-1], group.fmt
    first = f"{best} ranks first with {fmt.text(group.score(best))}"
    legend = f" (filled dots: trained; rings: received; {_interval_note(group)})."
    if len(scored) == 1:
        return f"{best} scores {fmt.text(group.score(best))}{legend}"
    gap = abs((group.score(best) or 0) - (group.score(last) or 0))
    local = ""
    if group.baseline in scored and group.baseline not in (best, last):
        rank = scored.index(group.baseline) + 1
        local = f"; local training ranks number {rank} of {len(scored)} with {fmt.text(group.score(group.baseline))}"
    return f"{first} and {method_in_text(last)} last, {fmt.gap(gap)} worse{local}{legend}"


def _interval_note(group: Comparison) -> str:
    counts = [len(group.scores(label)) for label in group.scored]
    if max(counts) < 2:
        return "one seed, so there are no intervals over seeds"
    seeds = f"{max(counts)} seeds" if min(counts) == max(counts) else "the method's seeds"
    overlap = (
        "; bars may overlap even if a paired difference is significant, because a hard seed is hard for all methods"
    )
    return (
        f"bars: 95 % intervals of the mean over {seeds}; small dots: single seeds{overlap if len(counts) > 1 else ''}"
    )


def _ranking_table(group: Comparison) -> Table:
    columns = ["method"]
    for moment in reversed(MOMENTS):
        columns += [f"{group.fmt.heading} ({moment})", "95 % from", "to"]
    rows = []
    for label in group.methods:
        row: list[Any] = [label]
        for moment in reversed(MOMENTS):
            ends = group.interval(label, moment) or (None, None)
            row += [group.fmt.plain(value) for value in (group.score(label, moment), *ends)]
        rows.append([*row, len(group.methods[label])])
    return Table([*columns, "seeds"], rows)


def pairwise_figure(group: Comparison, leads: Sequence[PairwiseDifference]) -> Figure | None:
    """Draw the lead of the best method over each other method with its interval, paired over clients."""
    known = [lead for lead in leads if lead.weighted is not None]
    if not known:
        return None
    best, factor = group.scored[0], group.fmt.factor
    styles, labels = method_styles(group), [lead.other for lead in known]
    data = []
    for significant, symbol in ((True, "circle"), (False, "circle-open")):
        shown = [(lead.other, lead.weighted) for lead in known if lead.is_significant == significant and lead.weighted]
        means = [factor * pair.mean for _, pair in shown]
        intervals = [None if pair.low is None or pair.high is None else (pair.low, pair.high) for _, pair in shown]
        data.append({
            "type": "scatter", "mode": "markers", "x": [round_digits(x) for x in means],
            "y": [label for label, _ in shown], "name": "significant" if significant else "not significant",
            "marker": {"color": [styles[label]["color"] for label, _ in shown], "size": 10, "symbol": symbol,
                       "line": {"width": 0 if significant else 2}},
            "hovertemplate": "lead over %{y}: %{x:.3~g}<extra></extra>",
        } | _error_bars(means, intervals, factor))  # fmt: skip
    layout = {
        "height": rows_height(len(labels)), "yaxis": rows_axis(labels), "showlegend": False,
        "xaxis": {"title": {"text": f"lead ({group.fmt.gap_heading})"}, "zeroline": True},
    }  # fmt: skip
    title = f"Lead of {method_in_text(best)} over the other methods"
    return Figure("against-best", title, _pairwise_summary(best, known), data, layout, _pairwise_table(group, known))


def _pairwise_summary(best: str, known: Sequence[PairwiseDifference]) -> str:
    worse = sum(lead.is_significant for lead in known)
    bars = "bars: 95 % intervals of the mean difference over clients, not corrected for multiple comparisons"
    if all(lead.too_few_clients for lead in known):
        return f"The lead of {method_in_text(best)} cannot be tested: {known[0].too_few_clients} ({bars})."
    clients = max(lead.weighted.clients for lead in known if lead.weighted)
    count = f"{worse or 'none'} of the {len(known)} other methods {'are' if worse > 1 else 'is'}"
    if len(known) == 1:
        count = f"{method_in_text(known[0].other)} is{'' if worse else ' not'}"
    elif worse == len(known):
        count = f"all {worse} other methods are"
    return (
        f"Paired over up to {count_of(clients, 'client')}, {count} significantly worse than {method_in_text(best)} "
        f"(filled dots: significant; {bars})."
    )


def _pairwise_table(group: Comparison, known: Sequence[PairwiseDifference]) -> Table:
    columns = [
        "method", f"lead, {group.fmt.gap_heading}", "95 % from", "to", "p", "p, Holm-corrected",
        f"clients better with {method_in_text(group.scored[0])}", "clients worse",
        "lead, all clients weighted equally", "p, Holm-corrected", "seeds with a lead",
    ]  # fmt: skip
    rows = []
    for lead in known:
        pair, alike = lead.weighted, lead.unweighted
        assert pair is not None and alike is not None
        rows.append([
            lead.other, *(group.fmt.signed(value) for value in (pair.mean, pair.low, pair.high)), f"{pair.p:.2g}",
            f"{lead.p:.2g}", f"{pair.better} of {pair.clients}", pair.worse, group.fmt.signed(alike.mean),
            f"{lead.p_unweighted:.2g}", f"{lead.seeds_won} of {lead.seeds}",
        ])  # fmt: skip
    return Table(columns, rows)
