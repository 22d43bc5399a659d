"""What the live page shows of runs: one that goes on, or several beside each other."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np

from fedtailor.errors import Refused
from fedtailor.run import MOMENTS
from fedtailor.scale import Scale, counted
from fedtailor.see.curves import curves
from fedtailor.see.digest import Curve, Digest, Group, groups, ranked
from fedtailor.see.drawing import duration, evenly, short, size
from fedtailor.see.figure import COLOURS, Figure, Table
from fedtailor.see.ranking import ranking
from fedtailor.see.trail import Trail
from fedtailor.see.verdict import leads, which_is_best
from fedtailor.see.watched import Watched
from fedtailor.toml import flat

MOST = 40  # runs that are compared at once
_POINTS = 400  # of a line
LINES = {  # how the two moments are drawn everywhere
    "trained": {"color": COLOURS[0], "width": 2.2},
    "received": {"color": COLOURS[1], "width": 2.2, "dash": "dash"},
}


def opened(run: Watched) -> dict[str, Any]:
    """A run: its curve, who failed, and what was asked for."""
    trail = run.trail  # as it is now: the run is read while we look
    if run.info is None or trail is None:
        says = "It is loading its data." if run.state == "starting" else "It ended before it began."
        return {"row": run.row(), "figures": [], "lost": [], "settings": _asked(run), "says": says}
    figure = _progress(run, trail)
    return {
        "row": run.row(), "figures": [figure.plain()] if figure else [], "lost": _lost(run, trail),
        "settings": _asked(run) | {f"run.{k}": run.info[k] for k in ("engine", "device", "torch", "parameters")
                                           if k in run.info},
        "says": _about(run, trail),
    }  # fmt: skip


def check_ticked(names: Sequence[str]) -> None:
    """Refuse too few runs and too many."""
    if len(names) < 2:
        raise Refused("Tick two runs or more to compare them.")
    if len(names) > MOST:
        raise Refused(f"At most {MOST} runs are compared here, not {len(names)}; fedtailor report takes more.")


def compared(runs: Sequence[Watched]) -> dict[str, Any]:
    """Several runs, all after as many rounds as the slowest of them has."""
    trails: dict[str, Trail] = {}
    for run in runs:
        trail = run.trail  # as it is now: the run is read while we look
        if run.info is None or trail is None or not any(trail.scores.values()):
            raise Refused(f"The run '{run.name}' has no evaluated round yet; compare it when it has one.")
        trails[str(run.folder)] = trail
    found = groups([run.run for run in runs])
    if len(found) > 1:
        apart = " and ".join(f"({group.apart})" for group in found[:3])
        raise Refused(f"These runs cannot be compared, for they differ in more than method and seed: {apart}.")
    rounds = min(trail.rounds for trail in trails.values())
    group = ranked(_filled(found[0], trails, rounds))
    figures = [ranking(group), curves(group)]
    words = which_is_best(group, leads(group))
    if any(run.state != "finished" for run in runs) or any(trail.rounds > rounds for trail in trails.values()):
        words.insert(1, f"All as they were after round {rounds}, the last that every one of them has finished.")
    return {"says": words, "figures": [figure.plain() for figure in figures if figure is not None]}


# ---- one run


def _asked(run: Watched) -> dict[str, str]:
    """What was asked for; a schedule may be long."""
    return {name: str(value)[:200] for name, value in flat(run.settings).items()}


def _about(run: Watched, trail: Trail) -> str:
    """What it is, and what it has cost."""
    row = run.row()
    what = f"{row['method']} on {row['data']} with {counted(row['clients'], 'client')}, seed {row['seed']}"
    if not trail.rounds:
        return f"{what}: the first round is not finished yet."
    rounds = f"{trail.rounds} of {run.rounds} rounds" if trail.rounds < run.rounds else f"all {run.rounds} rounds"
    return f"{what}: {rounds} took {duration(trail.seconds[-1])} of training, and {size(trail.bytes[-1])} crossed."


def _progress(run: Watched, trail: Trail) -> Figure | None:
    assert run.info is not None
    scale = Scale(run.info["score"])
    series = {m: (list(trail.positions[m]), list(trail.scores[m])) for m in ("trained", "received")}
    series = {m: (p[: len(s)], s) for m, (p, s) in series.items() if s}
    if not series:
        return None
    data = [line(m, [p + 1 for p in places], [scale.factor * s for s in scores], LINES[m])
            for m, (places, scores) in series.items()]  # fmt: skip
    now = " and ".join(f"{scale.text(scores[-1])} as {m}" for m, (_, scores) in series.items())
    best = _best(run, *series[next(iter(series))])
    says = f"After round {trail.rounds} of {run.rounds} {run.run.method} is at {now}{best}."
    known = {m: dict(zip(*pair, strict=True)) for m, pair in series.items()}
    places = sorted({p for values in known.values() for p in values})
    rows = [[p + 1, *(scale.plain(values.get(p)) for values in known.values())] for p in evenly(places, 60)]
    heads = ["round", *(f"{m}, {scale.heading}" for m in known)]
    return Figure("progress", f"{scale.title} over rounds", says,
                  data, layout_of(scale.heading, [1, run.rounds]), Table(heads, rows))  # fmt: skip


def _best(run: Watched, places: Sequence[int], scores: Sequence[float]) -> str:
    assert run.info is not None
    sign = 1 if run.info["higher_is_better"] else -1
    finite = [(sign * score, place) for place, score in zip(places, scores, strict=True) if isfinite(score)]
    if len(finite) < 3:
        return ""
    top, place = max(finite, key=lambda pair: pair[0])
    if sign * scores[-1] == top:
        return "; it never was better"
    best, now = (Scale(run.info["score"]).text(score) for score in (sign * top, scores[-1]))
    return f"; its best was {best} in round {place + 1}" if best != now else ""


def _lost(run: Watched, trail: Trail) -> list[dict[str, Any]]:
    """Clients that failed or missed rounds, who did last first."""
    found: list[dict[str, Any]] = [
        {"number": number, "name": run.names[number], "kind": kind, "times": entry.times, "round": entry.round,
         "why": entry.why}
        for kind, some in (("failed", dict(trail.failed)), ("missed", dict(trail.missed)))
        for number, entry in some.items()
    ]  # fmt: skip
    found += [{"number": number, "name": run.names[number], "kind": "diverged", "times": 1, "round": trail.rounds,
               "why": "its loss is no number; try a smaller lr"} for number in trail.diverged]  # fmt: skip
    rank = {"diverged": 0, "failed": 1, "missed": 2}
    return sorted(found, key=lambda row: (rank[row["kind"]], -row["round"], -row["times"]))[:100]


# ---- several runs


def _filled(group: Group, trails: Mapping[str, Trail], rounds: int) -> Group:
    """The group's digests, which know no record, with what is known of their runs after so many rounds."""

    def fill(digest: Digest) -> Digest:
        trail = trails[str(digest.run.folder)]
        cut = {m: int(np.searchsorted(trail.positions[m], rounds)) for m in MOMENTS}
        drawn = {m: Curve(trail.positions[m][: cut[m]], trail.scores[m][: cut[m]]) for m in MOMENTS}
        return replace(
            digest, curves=drawn, last={m: trail.latest(m, rounds) for m in MOMENTS}, bytes=trail.bytes[:rounds],
            seconds=trail.seconds[:rounds], diverged=bool(trail.diverged), epsilon=trail.epsilon,
        )  # fmt: skip

    methods = {label: [fill(digest) for digest in some] for label, some in group.methods.items()}
    return replace(group, methods=methods, left_out=[fill(digest) for digest in group.left_out])


# ---- what they have in common


def line(name: str, x: Sequence[int], y: Sequence[float], style: Mapping[str, Any]) -> dict[str, Any]:
    kept = evenly(range(len(x)), _POINTS)
    mode = "lines+markers" if len(x) < 3 else "lines"
    return {
        "type": "scatter", "mode": mode, "name": name, "x": [x[k] for k in kept], "y": [short(y[k]) for k in kept],
        "line": dict(style), "hovertemplate": f"{name}: %{{y:.4~g}}<extra></extra>",
    }  # fmt: skip


def layout_of(heading: str, rounds: Sequence[int]) -> dict[str, Any]:
    return {
        "height": 320, "hovermode": "x unified", "showlegend": True,
        "xaxis": {"title": {"text": "round"}, "range": [rounds[0] - 0.5, rounds[1] + 0.5], "zeroline": False,
                  "dtick": 1 if rounds[1] - rounds[0] < 10 else None},
        "yaxis": {"title": {"text": heading}, "zeroline": False},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }  # fmt: skip
