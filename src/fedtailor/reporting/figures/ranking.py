"""Figures of the ranking of methods, and of the lead of the best method over the others."""

from collections.abc import Sequence
from math import isfinite
from statistics import fmean
from typing import Any

from fedtailor.analysis.client_gains import client_gains
from fedtailor.analysis.comparison import PairwiseDifference, Ranking
from fedtailor.analysis.formatting import method_in_text, round_digits
from fedtailor.analysis.run_summary import Comparison
from fedtailor.analysis.statistics import MIN_SEEDS
from fedtailor.analysis.verdict import moments
from fedtailor.reporting.figures.drawing import method_styles, rows_axis, rows_height
from fedtailor.reporting.figures.figure import Figure, Table
from fedtailor.runs.run import MOMENTS


def ranking(group: Comparison) -> Figure:
    """Draw the scores of all methods at both moments, with intervals over seeds."""
    styles, labels, factor = method_styles(group), list(group.methods), group.fmt.factor
    seed_dots = [
        {
            "type": "scatter", "mode": "markers", "x": [round_digits(factor * x) for x in scores],
            "y": [label] * len(scores), "orientation": "h", "offsetgroup": group.ranked_by(label), "showlegend": False,
            "marker": {"color": styles[label]["color"], "size": 5, "opacity": 0.45},
            "hovertemplate": f"%{{y}}, one {group.unit}: %{{x:.4~g}}<extra></extra>",
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
        data += seed_dots if moment == MOMENTS[-1] else []
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
    legend = {"trained": {"symbol": "circle"}, "received": {"symbol": "circle-open"}}
    return Figure("ranking", "Ranking", _ranking_summary(group), data, layout, _ranking_table(group), legend=legend)


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
    scored = [label for label in group.ranked if group.score(label) is not None]
    if not scored:
        return "No run has a score in its last round."
    best, last, fmt = scored[0], scored[-1], group.fmt
    first = f"{best} ranks first with {fmt.text(group.score(best))}"
    legend = f" ({moments(group)}; filled dots: trained; rings: received; {_interval_note(group)})."
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
    if max(counts) < MIN_SEEDS:
        return f"fewer than {MIN_SEEDS} {group.unit}s, so there are no intervals over {group.unit}s"
    seeds = f"{max(counts)} {group.unit}s" if min(counts) == max(counts) else f"the method's {group.unit}s"
    overlap = (
        "; bars may overlap even if a paired difference is significant, because a hard "
        f"{group.unit} is hard for all methods"
    )
    dots = f"small dots: single {group.unit}s{overlap if len(counts) > 1 else ''}"
    return f"bars: 95 % intervals of the mean over {seeds}; {dots}"


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
    return Table([*columns, f"{group.unit}s"], rows)


def pairwise_figure(group: Comparison) -> Figure | None:
    """Draw the lead of the best method over each other method with its interval over seeds."""
    ranking = group.ranking
    known = [found for found in ranking.differences if found.test.seeds] if ranking else []
    if ranking is None or not known:
        return None
    styles, labels, factor = method_styles(group), [found.other for found in known], group.fmt.factor
    data = []
    for significant, symbol in ((True, "circle"), (False, "circle-open")):
        shown = [found for found in known if (found.direction > 0) == significant]
        means = [factor * found.test.mean for found in shown]
        data.append({
            "type": "scatter", "mode": "markers", "x": [round_digits(x) for x in means],
            "y": [found.other for found in shown], "name": "significant" if significant else "not significant",
            "marker": {"color": [styles[found.other]["color"] for found in shown], "size": 10, "symbol": symbol,
                       "line": {"width": 0 if significant else 2}},
            "hovertemplate": "lead over %{y}: %{x:.3~g}<extra></extra>",
        } | _error_bars(means, [found.test.interval for found in shown], factor))  # fmt: skip
    layout = {
        "height": rows_height(len(labels)), "yaxis": rows_axis(labels), "showlegend": False,
        "xaxis": {"title": {"text": f"lead ({group.fmt.gap_heading})"}, "zeroline": True},
    }  # fmt: skip
    title = f"Lead of {method_in_text(ranking.best)} over the other methods"
    summary, table = _pairwise_summary(ranking, known), _pairwise_table(group, ranking, known)
    legend = {"significant": {"symbol": "circle"}, "not significant": {"symbol": "circle-open"}}
    return Figure("against-best", title, summary, data, layout, table, legend=legend)


def _pairwise_summary(ranking: Ranking, known: Sequence[PairwiseDifference]) -> str:
    best, tested = method_in_text(ranking.best), [found for found in known if found.p is not None]
    seeds = max(found.test.seeds for found in known)
    if seeds < MIN_SEEDS:
        return f"There are not enough {ranking.unit}s to tell whether the lead of {best} is more than chance."
    if not tested:
        return (
            f"The lead of {best} is the same in all {seeds} {ranking.unit}s, for which no significance test is defined."
        )
    worse = sum(found.direction > 0 for found in tested)
    count = f"{worse or 'none'} of the {len(tested)} other methods {'are' if worse > 1 else 'is'}"
    if len(tested) == 1:
        count = f"{method_in_text(tested[0].other)} is{'' if worse else ' not'}"
    bars = f"bars: 95 % intervals of the mean difference over {ranking.unit}s, not corrected for multiple comparisons"
    paired = f"Paired over {seeds} {ranking.unit}s"
    return f"{paired}, {count} significantly worse than {best} (filled dots: significant; {bars})."


def _pairwise_table(group: Comparison, ranking: Ranking, known: Sequence[PairwiseDifference]) -> Table:
    best = method_in_text(ranking.best)
    columns = [
        "method", f"lead, {group.fmt.gap_heading}", "95 % from", "to", "p", "p, Holm-corrected",
        f"{group.unit}s with a lead", "lead, all clients weighted equally", f"clients that gain with {best}",
        f"clients that lose with {best}",
    ]  # fmt: skip
    rows = []
    for found in known:
        test, equal = found.test, [pair for _, pair in group.paired_scores(ranking.best, found.other)]
        unweighted = group.sign * fmean(ours - theirs for ours, theirs in equal)
        directions = [one.direction for one in client_gains(group, ranking.best, found.other).values()]
        rows.append([
            found.other, *(group.fmt.signed(value) for value in (test.mean, *(test.interval or (None, None)))),
            *("–" if p is None else f"{p:.2g}" for p in (test.p, found.p)), f"{found.seeds_won} of {test.seeds}",
            group.fmt.signed(unweighted), f"{directions.count(1)} of {len(directions)}", directions.count(-1),
        ])  # fmt: skip
    return Table(columns, rows)
