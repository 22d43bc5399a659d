"""Compact history of a run's records: a few values per round and one row of client scores per evaluated round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedtailor.runs.records import Record, Values
from fedtailor.runs.run import MOMENTS

Float32Array = np.ndarray[Any, np.dtype[np.float32]]
Float64Array = np.ndarray[Any, np.dtype[np.float64]]
NOT_EVALUATED, UNDEFINED = np.inf, -np.inf  # in a row of scores; UNDEFINED: evaluated, but the metric has no value
_MAX_PER_ROUND = 1e18  # seconds or bytes


@dataclass
class ProblemCount:
    """How often a client failed or missed a round, and the round and reason of the last time."""

    count: int
    last_round: int
    reason: str


@dataclass
class RunHistory:
    """The values of a run's records that the dashboard shows."""

    test_sizes: Sequence[int]  # test samples of each client
    score: str  # name of the metric
    rounds: int = 0
    bytes: list[int] = field(default_factory=list)  # cumulative, uploads and messages
    seconds: list[float] = field(default_factory=list)  # cumulative
    round_indices: dict[str, list[int]] = field(default_factory=lambda: {moment: [] for moment in MOMENTS})
    scores: dict[str, list[float]] = field(default_factory=lambda: {moment: [] for moment in MOMENTS})
    client_scores: dict[str, list[Float32Array]] = field(default_factory=lambda: {moment: [] for moment in MOMENTS})
    problems: dict[str, dict[int, ProblemCount]] = field(default_factory=lambda: {"failed": {}, "missed": {}})
    diverged: list[int] = field(default_factory=list)
    epsilon: float | None = None
    stopped_early: bool = False
    median_scores: list[float] = field(default_factory=list)  # over clients, at the moment `trained`
    weights_offset: int | None = None  # file offset of the last record with mixing weights

    def add(self, record: Record, offset: int = 0) -> None:
        """Add a round as parsed from the file: clients are strings, undefined values are None."""
        if not all(0 <= float(record[name]) < _MAX_PER_ROUND for name in ("seconds", "bytes_up", "bytes_down")):
            raise ValueError(f"line {record['round']} has invalid seconds or bytes")
        for moment in MOMENTS:
            row, evaluated = self._row(record, moment)
            if not evaluated:
                continue
            if moment == "trained":
                known = row[~np.isinf(row)]
                self.median_scores.append(float(np.median(known)) if known.size else np.nan)
            self.client_scores[moment].append(row.astype(np.float32))
            self.round_indices[moment].append(self.rounds)  # after the row: other threads read the indices first
            score = weighted_mean(row, self.test_sizes)
            self.scores[moment].append(np.nan if score is None else score)
        for kind, problems in self.problems.items():
            for client, reason in record.get(kind, {}).items():
                count = problems[int(client)].count if int(client) in problems else 0
                problems[int(client)] = ProblemCount(count + 1, record["round"], str(reason)[:300])
        self.diverged = [int(client) for client in record.get("diverged", [])]
        self.epsilon = record.get("epsilon")
        self.stopped_early = bool(record.get("stopped_early"))
        if "weights" in record.get("method_metrics", {}):
            self.weights_offset = offset
        self.bytes.append((self.bytes[-1] if self.bytes else 0) + int(record["bytes_up"] + record["bytes_down"]))
        self.seconds.append((self.seconds[-1] if self.seconds else 0.0) + record["seconds"])
        self.rounds += 1

    def latest_scores(self, moment: str, rounds: int | None = None) -> Values:
        """Return the clients' scores in the last evaluated round within the first `rounds` rounds (default: all)."""
        end = int(np.searchsorted(self.round_indices[moment], self.rounds if rounds is None else rounds))
        if not end:
            return {}
        latest = self.client_scores[moment][end - 1]
        return {int(client): float(latest[client]) for client in np.flatnonzero(~np.isinf(latest))}

    def client_history(self, client: int, moment: str) -> Values:
        """Return the rounds in which a client was evaluated, and its scores."""
        pairs = zip(self.round_indices[moment], self.client_scores[moment], strict=False)
        return {index + 1: float(row[client]) for index, row in pairs if not np.isinf(row[client])}

    def _row(self, record: Record, moment: str) -> tuple[Float64Array, bool]:
        """Return all clients' scores in a round, and whether the round was evaluated."""
        tables = record["per_client"]
        row = np.full(len(self.test_sizes), NOT_EVALUATED)
        losses, values = tables.get(f"loss_{moment}"), tables.get(f"{self.score}_{moment}", {})
        row[_client_ids(losses or {})] = UNDEFINED
        row[_client_ids(values)] = np.array(list(values.values()), dtype=float)  # None becomes NaN
        return row, losses is not None


def _client_ids(table: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.fromiter(map(int, table), dtype=np.int64, count=len(table))


def weighted_mean(row: Float64Array, test_sizes: Sequence[int]) -> float | None:
    """Return the mean score over all test samples of the clients that have a score.

    >>> weighted_mean(np.array([1.0, 0.0, NOT_EVALUATED]), [3, 1, 9])
    0.75
    """
    known = ~np.isinf(row)
    sizes = np.asarray(test_sizes)[known]
    return float((row[known] * sizes).sum() / sizes.sum()) if sizes.sum() else None


def required_tables(score: str) -> list[str]:
    """Return the per-client tables of a record that `RunHistory` reads.

    >>> required_tables("accuracy")
    ['loss_received', 'accuracy_received', 'loss_trained', 'accuracy_trained']
    """
    return [f"{name}_{moment}" for moment in MOMENTS for name in ("loss", score)]
