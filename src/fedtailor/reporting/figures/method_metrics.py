"""Read the method metrics of a run, and draw any of them over rounds."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from fedtailor.analysis.formatting import join_names, shorten
from fedtailor.core.updates import UPDATE_COSINE, UPDATE_NORM
from fedtailor.reporting.figures.drawing import round_trace, rounds_layout
from fedtailor.reporting.figures.figure import Choice, Figure, Option, Table
from fedtailor.runs.run import MOMENTS, Run

_MAX_METRICS = 12  # per figure of remaining metrics
_STANDARD_METRICS = (
    "loss",
    "bytes_up",
    "bytes_down",
    UPDATE_NORM,
    UPDATE_COSINE,
)  # recorded per client for all methods
_EVALUATION_SUFFIXES = tuple(f"_{moment}" for moment in MOMENTS)
Array = np.ndarray[Any, np.dtype[np.float64]]
Series = dict[int, float]  # round -> value
ClientSeries = dict[int, list[float]]  # round -> values of all clients
Quantiles = dict[int, tuple[float, ...]]  # round -> 10 %, median, 90 %


def array_metric(run: Run, name: str, size: int | None = None) -> dict[int, Array]:
    """Return round -> the 1-D array of a method metric; {} if it is missing, is no array, or has another size."""
    values = [record["method_metrics"][name] for record in run.records if name in record["method_metrics"]]
    if not values or not all(map(_is_list, values)):  # checked first, because reading large arrays opens files
        return {}
    try:
        found = {number: np.asarray(value, dtype=np.float64) for number, value in run.metric(name).items()}
    except (TypeError, ValueError):  # not numeric
        return {}
    return found if all(v.ndim == 1 and size in (None, len(v)) for v in found.values()) else {}


def _is_list(value: Any) -> bool:
    """Return whether a recorded value is one-dimensional; for large arrays, the record contains only the shape."""
    if isinstance(value, list):
        return not any(isinstance(part, list) for part in value)
    return len(value.get("shape", ()) if isinstance(value, dict) else getattr(value, "shape", ())) == 1


def scalar_metric(run: Run, name: str) -> Series:
    """Return round -> the value of a method metric; {} if it is missing or not a number."""
    found = {
        record["round"]: record["method_metrics"][name] for record in run.records if name in record["method_metrics"]
    }
    numeric = all(isinstance(value, int | float) for value in found.values())
    return {number: float(value) for number, value in found.items()} if numeric else {}


def client_metric(run: Run, name: str) -> ClientSeries:
    """Return round -> the clients' values of a metric that is recorded per client."""
    found = {record["round"]: list(record["per_client"].get(name, {}).values()) for record in run.records}
    return {number: values for number, values in found.items() if values}


def band_figure(
    run: Run, key: str, values: ClientSeries, title: str, unit: str, summarize: Callable[[float, float], str]
) -> Figure | None:
    """Draw the clients' median and middle 80 % over rounds; `summarize` gets the first and the last median."""
    quantiles = _quantiles(values)
    if not quantiles:
        return None
    medians = [row[1] for row in quantiles.values()]
    rows = [[number, *(f"{value:.4g}" for value in row)] for number, row in quantiles.items()]
    return Figure(f"{key}-{run.method}", f"{title}: {run.method_title}", summarize(medians[0], medians[-1]),
                  _band_traces(quantiles), rounds_layout(unit, quantiles),
                  Table(["round", "10 %", "median", "90 %"], rows))  # fmt: skip


def remaining_metrics_figure(run: Run, shown: Sequence[str]) -> Figure | None:
    """Draw all metrics that are not in `shown`; the reader chooses which one."""
    found = {name: _quantiles(values) for name, values in _remaining_metrics(run, shown).items()}
    found = {shorten(name): quantiles for name, quantiles in found.items() if quantiles}
    found = {name: found[name] for name in list(found)[:_MAX_METRICS]}
    if not found:
        return None
    drawn = {name: _band_traces(quantiles) for name, quantiles in found.items()}
    names, first = list(found), next(iter(drawn))
    options = [
        Option(
            name,
            {attribute: [trace[attribute] for trace in drawn[name]] for attribute in ("x", "y", "showlegend")},
            {"yaxis.title.text": name},
        )
        for name in names
    ]
    rounds = sorted({number for quantiles in found.values() for number in quantiles})
    rows = [[n, *(f"{q[n][1]:.4g}" if n in q else "–" for q in found.values())] for n in rounds]
    layout = rounds_layout(first, rounds) | {"height": 340}
    return Figure(f"metrics-{run.method}", f"Other metrics of {run.method_title}", _remaining_summary(run, found),
                  drawn[first], layout, Table(["round", *names], rows), (),
                  [Choice("metric", options)] if len(options) > 1 else [])  # fmt: skip


def _remaining_metrics(run: Run, shown: Sequence[str]) -> dict[str, ClientSeries]:
    """Return name -> round -> one value, or one value per client, of the metrics that are not in `shown`."""
    found: dict[str, ClientSeries] = {}
    for name in dict.fromkeys(name for record in run.records for name in record["method_metrics"] if name not in shown):
        arrays = {} if (series := scalar_metric(run, name)) else array_metric(run, name, run.num_clients)
        found[name] = {n: [value] for n, value in series.items()} or {n: array.tolist() for n, array in arrays.items()}
    for name in dict.fromkeys(name for record in run.records for name in record["per_client"]):
        if name not in (*shown, *found, *_STANDARD_METRICS) and not name.endswith(_EVALUATION_SUFFIXES):
            found[name] = client_metric(run, name)
    return found


def _remaining_summary(run: Run, found: Mapping[str, Quantiles]) -> str:
    ends = {name: (q[min(q)][1], q[max(q)][1]) for name, q in found.items()}
    names = join_names([f"{name} (from {first:.3g} to {last:.3g})" for name, (first, last) in ends.items()], 4)
    per_client = any(low < high for q in found.values() for low, _, high in q.values())
    note = "; for metrics with one value per client, these are medians" if per_client else ""
    return f"{run.method_title} also records {names}{note}."


def _quantiles(values: ClientSeries) -> Quantiles:
    finite = {n: [v for v in row if isfinite(v)] for n, row in values.items()}
    return {n: tuple(map(float, np.quantile(row, [0.1, 0.5, 0.9]))) for n, row in finite.items() if row}


def _band_traces(quantiles: Quantiles) -> list[dict[str, Any]]:
    """Return a band and the median line; without a band (one value per round), there is no legend."""
    low, middle, high = ({n: row[k] for n, row in quantiles.items()} for k in range(3))
    band = {"line": {"width": 0}, "hoverinfo": "skip"}
    legend = {"showlegend": low != high}
    return [
        round_trace("10 %", low, 0) | band | {"showlegend": False},
        round_trace("middle 80 % of clients", high, 0) | band | legend
        | {"fill": "tonexty", "fillcolor": "rgba(0,114,178,0.2)"},
        round_trace("median client", middle, 0) | legend,
    ]  # fmt: skip
