"""Rows and records of runs as pandas data frames."""

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING, Any

from fedtailor.errors import ConfigError
from fedtailor.runs.records import Record

if TYPE_CHECKING:
    import pandas as pd

_COUNTS = {  # column -> entry of a record that lists clients
    "num_participants": "clients", "num_missed": "missed", "num_failed": "failed", "num_diverged": "diverged",
}  # fmt: skip


def rounds_frame(records: Sequence[Record]) -> "pd.DataFrame":
    """Return one row per round with all numbers of its record."""
    return to_frame([_round_row(records[index]) for index in range(len(records))])


def clients_frame(records: Sequence[Record], names: Sequence[str]) -> "pd.DataFrame":
    """Return one row per round and client that took part or was evaluated, with all values of that client."""
    return to_frame([row for index in range(len(records)) for row in _client_rows(records[index], names)])


def _round_row(record: Record) -> dict[str, Any]:
    counts = {column: len(record[name]) for column, name in _COUNTS.items() if name in record}
    numbers = {name: value for name, value in record.items() if _is_number(value) or value is None}
    metrics = {name: value for name, value in record["method_metrics"].items() if _is_number(value)}
    renamed = {name if name not in numbers | counts else f"method_{name}": value for name, value in metrics.items()}
    row = {"round": record["round"], **counts, **numbers, **renamed}
    return {name: nan if value is None else value for name, value in row.items()}


def _client_rows(record: Record, names: Sequence[str]) -> list[dict[str, Any]]:
    values = record["per_client"]
    clients = {*record["clients"], *(client for by_client in values.values() for client in by_client)}
    participants = set(record["clients"])
    return [
        {"round": record["round"], "client": client, "name": names[client], "participated": client in participants}
        | {metric: by_client.get(client, nan) for metric, by_client in values.items()}
        for client in sorted(clients)
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def to_frame(rows: Sequence[dict[str, Any]]) -> "pd.DataFrame":
    """Return rows as a data frame.

    >>> to_frame([{"method": "FedAvg", "score": 0.5}])["score"].tolist()
    [0.5]
    """
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ConfigError("to_pandas requires pandas. Install it with: pip install 'fedtailor[pandas]'.") from error
    return pd.DataFrame(rows)
