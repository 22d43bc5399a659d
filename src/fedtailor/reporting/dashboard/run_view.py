"""The dashboard's view of one run: everything read so far, and its row in the list of runs."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedtailor.reporting.dashboard.history import RunHistory
from fedtailor.runs.reader import raise_remote_client
from fedtailor.runs.run import MOMENTS, Run
from fedtailor.runs.tail import RecordTail

INACTIVE_STATES = ("finished", "stopped", "failed", "unreadable")
_SPARKLINE_POINTS = 60
_RECENT_ROUNDS = 20  # rounds from which the speed is estimated


@dataclass(eq=False)
class RunView:
    """A run as far as it has been read."""

    name: str  # path relative to the dashboard's folder, with one or two parts
    folder: Path
    file_stats: Sequence[tuple[int, ...]] = ()  # of the run's files at the last read; they change with the files
    settings: dict[str, Any] = field(default_factory=dict)
    method: str = "–"
    data: str = "–"
    info: dict[str, Any] | None = None  # None until the run has started
    history: RunHistory | None = None
    tail: RecordTail | None = None
    state: str = "starting"  # or running, stopping, stopped, finished, failed, unreadable
    message: str = ""  # the error, or the end of the process's output
    reading: bool = True  # whether there are more records to read
    last_update: float = 0.0  # modification time of the records
    estimated_end: float | None = None
    arrivals: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_ROUNDS + 1))  # times of new rounds
    can_stop: bool = False
    version: int = 0

    @property
    def status(self) -> tuple[Any, ...]:
        """What changes in the list while the run is read."""
        return self.state, self.message, self.reading, self.can_stop, self.history and self.history.rounds

    @property
    def rounds(self) -> int:
        """Total number of rounds of the run; fewer than requested if it stopped early."""
        if self.history is not None and self.history.stopped_early:
            return self.history.rounds
        return int(self.settings.get("rounds") or 20)

    @cached_property
    def names(self) -> list[str]:
        """The clients' names."""
        return [str(client["name"]) for client in self.info["clients"]] if self.info else []

    @property
    def run(self) -> Run:
        """The run without records; `history` replaces them."""
        assert self.info is not None
        return Run(self.settings, self.info, [], {}, raise_remote_client, raise_remote_client, self.folder)

    @property
    def ranked_by(self) -> str:
        """The moment that ranks the method; "trained" as long as run.json does not exist."""
        return str((self.info or {}).get("ranked_by", "trained"))

    def _sparkline(self) -> list[float]:
        """Return a few scores of an active run for the small line on its card."""
        if self.history is None or self.state in INACTIVE_STATES:
            return []
        scores = self.history.scores[self.ranked_by]
        return scores[:: max(len(scores) // _SPARKLINE_POINTS, 1)]

    def row(self) -> dict[str, Any]:
        """Return the run's row in the list of runs, as JSON values."""
        history, info = self.history, self.info or {}
        last = {m: history.scores[m][-1] if history and history.scores[m] else None for m in MOMENTS}
        return {
            "name": self.name, "state": self.state, "message": self.message, "reading": self.reading,
            "method": self.method, "data": self.data,
            "seed": self.settings.get("seed", 0), "clients": len(self.names) or None,
            "round": history.rounds if history else 0, "rounds": self.rounds, "score": info.get("score"), **last,
            "higher_is_better": info.get("higher_is_better", True), "ranked_by": self.ranked_by,
            "seconds": history.seconds[-1] if history and history.seconds else 0,
            **{kind: len(history.problems[kind]) if history else 0 for kind in ("failed", "missed")},
            "diverged": len(history.diverged) if history else 0, "last_update": round(self.last_update),
            "estimated_end": None if self.estimated_end is None else round(self.estimated_end, 1),
            "can_stop": self.can_stop, "version": self.version, "sparkline": self._sparkline(),
        }  # fmt: skip

    def seconds_per_round(self) -> float | None:
        """Return the time per round: measured between arrivals, or the training time until enough rounds arrived."""
        if len(self.arrivals) > 2 and self.arrivals[-1] > self.arrivals[0]:
            return (self.arrivals[-1] - self.arrivals[0]) / (len(self.arrivals) - 1)
        recent = self.history.seconds[-_RECENT_ROUNDS - 1 :] if self.history else []
        return (recent[-1] - recent[0]) / (len(recent) - 1) if len(recent) > 1 else recent[0] if recent else None
