"""Evaluate the personal models after a round and add the results to its record."""

import time
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite

import numpy as np
import torch

from fedtailor.core.trees import Tree, add, map_leaves
from fedtailor.runs.records import Record, Values, merge_disjoint, to_plain, update_values, values_by_client
from fedtailor.runs.summaries import plain_mean, weighted_mean
from fedtailor.training.evaluator import scores
from fedtailor.training.simulated_server import SimulatedServer

_CHUNK_SIZE = 64  # clients that are evaluated in one batch


@torch.no_grad()
def evaluate_round(server: SimulatedServer, record: Record, evaluate: str | int, is_last: bool) -> Record:
    """Return a round's record with the values of both moments.

    `received`: the personal models with which the next round would start, of all evaluated clients.
    `trained`: the personal models after training, of the evaluated clients that took part in the round. The record of
    the last round also contains `last_trained`, with every evaluated client's values after it last trained.
    """
    started, next_round = time.perf_counter(), record["round"] + 1
    clients, participants = _evaluated_clients(server, record["clients"], evaluate), set(record["clients"])
    values: dict[str, Values] = {}
    method_values: dict[str, Values] = {}
    totals: Tree = {}
    for chunk in _chunks(clients):
        update_values(values, _scores(server, chunk, server.received_models(chunk, next_round), "received"))
        if server.method.has_evaluation_metrics:
            stacked = server.apply_method(
                server.method.evaluation_metrics, server.method.send, server.state, chunk, next_round
            )
            update_values(method_values, values_by_client(chunk, stacked))
            sums = map_leaves(lambda leaf: leaf.sum(0), stacked)
            totals = add(totals, sums) if totals else sums
    for chunk in _chunks([client for client in clients if client in participants]):
        personal = server.trained_models(chunk)
        update_values(values, _scores(server, chunk, personal, "trained"))
        update_values(values, {"loss": server.evaluator(chunk, personal, server.train, only="loss")["loss"]})
    record = add_means(record, values, {name: getattr(server, name).sizes for name in ("train", "validation", "test")})
    reduced = server.method.reduce_metrics(totals) if totals else {}
    record["method_metrics"] |= {name: to_plain(value) for name, value in reduced.items()}
    record |= {f"{name}_mean": plain_mean(by_client) for name, by_client in method_values.items()}
    if is_last:
        absent = [client for client in clients if client not in participants]
        record["last_trained"] = last_trained(_add_absent(server, values, absent))
    record["per_client"] = merge_disjoint(record["per_client"], merge_disjoint(values, method_values))
    return record | {"seconds_evaluating": time.perf_counter() - started}


def add_means(record: Record, values: Mapping[str, Values], sizes: Mapping[str, Sequence[int]]) -> Record:
    """Return a record with the means of all per-client values and the clients whose model diverged.

    `sizes` maps each split (train, validation, test) to the clients' numbers of samples, which weight the mean `name`;
    `name_mean` is the unweighted mean over clients.
    """
    means: Record = {}
    for name, by_client in values.items():
        split = "train" if name == "loss" else "validation" if name.startswith("validation_") else "test"
        means |= {name: weighted_mean(by_client, sizes[split]), f"{name}_mean": plain_mean(by_client)}
    losses = [values.get(f"loss_{moment}", {}) for moment in ("received", "trained")]
    diverged = {client for by_client in losses for client, loss in by_client.items() if not isfinite(loss)}
    return record | means | {"diverged": sorted(diverged)}


def _evaluated_clients(server: SimulatedServer, participants: Sequence[int], evaluate: str | int) -> list[int]:
    if evaluate == "participants":
        return list(participants)
    clients = np.arange(server.shared.num_clients)
    if evaluate == "all" or int(evaluate) >= len(clients):
        return clients.tolist()
    return sorted(np.random.default_rng([server.shared.seed, 3]).choice(clients, int(evaluate), replace=False).tolist())


def _scores(server: SimulatedServer, clients: Sequence[int], personal: Tree, moment: str) -> dict[str, Values]:
    return scores(server.evaluator, clients, personal, moment, server.test, server.validation)


def _add_absent(server: SimulatedServer, values: dict[str, Values], absent: Sequence[int]) -> dict[str, Values]:
    """Return the `trained` values of a round together with those of clients that did not take part in it."""
    trained = {f"{name}_trained": dict[int, float]() for name in ("loss", *server.model.metrics)}
    update_values(trained, {name: by_client for name, by_client in values.items() if name.endswith("_trained")})
    for chunk in _chunks(absent):
        update_values(trained, _scores(server, chunk, server.trained_models(chunk), "trained"))
    return trained


def last_trained(values: Mapping[str, Values]) -> dict[str, Values]:
    """Return the values of the moment `trained` without the suffix in their names.

    >>> last_trained({"accuracy_trained": {0: 0.5}, "accuracy_received": {0: 0.4}})
    {'accuracy': {0: 0.5}}
    """
    return {name.removesuffix("_trained"): by_client for name, by_client in values.items() if name.endswith("_trained")}


def _chunks(clients: Sequence[int]) -> Iterator[Sequence[int]]:
    """Split clients into chunks, so that memory does not grow with the number of clients."""
    for start in range(0, len(clients), _CHUNK_SIZE):
        yield clients[start : start + _CHUNK_SIZE]
