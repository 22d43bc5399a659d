"""Metrics of a federation in the text format of Prometheus."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedtailor.deploy.expiry import days_left
from fedtailor.deploy.server.state.state import ACTIVE, FederationState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("not started", *ACTIVE, "stopped", "finished")


@dataclass(frozen=True)
class Metric:
    """A metric with its samples: the values of its labels, and a number."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: Sequence[tuple[Mapping[str, str], float | None]]  # None: there is no value yet


def metrics_of(state: FederationState) -> list[Metric]:
    """Return the metrics of a federation."""
    run, disk = state.run, state.disk

    def gauge(name: str, text: str, value: float | None) -> Metric:
        return Metric(f"fedtailor_{name}", "gauge", text, [({}, value)])

    def counter(name: str, text: str, value: float) -> Metric:
        return Metric(f"fedtailor_{name}", "counter", text, [({}, value)])

    def by(label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
        return Metric(f"fedtailor_{name}", "gauge", text, [({label: key}, value) for key, value in values.items()])

    up = {name: float(process.running) for name, process in state.processes.items()}
    states = {name: float(name == run["state"]) for name in _STATES}
    expires = {name: days_left(when, state.at) for name, when in state.expires.items()}
    return [
        gauge("healthy", "1 if /health responds with 200.", float(not state.problems)),
        by("process", "process_up", "1 if the process is running.", up),
        by("state", "run_state", "1 for the state of the run.", states),
        gauge("rounds_done", "Complete rounds.", run.get("round", 0)),
        gauge("rounds", "Rounds of the run.", run.get("rounds")),
        gauge("round_seconds", "Duration of the last complete round without its evaluation.", run.get("round_seconds")),
        by("state", "clients", "Clients by their state; late and failed refer to the last complete round.",
           {name: float(count) for name, count in state.count_clients().items()}),
        counter("sent_bytes_total", "Bytes of messages to clients in complete rounds.", run.get("bytes_sent", 0)),
        counter("received_bytes_total", "Bytes of uploads in complete rounds.", run.get("bytes_received", 0)),
        gauge("disk_free_bytes", "Free space on the disk of the operator's folder.", disk.free),
        gauge("checkpoint_bytes", "Size of the last checkpoint.", disk.checkpoint),
        by("certificate", "certificate_days_left", "Days until a certificate expires.", expires),
    ]  # fmt: skip


def to_text(metrics: Iterable[Metric]) -> str:
    r"""Return metrics in the text format.

    >>> print(to_text([Metric("rounds", "gauge", "Rounds.", [({"run": 'a "b"'}, 3.0)])]), end="")
    # HELP rounds Rounds.
    # TYPE rounds gauge
    rounds{run="a \"b\""} 3
    """
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {_escape(metric.help)}", f"# TYPE {metric.name} {metric.kind}"]
        for labels, value in metric.samples:
            if value is not None:
                pairs = ",".join(f'{name}="{_escape(text, quotes=True)}"' for name, text in labels.items())
                lines.append(f"{metric.name}{f'{{{pairs}}}' if pairs else ''} {_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def _escape(text: str, quotes: bool = False) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return escaped.replace('"', r"\"") if quotes else escaped


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
