"""The intermediate results of a round that is in progress."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from fedtailor.core.trees import Tree
from fedtailor.runs.records import Values
from fedtailor.training.client_failures import ClientFailure, Signature, describe_difference, tree_signature
from fedtailor.training.engines.vectorized import select_rows


@dataclass(frozen=True, eq=False)
class ClientResults:
    """What the clients of a cohort returned, stacked in the order of `clients`."""

    clients: list[int]  # the clients that succeeded
    sent: Tree  # the messages to these clients
    encoded: Tree  # their uploads, as encoded by the channel
    client_metrics: Tree = field(default_factory=dict)  # one value per client and name, for the record
    results: Tree = field(default_factory=dict)  # in simulations: the clients' new states and trained models
    mean: Tree | None = None  # the mean of the decoded uploads, if it replaces `encoded` (`Method.mean_weights`)
    bytes_up: list[int] = field(default_factory=list)  # with `mean`: the bytes of every upload


@dataclass(eq=False)
class RoundState:
    """The results of a round so far. They are applied when the round is complete (`Trainer.train_round`), or never."""

    server: Tree  # server state, updated after every cohort
    clients: list[int] = field(default_factory=list)  # clients whose uploads were received
    missed: dict[int, str] = field(default_factory=dict)  # selected clients that uploaded nothing -> reason
    failures: dict[int, ClientFailure] = field(default_factory=dict)
    warnings: dict[int, str] = field(default_factory=dict)  # clients that are suspicious -> reason
    results: list[Tree] = field(default_factory=list)  # per cohort: client states and trained models, stacked
    bytes_down: dict[int, int] = field(default_factory=dict)
    bytes_up: dict[int, int] = field(default_factory=dict)
    method_metrics: Tree = field(default_factory=dict)
    client_metrics: dict[str, Values] = field(default_factory=dict)
    metrics_seconds: float = 0.0  # time spent on the method's metrics and on drift
    signature: Signature | None = None  # structure of the uploads, set by the first cohort

    def find_mismatch(self, upload: Tree) -> str | None:
        """Return how an upload's structure differs from the uploads of earlier cohorts, or None if it does not."""
        signature = tree_signature({"upload": upload})
        self.signature = self.signature or signature
        return None if signature == self.signature else describe_difference(signature, self.signature)


def remaining_clients(excluded: Container[int], clients: Sequence[int]) -> list[int]:
    """Return the clients that are not excluded."""
    return [client for client in clients if client not in excluded]


def drop_rows(excluded: Container[int], clients: Sequence[int], stacked: Tree) -> Tree:
    """Return a tree stacked over `clients` without the rows of excluded clients."""
    positions = [position for position, client in enumerate(clients) if client not in excluded]
    return stacked if len(positions) == len(clients) else select_rows(stacked, positions)
