"""Evaluate the clients after a round: which clients are evaluated, and what the record contains.

Both moments cover the same clients. `received` is the personal model with which a client would start the next round.
`trained` is the personal model that the client holds: the one after its last training or, if it has not trained yet,
the one that it would receive.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from fedtailor.core.method import Method
from fedtailor.runs.records import COMMON, GLOBAL, TRAIN, Record, Values, merge_disjoint, to_plain
from fedtailor.runs.summaries import plain_mean, weighted_mean
from fedtailor.training.clients import Evaluation

_SPLITS = {"validation_": "validation", COMMON: "common", TRAIN: "train"}  # prefix of a metric; others: test samples


def evaluated_clients(evaluate: str | int, num_clients: int, participants: Sequence[int], seed: int) -> list[int]:
    """Return the clients that the setting `evaluate` selects after a round with these participants.

    >>> evaluated_clients("all", 3, [2], seed=0), evaluated_clients("participants", 3, [2], seed=0)
    ([0, 1, 2], [2])
    """
    if evaluate == "participants":
        return list(participants)
    clients = np.arange(num_clients)
    if evaluate == "all" or int(evaluate) >= num_clients:
        return clients.tolist()
    return sorted(np.random.default_rng([seed, 3]).choice(clients, int(evaluate), replace=False).tolist())


@dataclass(eq=False)
class TrainedValues:
    """Each client's values at the moment `trained`, which change only when the client trains."""

    _values: dict[int, dict[str, float]] = field(default_factory=dict)  # client -> name in the record -> value
    _trained: set[int] = field(default_factory=set)  # clients that have trained
    outdated: set[int] = field(default_factory=set)  # clients that trained since they were last evaluated

    @classmethod
    def from_records(cls, records: Sequence[Record]) -> "TrainedValues":
        """Return the values after the last of these records."""
        values = cls()
        for index in range(len(records)):  # iterating would expand all records in memory
            record = records[index]
            values.add_participants(record["clients"])
            tables = record["per_client"]  # of a method's own metrics, too, which have one name each
            metrics = [name.removesuffix("_trained") for name in tables if name.endswith("_trained")]
            values.complete({f"{m}_trained": tables[f"{m}_trained"] for m in metrics if f"{m}_received" in tables}, [])
        return values

    def add_participants(self, clients: Sequence[int]) -> None:
        """Note that these clients trained."""
        self._trained.update(clients)
        self.outdated.update(clients)

    def complete(self, found: Mapping[str, Values], clients: Sequence[int]) -> dict[str, Values]:
        """Return the values of an evaluation with the `trained` values of clients that were not evaluated again."""
        for client in found.get("loss_trained", {}).keys() & self._trained:
            self._values[client] = _values_of(client, found, "_trained")
            self.outdated.discard(client)
        values = {name: dict(by_client) for name, by_client in found.items()}
        for client in clients:
            if client not in found.get("loss_trained", {}) and client not in self.outdated:
                received = _values_of(client, found, "_received")
                received = {name: value for name, value in received.items() if not name.startswith(GLOBAL)}
                same = {f"{name.removesuffix('_received')}_trained": value for name, value in received.items()}
                held = self._values.get(client) or same
                for name, value in held.items():
                    values.setdefault(name, {})[client] = value
        return {name: dict(sorted(by_client.items())) for name, by_client in values.items()}


def _values_of(client: int, values: Mapping[str, Values], suffix: str) -> dict[str, float]:
    return {name: of[client] for name, of in values.items() if name.endswith(suffix) and client in of}


def add_evaluation(
    record: Record,
    found: Evaluation,
    values: Mapping[str, Values],
    sizes: Mapping[str, Sequence[int]],
    method: Method,
) -> Record:
    """Return a round's record with an evaluation: the complete `values`, their means, and the method's metrics.

    The training loss, `loss`, covers the participants of the round.
    """
    participants = set(record["clients"])
    values = {n: {c: v for c, v in of.items() if n != "loss" or c in participants} for n, of in values.items()}
    record = _add_means(record, values, sizes)
    reduced = method.reduce_metrics(found.totals) if found.totals else {}
    record["method_metrics"] |= {name: to_plain(value) for name, value in reduced.items()}
    record |= {f"{name}_mean": plain_mean(by_client) for name, by_client in found.method_values.items()}
    record["per_client"] = merge_disjoint(record["per_client"], merge_disjoint(values, found.method_values))
    return record


def _add_means(record: Record, values: Mapping[str, Values], sizes: Mapping[str, Sequence[int]]) -> Record:
    """Return a record with the means of all per-client values and the clients whose model diverged.

    The clients' numbers of samples weight the mean `name`; `name_mean` is the unweighted mean over clients.
    """
    means: Record = {}
    for name, by_client in values.items():
        prefixed = (split for prefix, split in _SPLITS.items() if name.startswith(prefix) and split in sizes)
        split = "train" if name == "loss" else next(prefixed, "test")
        means |= {name: weighted_mean(by_client, sizes[split]), f"{name}_mean": plain_mean(by_client)}
    losses = [values.get(f"loss_{moment}", {}) for moment in ("received", "trained")]
    diverged = {client for by_client in losses for client, loss in by_client.items() if not isfinite(loss)}
    return record | means | {"diverged": sorted(diverged)}
