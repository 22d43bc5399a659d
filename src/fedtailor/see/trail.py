"""What the page keeps of a record, small: a few numbers a round, and everyone's score as a row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedtailor.lines import Record, Values
from fedtailor.run import MOMENTS

Row = np.ndarray[Any, np.dtype[np.float32]]
Numbers = np.ndarray[Any, np.dtype[np.float64]]
NOT_ASKED, UNDEFINED = np.inf, -np.inf  # in a row: not evaluated in that round; evaluated, but without a score
_MOST = 1e18  # seconds or bytes of a round


@dataclass
class Lost:
    """How often a client delivered nothing, and when and why it last did."""

    times: int
    round: int
    why: str


@dataclass
class Trail:
    """What the page keeps of a record."""

    tests: Sequence[int]  # everyone's test samples
    score: str
    rounds: int = 0
    bytes: list[int] = field(default_factory=list)  # up and down, all that has crossed after every round
    seconds: list[float] = field(default_factory=list)
    positions: dict[str, list[int]] = field(default_factory=lambda: {moment: [] for moment in MOMENTS})
    scores: dict[str, list[float]] = field(default_factory=lambda: {moment: [] for moment in MOMENTS})
    rows: dict[str, list[Row]] = field(default_factory=lambda: {moment: [] for moment in MOMENTS})
    failed: dict[int, Lost] = field(default_factory=dict)
    missed: dict[int, Lost] = field(default_factory=dict)
    diverged: list[int] = field(default_factory=list)
    epsilon: float | None = None
    middle: list[float] = field(default_factory=list)  # the median client as trained, in rows that have one
    mixed_at: int | None = None  # where in the file the last line lies that says who learns from whom
    known: Numbers | None = None  # everyone as they last trained

    def add(self, line: Record, offset: int = 0) -> None:
        """One more round, as a file has it: clients by text, null for what is no number."""
        if not all(0 <= float(line[name]) < _MOST for name in ("seconds", "bytes_up", "bytes_down")):
            raise ValueError(f"line {line['round']} of the record counts seconds or bytes beyond all measure")
        for moment in MOMENTS:
            row, evaluated = self._row(line, moment)
            if not evaluated:
                continue
            if moment == "trained":
                own = row[~np.isinf(row)]
                self.middle.append(float(np.median(own)) if own.size else np.nan)
            self.rows[moment].append(row.astype(np.float32))
            self.positions[moment].append(self.rounds)  # last: who draws looks at these first
            score = weighted(row if moment == "received" else self._filled(row), self.tests)
            self.scores[moment].append(np.nan if score is None else score)
        for kind, known in (("failed", self.failed), ("missed", self.missed)):
            for client, why in line.get(kind, {}).items():
                times = known[int(client)].times if int(client) in known else 0
                known[int(client)] = Lost(times + 1, line["round"], str(why)[:300])
        self.diverged = [int(client) for client in line.get("diverged", [])]
        self.epsilon = line.get("epsilon")
        if "weights" in line.get("monitor", {}):
            self.mixed_at = offset
        self.bytes.append((self.bytes[-1] if self.bytes else 0) + int(line["bytes_up"] + line["bytes_down"]))
        self.seconds.append((self.seconds[-1] if self.seconds else 0.0) + line["seconds"])
        self.rounds += 1

    def latest(self, moment: str, rounds: int | None = None) -> Values:
        """Everyone's score after so many rounds, by default all: as received, in the last of them that was evaluated;
        as trained, when each last trained."""
        upto = np.searchsorted(self.positions[moment], self.rounds if rounds is None else rounds)
        known = np.full(len(self.tests), UNDEFINED)
        for row in self.rows[moment][: int(upto)] if moment == "trained" else self.rows[moment][: int(upto)][-1:]:
            known = np.where(row == NOT_ASKED, known, row)
        return {int(client): float(known[client]) for client in np.flatnonzero(~np.isinf(known))}

    def history(self, client: int, moment: str) -> tuple[list[int], list[float]]:
        """The rounds in which a client was evaluated, and its scores."""
        pairs = list(zip(self.positions[moment], self.rows[moment], strict=False))
        found = {position + 1: float(row[client]) for position, row in pairs if not np.isinf(row[client])}
        return list(found), list(found.values())

    def _row(self, line: Record, moment: str) -> tuple[Numbers, bool]:
        tables = line["per_client"]
        row = np.full(len(self.tests), NOT_ASKED)
        losses, values = tables.get(f"loss_{moment}"), tables.get(f"{self.score}_{moment}", {})
        row[_clients(losses or {})] = UNDEFINED
        everyone = line.get("last_trained") if moment == "trained" else None
        if everyone is not None and self.score in everyone:  # then it says of everyone how they are
            row[:], values = UNDEFINED, everyone[self.score]
        row[_clients(values)] = np.array(list(values.values()), dtype=float)  # None is NaN there
        return row, losses is not None or everyone is not None

    def _filled(self, row: Numbers) -> Numbers:
        """Who was not evaluated is as it last was."""
        before = np.full(len(self.tests), UNDEFINED) if self.known is None else self.known
        self.known = np.where(row == NOT_ASKED, before, row)
        return self.known


def _clients(table: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.fromiter(map(int, table), dtype=np.int64, count=len(table))


def weighted(row: Numbers, tests: Sequence[int]) -> float | None:
    """Over all test samples of those who have a score.

    >>> weighted(np.array([1.0, 0.0, NOT_ASKED]), [3, 1, 9])
    0.75
    """
    known = ~np.isinf(row)
    sizes = np.asarray(tests)[known]
    return float((row[known] * sizes).sum() / sizes.sum()) if sizes.sum() else None


def wanted(score: str) -> list[str]:
    """The tables of a line that a trail is made from.

    >>> wanted("accuracy")
    ['loss_received', 'accuracy_received', 'loss_trained', 'accuracy_trained']
    """
    return [f"{name}_{moment}" for moment in MOMENTS for name in ("loss", score)]
