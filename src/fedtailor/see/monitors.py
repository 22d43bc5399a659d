"""What methods record of themselves: FedLAG's conflicts, Self-FL's uncertainties, FedAPM's residual, and whatever
numbers others record.

A name says nothing of who recorded it: a method of one's own may call its numbers as one of ours does. So every figure
is drawn only where what was recorded has the shape it needs.
"""

from collections.abc import Sequence
from itertools import chain, pairwise
from math import isfinite
from statistics import median
from typing import Any

import numpy as np

from fedtailor.chance import LIMIT, rank_correlation
from fedtailor.reading import called, firsts, is_alone
from fedtailor.run import Run
from fedtailor.scale import Scale, percent, tidy
from fedtailor.see.drawing import over_rounds, p_text, powers_axis, rounds_axis, short, y_axis
from fedtailor.see.figure import COLOURS, Figure, Table
from fedtailor.see.recorded import arrays, bands, numbers, others, per_client

_MOST_LINES = 10
Drawn = tuple[Figure | None, Sequence[str]]  # and the names of which there is nothing to show beside it


def monitors(runs: Sequence[Run], alone: Sequence[Run] = ()) -> list[Figure]:
    """The figures of all methods among these runs that record something of themselves, of their first seeds; what
    clients gained is known where training alone is among these runs, or given beside them."""
    found: list[Figure] = []
    for run in firsts(runs):
        shown: list[str] = []
        known = _alone(run, [*runs, *alone])
        drawn = [draw(run) for draw in (_conflicts, _residual, _drift, _uncertainties, _steps)] + [_gains(run, known)]
        for figure, names in drawn:
            found += [figure] if figure is not None else []
            shown += names
        rest = others(run, shown)
        found += [rest] if rest is not None else []
    return found


def _alone(run: Run, runs: Sequence[Run]) -> Run | None:
    """Training alone with the same seed, on the same clients."""
    return next((other for other in runs if is_alone(other, run)), None)


# ---- FedLAG


def _conflicts(run: Run) -> Drawn:
    """Pairs of clients in conflict, layer by layer."""
    used = ("conflicts", "personal")
    counts, chosen = (arrays(run, name) for name in used)
    pairs = {record["round"]: len(record["clients"]) * (len(record["clients"]) - 1) / 2 for record in run.records}
    rounds = [number for number in counts if number in chosen and pairs.get(number)]
    sizes = {len(some[number]) for some in (counts, chosen) for number in rounds}
    if len(sizes) != 1 or not max(sizes):
        return None, ()
    (layers,) = sizes
    known = [tidy(str(name)) for name in run.info.get("layers", [])]
    names = known if len(known) == layers else [f"layer {place + 1}" for place in range(layers)]
    shares = {n: counts[n] / pairs[n] for n in rounds}
    top = sorted(range(layers), key=lambda place: -sum(shares[n][place] for n in rounds))[:_MOST_LINES]
    data: list[dict[str, Any]] = []
    for place in sorted(top):
        marks = [10 if chosen[n][place] > 0 else 4 for n in rounds]
        trace = over_rounds(names[place], {n: float(shares[n][place]) for n in rounds}, len(data))
        data.append(trace | {"mode": "lines+markers", "marker": {"size": marks}})
    last = rounds[-1]
    most = int(np.argmax(shares[last]))
    personal = [name for place, name in enumerate(names) if chosen[last][place] > 0]
    kept = f"{' and '.join(personal) or 'no layer'} {'is' if len(personal) < 2 else 'are'} personal then"
    says = (
        f"In round {last} {run.method}'s clients disagree most about {names[most]}: {percent(shares[last][most])} of "
        f"all pairs pull it apart; {kept}."
    )
    table = Table(["round", *names, "personal"], [
        [n, *(percent(share) for share in shares[n]),
         ", ".join(name for place, name in enumerate(names) if chosen[n][place] > 0)] for n in rounds
    ])  # fmt: skip
    layout = rounds_axis("pairs of clients in conflict") | {"yaxis": y_axis("pairs of clients in conflict", ".0%")}
    title = f"Conflict of layers: {run.method} (large: personal)"
    return Figure(f"conflicts-{run.method}", title, says, data, layout, table), used


# ---- FedAPM


def _residual(run: Run) -> Drawn:
    """How far the method is from a point where nothing would move any more, and the function that must never rise."""
    found = {name: numbers(run, name) for name in ("residual", "lyapunov")}
    series = {name: values for name, values in found.items() if values}
    if "residual" not in series:
        return None, ()
    data = [over_rounds(name, values, place) for place, (name, values) in enumerate(series.items())]
    residual = list(series["residual"].values())
    layout = rounds_axis("residual") | {"showlegend": False}
    says = f"{run.method}'s residual goes from {residual[0]:.3g} to {residual[-1]:.3g}"
    if "lyapunov" in series:
        values = list(series["lyapunov"].values())
        rises = sum(later > before for before, later in pairwise(values))
        steps = f"{rises} of {len(values) - 1} steps" if rises else "no step"
        says += f", its Lyapunov value from {values[0]:.3g} to {values[-1]:.3g}; it rises in {steps}"
        data[1]["yaxis"] = "y2"
        layout["yaxis"] |= {"domain": [0.56, 1]}
        layout["xaxis"] |= {"anchor": "y2"}
        layout["yaxis2"] = y_axis("Lyapunov value") | powers_axis(values) | {"domain": [0, 0.44]}
    layout["yaxis"] |= powers_axis(residual)
    rows = [[n, *(f"{values.get(n, float('nan')):.4g}" for values in series.values())] for n in series["residual"]]
    title = "Residual and Lyapunov value" if "lyapunov" in series else "Residual"
    return Figure(f"residual-{run.method}", f"{title}: {run.method}", says + ".", data, layout,
                  Table(["round", *series], rows)), list(series)  # fmt: skip


def _drift(run: Run) -> Drawn:
    if not numbers(run, "residual"):
        return None, ()
    return bands(
        run, "drift", per_client(run, "drift"), "Drift of clients from the common part", "‖u_i − u‖",
        lambda first, last: f"Half of {run.method}'s clients are further than {last:.3g} from the common part at the "
        f"end, and were further than {first:.3g} in the first round.",
    ), ("drift",)  # fmt: skip


# ---- Self-FL


def _uncertainties(run: Run) -> Drawn:
    """σ_m² of clients, and σ_0² between them."""
    known = {n: [float(v) for v in value if v >= 0] for n, value in arrays(run, "variances").items()}  # −1: unknown
    own, between = {n: values for n, values in known.items() if values}, numbers(run, "between")
    figure = bands(run, "uncertainties", own, "Uncertainties", "variance", lambda first, last: "")
    if figure is None or not between:  # where none is known yet, there is nothing to be seen elsewhere either
        return None, ("variances",) if known and between and not own else ()
    end, across = median(own[max(own)]), list(between.values())[-1]
    more, so = ("more", "leaves them to themselves") if across > end else ("less", "draws them together")
    says = (
        f"At the end clients differ from each other by σ₀² = {across:.3g}, {more} than half of them vary within "
        f"themselves (median σₘ² = {end:.3g}): {run.method} {so}."
    )
    data = [*figure.data, over_rounds("between clients, σ₀²", between, 1)]
    rows = [[*row, f"{between.get(int(row[0]), float('nan')):.4g}"] for row in figure.table.rows]
    everything = [*between.values(), *chain.from_iterable(own.values())]
    layout = dict(figure.layout) | {"yaxis": y_axis("variance") | powers_axis(everything)}
    table = Table([*figure.table.heads, "between"], rows)
    return Figure(figure.key, figure.title, says, data, layout, table), ("variances", "between")


def _steps(run: Run) -> Drawn:
    if not arrays(run, "gains", run.num_clients):
        return None, ()
    return bands(
        run, "steps", per_client(run, "steps"), "Local steps", "steps in a round",
        lambda first, last: f"{run.method} lets half of its clients take {last:.0f} steps or more in the last round, "
        f"after {first:.0f} in the first.",
    ), ("steps",)  # fmt: skip


def _gains(run: Run, alone: Run | None) -> Drawn:
    """What Self-FL expects every client to gain, beside what it gained over training alone."""
    found = arrays(run, "gains", run.num_clients)
    if not found or not numbers(run, "between"):
        return None, ()
    names, expected = called(run), found[max(found)]
    scale, sign = Scale(run.info["score"]), 1 if run.info["higher_is_better"] else -1
    base, own = alone.scores("trained") if alone is not None else {}, run.scores("trained")
    gained = {c: sign * (own[c] - base[c]) for c in own if c in base and isfinite(own[c] - base[c])}
    clients = [c for c in range(len(names)) if isfinite(expected[c]) and (c in gained or not gained)]
    if not clients:
        return None, ()
    top = max(clients, key=lambda client: expected[client])
    alike = len(clients) > 1 and len({float(expected[client]) for client in clients}) == 1
    whom = "all clients to gain alike" if alike else f"{names[top]} to gain most"
    says = f"{run.method} expects {whom} from others (GAIN {expected[top]:.3g})"
    x, y = expected[clients], np.array([gained.get(client, 0.0) for client in clients])
    if gained and (correlated := rank_correlation(x, y)) is not None:
        found_to_be, p = correlated
        how = f"who should gain more {'did' if found_to_be > 0 else 'did not'} gain more over training alone"
        if p >= LIMIT:
            how = "whether who should gain more did gain more over training alone cannot be told from chance"
        says += f"; {how} (rank correlation {found_to_be:.2f}, {p_text(p)})"
    elif not gained:
        says += "; training alone with this seed is not among these runs, so what was gained is not known"
    trace = {
        "type": "scatter", "mode": "markers", "x": [short(v) for v in x], "y": [short(scale.factor * v) for v in y],
        "text": [names[client] for client in clients], "marker": {"color": COLOURS[0], "size": 8, "opacity": 0.8},
        "hovertemplate": "%{text}: GAIN %{x:.3g}, gained %{y:.3g}<extra></extra>", "showlegend": False,
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "GAIN, expected"}},
        "yaxis": y_axis(f"gain over training alone: {scale.gap_heading}"),
    }
    rows = [[names[c], f"{expected[c]:.4g}", scale.signed(gained.get(c))] for c in clients]
    table = Table(["client", "GAIN", f"gained over alone, {scale.gap_heading}"], rows)
    title = f"Expected and real gain: {run.method}"
    return Figure(f"gains-{run.method}", title, says + ".", [trace], layout, table), ("gains",)
