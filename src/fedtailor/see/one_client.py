"""What the live page shows of clients: the list of them, and one with its data, its score and its neighbours."""

from collections.abc import Mapping
from dataclasses import replace
from math import isnan
from typing import Any

import numpy as np

from fedtailor.errors import Refused
from fedtailor.reading import called, line_at
from fedtailor.run import MOMENTS
from fedtailor.scale import Scale
from fedtailor.see.clients import times
from fedtailor.see.drawing import capital, evenly, short
from fedtailor.see.figure import ALONE, COLOURS, Figure, Table
from fedtailor.see.looking import LINES, layout_of, line
from fedtailor.see.neighbours import likeness, shares
from fedtailor.see.trail import Lost, Numbers, Trail
from fedtailor.see.watched import Watched

_ROWS = 50  # of a page of the list
_NEAREST = 12
_SORTS = ("number", "name", "train", "test", "received", "trained", "failed", "missed")


def clients(run: Watched, sort: str, down: bool, find: str, page: int) -> dict[str, Any]:
    """A page of the list of a run's clients."""
    trail = run.trail  # as it is now: the run is read while we look
    if run.info is None or trail is None:
        raise Refused(f"The run '{run.name}' has not begun, so its clients are not known yet.")
    if sort not in _SORTS:
        raise Refused(f"Clients are sorted by {', '.join(_SORTS)}.")
    last = {moment: trail.latest(moment) for moment in MOMENTS}
    rows = [
        {
            "number": number, "name": name, "train": client["train"], "test": client["test"],
            **{moment: short(last[moment].get(number)) for moment in MOMENTS},
            "failed": _times(trail.failed, number), "missed": _times(trail.missed, number),
        }
        for number, (name, client) in enumerate(zip(run.names, run.info["clients"], strict=True))
        if find.lower() in name.lower()
    ]  # fmt: skip
    rows.sort(key=lambda row: _order(row[sort], down), reverse=down)
    page = max(0, min(page, (len(rows) - 1) // _ROWS))
    return {"total": len(rows), "page": page, "pages": max(1, -(-len(rows) // _ROWS)), "score": run.info["score"],
            "rows": rows[page * _ROWS : (page + 1) * _ROWS]}  # fmt: skip


def client(run: Watched, number: int) -> dict[str, Any]:
    """One client: its data, its score over the rounds, its neighbours."""
    trail = run.trail
    if run.info is None or trail is None or not 0 <= number < len(run.names):
        raise Refused(f"The run '{run.name}' has no client {number}.")
    own = run.info["clients"][number]
    figures = [_history(run, trail, number), _classes(run, number)]
    lost = [
        f"{words} {times(entry.times)}, last in round {entry.round}: {entry.why}"
        for kind, words in (("failed", "failed"), ("missed", "delivered nothing"))
        if (entry := getattr(trail, kind).get(number))
    ]
    return {
        "name": called(run.run)[number], "train": own["train"], "test": own["test"], "validation": own["validation"],
        "figures": [figure.plain() for figure in figures if figure is not None], "lost": lost,
        "neighbours": _neighbours(run, trail, number),
    }  # fmt: skip


def _history(run: Watched, trail: Trail, number: int) -> Figure | None:
    assert run.info is not None
    scale, name = Scale(run.info["score"]), called(run.run)[number]
    found = {m: trail.history(number, m) for m in ("trained", "received")}
    found = {m: pair for m, pair in found.items() if pair[0]}
    if not found:
        return None
    data = [line(m, places, [scale.factor * s for s in scores], LINES[m]) for m, (places, scores) in found.items()]
    typical = {place + 1: middle for place, middle in zip(trail.positions["trained"], trail.middle, strict=False)}
    data.append(line("median client, trained", list(typical), [scale.factor * s for s in typical.values()],
                      {"color": ALONE, "width": 1.4, "dash": "dot"}))  # fmt: skip
    ends = " and ".join(f"{scale.text(scores[-1])} as {m}" for m, (_, scores) in found.items())
    last = trail.latest("trained")
    place = ""
    if number in last and not isnan(last[number]):
        sign = 1 if run.info["higher_is_better"] else -1
        ahead = sum(sign * value > sign * last[number] for value in last.values())
        place = f"; {ahead} of {len(last) - 1} others do better" if len(last) > 1 else ""
    known = {m: dict(zip(*pair, strict=True)) for m, pair in found.items()}
    shown = [[p, *(scale.plain(values.get(p)) for values in known.values())]
            for p in evenly(sorted({p for values in known.values() for p in values}), 60)]  # fmt: skip
    return Figure("history", f"{scale.title} of {name}",
                  f"{capital(name)} is at {ends}{place}.", data, layout_of(scale.heading, [1, run.rounds]),
                  Table(["round", *(f"{m}, {scale.heading}" for m in known)], shown))  # fmt: skip


def _classes(run: Watched, number: int) -> Figure | None:
    assert run.info is not None
    own, name = run.info["clients"][number].get("classes"), called(run.run)[number]
    if not isinstance(own, list) or not own or not all(type(count) is int for count in own) or not sum(own):
        return None
    top, has = max(range(len(own)), key=lambda label: own[label]), sum(count > 0 for count in own)
    says = (
        f"{capital(name)} has training samples of {has} of {len(own)} classes, most of class {top} "
        f"({own[top] / sum(own):.0%})."
    )
    trace = {
        "type": "bar", "x": [str(label) for label in range(len(own))], "y": own, "marker": {"color": COLOURS[0]},
        "hovertemplate": "class %{x}: %{y} samples<extra></extra>", "showlegend": False,
    }  # fmt: skip
    layout = {"height": 260, "xaxis": {"type": "category", "title": {"text": "class"}},
              "yaxis": {"title": {"text": "training samples"}}}  # fmt: skip
    rows = [[label, count] for label, count in enumerate(own)]
    return Figure("classes", f"Data of {name}", says, [trace], layout, Table(["class", "training samples"], rows))


def _neighbours(run: Watched, trail: Trail, number: int) -> dict[str, Any]:
    """From whom a client learns, where the method weighs clients; else, whose data are most like its own."""
    alike = likeness(run.run, [number])
    similar = None if alike is None else alike[0]
    learns = _learns_from(run, trail, number)
    by = learns if learns is not None else similar
    if by is None:
        return {"says": "Nothing is known of its neighbours: the method weighs no clients, and data have no classes.",
                "rows": []}  # fmt: skip
    order = [int(c) for c in np.argsort(-by, kind="stable") if c != number and by[c] > 0][:_NEAREST]
    rows = [{"number": c, "name": run.names[c], "share": None if learns is None else float(learns[c]),
             "alike": None if similar is None else float(similar[c])} for c in order]  # fmt: skip
    if learns is None:
        says = f"{run.run.method} weighs no clients; these have the most similar data."
    else:
        others = float(learns.sum() - learns[number])
        says = f"It takes {others:.0%} of what it gets from others; most from these."
    return {"says": says if rows else "It has no neighbours.", "rows": rows}


def _learns_from(run: Watched, trail: Trail, number: int) -> Numbers | None:
    if trail.mixed_at is None:
        return None
    try:
        said = line_at(run.folder / "rounds.jsonl", trail.mixed_at, len(run.names))
        found = shares(replace(run.run, records=[said]))
    except (OSError, ValueError, KeyError, TypeError):  # it is being written anew
        return None
    return None if not found else next(iter(found.values()))[number]


def _times(some: Mapping[int, Lost], number: int) -> int:
    return some[number].times if number in some else 0


def _order(value: Any, down: bool) -> tuple[bool, Any]:
    """What is not known comes last, whichever way it goes."""
    return (value is None) != down, value if value is not None else 0
