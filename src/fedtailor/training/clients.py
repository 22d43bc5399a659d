"""The clients of a run as the trainer sees them: simulated on this machine, or deployed on others."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedtailor.core.trees import Tree
from fedtailor.errors import RunError
from fedtailor.runs.client_states import StoredTrees
from fedtailor.runs.records import Values
from fedtailor.training.round_state import ClientResults, RoundState
from fedtailor.training.server import Server


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The results of evaluating clients."""

    values: dict[str, Values]  # name in the record -> client -> value
    method_values: dict[str, Values] = field(default_factory=dict)  # of `Method.evaluation_metrics`
    totals: Tree = field(default_factory=dict)  # sums of `Method.evaluation_metrics` over the clients
    warnings: dict[int, str] = field(default_factory=dict)  # clients that are suspicious -> reason


class LostClientsError(RunError):
    """The states of some clients were lost with a process or machine; `recovery.py` continues from a checkpoint."""


class Clients(Protocol):
    """The clients of a run. `SimulatedClients`, `RayClients`, and `FlowerClients` (package `deploy`) implement it."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def sizes(self) -> Mapping[str, Sequence[int]]:
        """The clients' numbers of samples by split: train, validation, test, and common if there is a common test set.
        Clients that never train come last."""

    @property
    def min_clients(self) -> int:
        """The number of clients that must deliver an upload, or the round does not count."""

    @property
    def threads(self) -> int:
        """The number of torch threads of this process; results may depend on it."""

    def select(self, server: Server, number: int, attempt: int) -> tuple[list[int], dict[int, str]]:
        """Return the clients of round `number`, and those among them that miss the round with the reason."""

    def train(self, round_state: RoundState, number: int, clients: list[int], sent: Tree) -> ClientResults | None:
        """Train these clients on the messages `sent`; return their results, or None if no client succeeded.

        Failures and clients that miss the round are added to `round_state`. The clients' states change in `commit`.
        """

    def commit(self, round_state: RoundState, number: int) -> None:
        """Accept the results of a round, after the server has accepted its uploads."""

    def evaluate(self, server: Server, clients: Sequence[int], outdated: Set[int], is_last: bool) -> Evaluation:
        """Evaluate the `received` models of these clients and, at least for `outdated` clients, which trained since
        the last evaluation, their `trained` models. No evaluation follows if `is_last`."""

    def snapshot(self) -> tuple[Mapping[str, StoredTrees], dict[str, Any]]:
        """Return what a checkpoint saves: trees of every client by kind, and metadata."""

    def close(self) -> None:
        """End what only training needs, such as worker processes, after the last round; the clients stay usable."""
