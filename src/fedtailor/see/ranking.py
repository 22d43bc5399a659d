"""Which method is best: the ranking, and the lead of the best over the others."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from fedtailor.run import MOMENTS
from fedtailor.scale import counted
from fedtailor.see.digest import Group
from fedtailor.see.drawing import capital, lines, rows_axis, rows_height, said, short
from fedtailor.see.figure import Figure, Table
from fedtailor.see.verdict import Lead


def ranking(group: Group) -> Figure:
    """Every method's score at both moments, with its interval over seeds."""
    style, labels, factor = lines(group), list(group.methods), group.scale.factor
    dots = [
        {
            "type": "scatter", "mode": "markers", "x": [short(factor * x) for x in scores], "y": [label] * len(scores),
            "orientation": "h", "offsetgroup": "trained", "showlegend": False,
            "marker": {"color": style[label]["color"], "size": 5, "opacity": 0.45},
            "hovertemplate": "%{y}, one seed: %{x:.4~g}<extra></extra>",
        }
        for label in labels if len(scores := list(filter(isfinite, group.scores(label)))) > 1
    ]  # fmt: skip
    data: list[dict[str, Any]] = []
    for moment in MOMENTS:  # the first lies below the second
        known = [label for label in labels if group.score(label, moment) is not None]
        middles = [factor * (group.score(label, moment) or 0) for label in known]
        colours = [style[label]["color"] for label in known]
        marker: dict[str, Any] = {"size": 11, "color": colours, "line": {"width": 0}}
        if moment == "received":
            marker = {"size": 10, "color": colours, "symbol": "circle-open", "line": {"width": 1.6}}
        data += dots if moment == "trained" else []
        data.append({
            "type": "scatter", "mode": "markers", "name": moment, "y": known, "marker": marker, "orientation": "h",
            "x": [short(x) for x in middles], "offsetgroup": moment,
            "hovertemplate": f"%{{y}}, {moment}: %{{x:.4~g}}<extra></extra>",
        } | _bars(middles, [group.interval(label, moment) for label in known], factor))  # fmt: skip
    layout = {
        "height": rows_height(len(labels)), "yaxis": rows_axis(labels), "showlegend": False,
        "xaxis": {"title": {"text": group.scale.heading}, "zeroline": False, "range": _range(group)},
        "scattermode": "group",
    }  # fmt: skip
    return Figure("ranking", "The ranking", _says_ranking(group), data, layout, _ranking_table(group))


def _range(group: Group) -> list[float | None]:
    """From the least to the most that is drawn, and a little beyond."""
    known = [(label, moment) for label in group.methods for moment in MOMENTS if group.score(label, moment) is not None]
    found = [x for pair in known for x in (*group.scores(*pair), *(group.interval(*pair) or ()))] or [0.0, 1.0]
    beyond = 0.05 * (max(found) - min(found)) or 0.05 * abs(max(found)) or 1.0
    return [short(group.scale.factor * x) for x in (min(found) - beyond, max(found) + beyond)]


def _bars(middles: Sequence[float], ends: Sequence[tuple[float, float] | None], factor: float) -> dict[str, Any]:
    """Intervals to both sides of dots, where there are some."""
    if not any(ends):
        return {}
    up = [factor * pair[1] - x if pair else 0 for x, pair in zip(middles, ends, strict=True)]
    down = [x - factor * pair[0] if pair else 0 for x, pair in zip(middles, ends, strict=True)]
    return {"error_x": {
        "type": "data", "symmetric": False, "array": [short(x) for x in up], "arrayminus": [short(x) for x in down],
        "thickness": 1.6, "width": 0, "color": "#8a8a8a",
    }}  # fmt: skip


def _says_ranking(group: Group) -> str:
    scored = group.scored
    if not scored:
        return "No run has a score as trained in its last round."
    best, last, scale = scored[0], scored[-1], group.scale
    drawn = f" (full dots: trained; rings: received; {_about_bars(group)})."
    if len(scored) == 1:
        return f"{capital(said(best))} ends with {scale.text(group.score(best))}{drawn}"
    gap = abs((group.score(best) or 0) - (group.score(last) or 0))
    middle = ""
    if group.alone in scored and group.alone not in (best, last):
        place = scored.index(group.alone) + 1
        middle = f"; training alone is number {place} of {len(scored)} with {scale.text(group.score(group.alone))}"
    return (
        f"{capital(said(best))} ends with {scale.text(group.score(best))}, {scale.gap(gap)} from {said(last)}, the last"
        f"{middle}{drawn}"
    )


def _about_bars(group: Group) -> str:
    counts = [len(group.scores(label)) for label in group.scored]
    if max(counts) < 2:
        return "one seed, so there is no interval over seeds"
    many = f"{max(counts)} seeds" if min(counts) == max(counts) else "their seeds"
    shared = "; what is hard in a seed is hard for all, so bars may overlap where a lead is sure"
    return f"bars: 95 % intervals of the mean over {many}; small dots: each seed{shared if len(counts) > 1 else ''}"


def _ranking_table(group: Group) -> Table:
    heads = ["method"]
    for moment in reversed(MOMENTS):
        heads += [f"{moment}, {group.scale.heading}", "95 % from", "to"]
    rows = []
    for label in group.methods:
        row: list[Any] = [label]
        for moment in reversed(MOMENTS):
            ends = group.interval(label, moment) or (None, None)
            row += [group.scale.plain(value) for value in (group.score(label, moment), *ends)]
        rows.append([*row, len(group.methods[label])])
    return Table([*heads, "seeds"], rows)


def against_best(group: Group, found: Sequence[Lead]) -> Figure | None:
    """The lead over every other method with its interval, paired over clients."""
    known = [lead for lead in found if lead.over_clients is not None]
    if not known:
        return None
    best, factor = group.scored[0], group.scale.factor
    style, labels = lines(group), [lead.other for lead in known]
    data = []
    for sure, symbol in ((True, "circle"), (False, "circle-open")):
        some = [
            (lead.other, lead.over_clients) for lead in known if lead.is_more_than_chance == sure and lead.over_clients
        ]
        middles = [factor * pair.mean for _, pair in some]
        ends = [None if pair.low is None or pair.high is None else (pair.low, pair.high) for _, pair in some]
        data.append({
            "type": "scatter", "mode": "markers", "x": [short(x) for x in middles], "y": [label for label, _ in some],
            "name": "more than chance" if sure else "within chance",
            "marker": {"color": [style[label]["color"] for label, _ in some], "size": 10, "symbol": symbol,
                       "line": {"width": 0 if sure else 2}},
            "hovertemplate": "%{y}: %{x:.3~g} behind<extra></extra>",
        } | _bars(middles, ends, factor))  # fmt: skip
    layout = {
        "height": rows_height(len(labels)), "yaxis": rows_axis(labels), "showlegend": False,
        "xaxis": {"title": {"text": f"its lead: {group.scale.gap_heading}"}, "zeroline": True},
    }  # fmt: skip
    return Figure("against-best", f"How sure is the lead of {said(best)}?", _says_leads(best, known), data, layout,
                  _leads_table(group, known))  # fmt: skip


def _says_leads(best: str, known: Sequence[Lead]) -> str:
    behind = sum(lead.is_more_than_chance for lead in known)
    bars = "bars: 95 % intervals of the mean difference over clients, of each pair alone"
    if all(lead.few for lead in known):
        return f"Client by client, {known[0].few} from the lead of {said(best)} ({bars})."
    clients = max(lead.over_clients.clients for lead in known if lead.over_clients)
    many = f"{behind} of the {len(known)} other methods {'is' if behind == 1 else 'are'}"
    many = many if len(known) > 1 else f"{'1' if behind else 'no'} other is"
    return (
        f"Client by client, over up to {counted(clients, 'pair')}, {many} behind {said(best)} by more than chance "
        f"(full dots; {bars})."
    )


def _leads_table(group: Group, known: Sequence[Lead]) -> Table:
    heads = [
        "method", f"behind by, {group.scale.gap_heading}", "95 % from", "to", "p", "p, Holm",
        "clients better with the best", "worse", "every client alike: behind by", "p, Holm",
        "seeds the best is ahead in",
    ]  # fmt: skip
    rows = []
    for lead in known:
        pair, alike = lead.over_clients, lead.alike
        assert pair is not None and alike is not None
        rows.append([
            lead.other, *(group.scale.signed(value) for value in (pair.mean, pair.low, pair.high)), f"{pair.p:.2g}",
            f"{lead.p:.2g}", f"{pair.better} of {pair.clients}", pair.worse, group.scale.signed(alike.mean),
            f"{lead.p_alike:.2g}", f"{lead.seeds_ahead} of {lead.seeds}",
        ])  # fmt: skip
    return Table(heads, rows)
