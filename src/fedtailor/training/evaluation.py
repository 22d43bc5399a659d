"""Evaluate the clients after a round: which clients are evaluated, and what the record contains."""

from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np

from fedtailor.core.method import Method
from fedtailor.runs.records import Record, Values, merge_disjoint, to_plain
from fedtailor.runs.summaries import plain_mean, weighted_mean
from fedtailor.training.clients import Evaluation


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


def add_evaluation(
    record: Record, found: Evaluation, sizes: Mapping[str, Sequence[int]], method: Method, is_last: bool
) -> Record:
    """Return a round's record with the values of both moments.

    `received`: the personal models with which the next round would start, of all evaluated clients.
    `trained`: the personal models after training, of the evaluated clients that took part in the round. The record of
    the last round also contains `last_trained`, with every evaluated client's values after it last trained.
    """
    values = _without_absent(found.values, set(record["clients"]))
    record = _add_means(record, values, sizes)
    reduced = method.reduce_metrics(found.totals) if found.totals else {}
    record["method_metrics"] |= {name: to_plain(value) for name, value in reduced.items()}
    record |= {f"{name}_mean": plain_mean(by_client) for name, by_client in found.method_values.items()}
    if is_last:
        record["last_trained"] = _last_trained(found.values)
    record["per_client"] = merge_disjoint(record["per_client"], merge_disjoint(values, found.method_values))
    return record


def _without_absent(values: Mapping[str, Values], participants: set[int]) -> dict[str, Values]:
    """Return the values without those of trained models of clients that did not take part in the round."""
    kept = {
        name: {c: v for c, v in by_client.items() if name.endswith("_received") or c in participants}
        for name, by_client in values.items()
    }
    return {name: by_client for name, by_client in kept.items() if by_client or not values[name]}


def _add_means(record: Record, values: Mapping[str, Values], sizes: Mapping[str, Sequence[int]]) -> Record:
    """Return a record with the means of all per-client values and the clients whose model diverged.

    The clients' numbers of samples weight the mean `name`; `name_mean` is the unweighted mean over clients.
    """
    means: Record = {}
    for name, by_client in values.items():
        split = "train" if name == "loss" else "validation" if name.startswith("validation_") else "test"
        means |= {name: weighted_mean(by_client, sizes[split]), f"{name}_mean": plain_mean(by_client)}
    losses = [values.get(f"loss_{moment}", {}) for moment in ("received", "trained")]
    diverged = {client for by_client in losses for client, loss in by_client.items() if not isfinite(loss)}
    return record | means | {"diverged": sorted(diverged)}


def _last_trained(values: Mapping[str, Values]) -> dict[str, Values]:
    """Return the values of the moment `trained` without the suffix in their names."""
    return {name.removesuffix("_trained"): by_client for name, by_client in values.items() if name.endswith("_trained")}
