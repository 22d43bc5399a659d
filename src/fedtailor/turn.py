"""What a round leaves, while it goes on, and who is left in it."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from fedtailor.engines.vectorized import rows_of
from fedtailor.faults import Failure, Kinds, difference, kinds_of
from fedtailor.lines import Values
from fedtailor.trees import Tree


@dataclass(eq=False)
class Turn:
    """What a round leaves: kept when all of it is done, or not at all."""

    server: Tree
    clients: list[int] = field(default_factory=list)  # whose uploads arrived
    missed: dict[int, str] = field(default_factory=dict)  # who was sent something and delivered nothing, and why
    failures: dict[int, Failure] = field(default_factory=dict)
    kept: list[Tree] = field(default_factory=list)  # by cohort: the clients' states and models, stacked
    down: dict[int, int] = field(default_factory=dict)  # bytes
    up: dict[int, int] = field(default_factory=dict)
    monitor: Tree = field(default_factory=dict)
    notes: dict[str, Values] = field(default_factory=dict)
    watching: float = 0.0  # seconds
    kinds: Kinds | None = None  # of the uploads so far

    def misfit(self, upload: Tree) -> str | None:
        """How an upload differs from those of the cohorts before it, which were of clients one by one."""
        own = kinds_of({"upload": upload})
        self.kinds = self.kinds or own
        return None if own == self.kinds else difference(own, self.kinds)


def left(some: Container[int], clients: Sequence[int]) -> list[int]:
    """The clients that are not among these."""
    return [client for client in clients if client not in some]


def without(some: Container[int], clients: Sequence[int], stacked: Tree) -> Tree:
    """The stacked trees of clients that are not among these."""
    left = [position for position, client in enumerate(clients) if client not in some]
    return stacked if len(left) == len(clients) else rows_of(stacked, left)
