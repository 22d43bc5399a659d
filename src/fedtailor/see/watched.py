"""One run that is watched: what is known of it, and what the list of runs says."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedtailor.reading import Tail
from fedtailor.record import elsewhere
from fedtailor.run import MOMENTS, Run
from fedtailor.see.trail import Trail

DONE = ("finished", "stopped", "failed", "unreadable")
_SPARK = 60  # points of the small line beside a name
_RECENT = 20  # rounds by which the pace is judged


@dataclass(eq=False)
class Watched:
    """A run, as far as it was read."""

    name: str  # its path below the folder that is watched: one or two parts
    folder: Path
    marks: Sequence[tuple[int, ...]] = ()  # by which its files are known to be the same
    settings: dict[str, Any] = field(default_factory=dict)
    method: str = "–"
    data: str = "–"
    info: dict[str, Any] | None = None  # None: it has not begun
    trail: Trail | None = None
    tail: Tail | None = None
    state: str = "starting"  # running, stopping, stopped, finished, failed, unreadable
    words: str = ""  # what is wrong with it, or the last that was heard of it
    reading: bool = True  # there is more to be read
    at: float = 0.0  # when its record last grew
    until: float | None = None  # when it will end at its pace
    arrivals: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT + 1))
    can_stop: bool = False
    version: int = 0

    @property
    def rounds(self) -> int:
        """How many there will be."""
        return int(self.settings.get("rounds") or 20)

    @cached_property
    def names(self) -> list[str]:
        """The clients' names."""
        return [str(client["name"]) for client in self.info["clients"]] if self.info else []

    @property
    def run(self) -> Run:
        """Without its record, which the trail stands for."""
        assert self.info is not None
        return Run(self.settings, self.info, [], {}, elsewhere, elsewhere, self.folder)

    def _spark(self) -> list[float]:
        """A few scores of a run that goes on, for a line beside its name."""
        if self.trail is None or self.state in DONE:
            return []
        scores = self.trail.scores["trained"] or self.trail.scores["received"]
        return scores[:: max(len(scores) // _SPARK, 1)]

    def row(self) -> dict[str, Any]:
        """What the list of runs says of it."""
        trail, info = self.trail, self.info or {}
        last = {m: trail.scores[m][-1] if trail and trail.scores[m] else None for m in MOMENTS}
        return {
            "name": self.name, "state": self.state, "words": self.words, "reading": self.reading,
            "method": self.method, "data": self.data,
            "seed": self.settings.get("seed", 0), "clients": len(self.names) or None,
            "round": trail.rounds if trail else 0, "rounds": self.rounds, "score": info.get("score"), **last,
            "higher": info.get("higher_is_better", True),
            "seconds": trail.seconds[-1] if trail and trail.seconds else 0,
            "failed": len(trail.failed) if trail else 0, "missed": len(trail.missed) if trail else 0,
            "diverged": len(trail.diverged) if trail else 0,
            "at": round(self.at), "until": None if self.until is None else round(self.until, 1),
            "can_stop": self.can_stop, "version": self.version, "spark": self._spark(),
        }  # fmt: skip

    def pace(self) -> float | None:
        """Seconds a round: as they came while we looked, evaluation and all; before that, as long as training took."""
        if len(self.arrivals) > 2 and self.arrivals[-1] > self.arrivals[0]:
            return (self.arrivals[-1] - self.arrivals[0]) / (len(self.arrivals) - 1)
        recent = self.trail.seconds[-_RECENT - 1 :] if self.trail else []
        return (recent[-1] - recent[0]) / (len(recent) - 1) if len(recent) > 1 else recent[0] if recent else None
