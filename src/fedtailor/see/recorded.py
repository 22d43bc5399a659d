"""Numbers that methods record of themselves, whatever they are: read from the record, and drawn over the rounds."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from fedtailor.run import MOMENTS, Run
from fedtailor.scale import tidy
from fedtailor.see.drawing import listed, over_rounds, rounds_axis
from fedtailor.see.figure import Choice, Figure, Option, Table

_MOST = 12  # numbers of a method that have no figure of their own
_USUAL = ("loss", "bytes_up", "bytes_down")  # what the record has of every client, whatever the method
_EVALUATED = tuple(f"_{moment}" for moment in MOMENTS)
Array = np.ndarray[Any, np.dtype[np.float64]]
Series = dict[int, float]  # round -> number
Bands = dict[int, list[float]]  # round -> the numbers of all clients
Quantiles = dict[int, tuple[float, ...]]  # round -> 10 %, median, 90 %


def arrays(run: Run, name: str, size: int | None = None) -> dict[int, Array]:
    """Round -> the list of numbers that a method recorded under that name; empty where it recorded none, or something
    else, or not as many as they must be."""
    values = [record["monitor"][name] for record in run.records if name in record["monitor"]]
    if not values or not all(map(_is_list, values)):  # before any file is opened: tables may be large
        return {}
    try:
        found = {number: np.asarray(value, dtype=np.float64) for number, value in run.monitor(name).items()}
    except (TypeError, ValueError):  # texts
        return {}
    return found if all(v.ndim == 1 and size in (None, len(v)) for v in found.values()) else {}


def _is_list(value: Any) -> bool:
    """Whether what is recorded is no single number and no table; a large one lies in a file and has its shape here."""
    if isinstance(value, list):
        return not any(isinstance(part, list) for part in value)
    return len(value.get("shape", ()) if isinstance(value, dict) else getattr(value, "shape", ())) == 1


def numbers(run: Run, name: str) -> Series:
    """Round -> the number that a method recorded under that name; empty where it recorded none, or something else."""
    found = {record["round"]: record["monitor"][name] for record in run.records if name in record["monitor"]}
    plain = all(isinstance(value, int | float) for value in found.values())
    return {number: float(value) for number, value in found.items()} if plain else {}


def per_client(run: Run, name: str) -> Bands:
    """Round -> the clients' numbers of that name."""
    found = {record["round"]: list(record["per_client"].get(name, {}).values()) for record in run.records}
    return {number: values for number, values in found.items() if values}


def bands(
    run: Run, key: str, values: Bands, title: str, unit: str, say: Callable[[float, float], str]
) -> Figure | None:
    """The median of clients over the rounds, and the range of the middle 80 %."""
    parts = _quantiles(values)
    if not parts:
        return None
    middle = [part[1] for part in parts.values()]
    rows = [[number, *(f"{value:.4g}" for value in part)] for number, part in parts.items()]
    return Figure(f"{key}-{run.method}", f"{title}: {run.method}", say(middle[0], middle[-1]), _traces(parts),
                  rounds_axis(unit), Table(["round", "10 %", "median", "90 %"], rows))  # fmt: skip


def others(run: Run, shown: Sequence[str]) -> Figure | None:
    """All that a method records beside what is shown elsewhere; the reader chooses which of it."""
    found = {tidy(name): parts for name, values in _left(run, shown).items() if (parts := _quantiles(values))}
    found = {name: found[name] for name in list(found)[:_MOST]}
    if not found:
        return None
    drawn = {name: _traces(parts) for name, parts in found.items()}
    names, first = list(found), next(iter(drawn))
    options = [
        Option(
            name,
            {attribute: [trace[attribute] for trace in drawn[name]] for attribute in ("x", "y", "showlegend")},
            {"yaxis.title.text": name},
        )
        for name in names
    ]
    rounds = sorted({number for parts in found.values() for number in parts})
    rows = [[n, *(f"{parts[n][1]:.4g}" if n in parts else "–" for parts in found.values())] for n in rounds]
    return Figure(f"recorded-{run.method}", f"What else {run.method} records", _says(run, found), drawn[first],
                  rounds_axis(first) | {"height": 340}, Table(["round", *names], rows), (),
                  [Choice("shown is", options)] if len(options) > 1 else [])  # fmt: skip


def _left(run: Run, shown: Sequence[str]) -> dict[str, Bands]:
    """Name -> a number a round, or a number of every client, of what is not shown yet."""
    found: dict[str, Bands] = {}
    for name in dict.fromkeys(name for record in run.records for name in record["monitor"] if name not in shown):
        each = {} if (series := numbers(run, name)) else arrays(run, name, run.num_clients)
        found[name] = {n: [value] for n, value in series.items()} or {n: value.tolist() for n, value in each.items()}
    for name in dict.fromkeys(name for record in run.records for name in record["per_client"]):
        if name not in (*shown, *found, *_USUAL) and not name.endswith(_EVALUATED):
            found[name] = per_client(run, name)
    return found


def _says(run: Run, found: Mapping[str, Quantiles]) -> str:
    ends = {name: (parts[min(parts)][1], parts[max(parts)][1]) for name, parts in found.items()}
    words = listed([f"{name} (from {first:.3g} to {last:.3g})" for name, (first, last) in ends.items()], 4)
    several = any(low < high for parts in found.values() for low, _, high in parts.values())
    about = "; where every client has one, this is the median" if several else ""
    return f"{run.method} also records {words}{about}."


def _quantiles(values: Bands) -> Quantiles:
    known = {n: [v for v in own if isfinite(v)] for n, own in values.items()}
    return {n: tuple(map(float, np.quantile(own, [0.1, 0.5, 0.9]))) for n, own in known.items() if own}


def _traces(parts: Quantiles) -> list[dict[str, Any]]:
    """A band and a line in it; where it is as thin as the line, nothing explains it."""
    low, middle, high = ({n: part[place] for n, part in parts.items()} for place in range(3))
    shade = {"line": {"width": 0}, "hoverinfo": "skip"}
    wide = {"showlegend": low != high}
    return [
        over_rounds("tenth", low, 0) | shade | {"showlegend": False},
        over_rounds("middle 80 % of clients", high, 0) | shade | wide
        | {"fill": "tonexty", "fillcolor": "rgba(0,114,178,0.2)"},
        over_rounds("median client", middle, 0) | wide,
    ]  # fmt: skip
