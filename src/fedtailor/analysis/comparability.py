"""Decide which runs can be compared with each other."""

import json
from collections.abc import Iterable

from fedtailor.analysis.formatting import make_unique, shorten
from fedtailor.runs.run import Run

# Settings that change results at most by rounding, or only what else is recorded.
NEUTRAL_SETTINGS = (
    "engine", "actors", "actor_engine", "ray_address", "chunk_size", "device", "checkpoint_every", "metrics",
    "evaluate_train", "evaluate_global", "measure_drift",
)  # fmt: skip


def first_seed_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the run with the smallest seed of each method, in the order in which the methods first appear."""
    first: dict[str, Run] = {}
    for run in runs:
        best = first.setdefault(run.method, run)
        if run.experiment["seed"] < best.experiment["seed"]:
            first[run.method] = run
    return list(first.values())


def client_labels(run: Run) -> list[str]:
    """Return the names of a run's clients for use in text."""
    return label_clients([client["name"] for client in run.info["clients"]])


def label_clients(names: Iterable[str]) -> list[str]:
    """Return clients' names for use in text. Long names are truncated; names that are then equal are numbered.

    >>> label_clients(["7", "ann"])
    ['client 7', 'ann']
    """
    names = make_unique([shorten(name) for name in names])
    return [f"client {name}" if name.isdecimal() else name for name in names]


def experiment_key(run: Run) -> str:
    """Return a string of all settings except method, seeds, and the number of a redrawn split; runs with equal strings
    are comparable."""
    skipped = ("method", "seed", *NEUTRAL_SETTINGS)
    settings = {name: v for name, v in run.experiment.items() if name not in skipped and v is not None}
    settings.setdefault("precision", "float32")  # runs of versions without this setting
    robust = settings.get("robust")
    if isinstance(robust, dict) and robust.get("kind") == "none":  # its other fields have no effect
        del settings["robust"]
    settings["data"] = {**run.experiment["data"], "seed": None, "repeat": is_repeated(run)}
    evaluation = [run.info["score"], run.info["higher_is_better"], run.num_clients]
    return json.dumps([settings, evaluation], sort_keys=True, default=str)


def split_key(run: Run) -> str:
    """Return a string that identifies the data split: if it is equal in two runs, each client has the same data."""
    fingerprint = run.info.get("fingerprint", {}).get("data")
    clients = [(client["name"], client["train"], client["test"]) for client in run.info["clients"]]
    return str(fingerprint or json.dumps([run.experiment["data"], clients], sort_keys=True, default=str))


def is_repeated(run: Run) -> bool:
    """Return whether the clients' samples were split anew into training and test samples."""
    return run.experiment["data"].get("repeat") is not None


def samples_key(run: Run) -> str:
    """Return a string that identifies the samples of the clients: it is the same for all redrawn splits of the same
    clients, and that of the split for other runs."""
    if not is_repeated(run):
        return split_key(run)
    totals = [(c["name"], c["train"] + c.get("validation", 0) + c["test"]) for c in run.info["clients"]]
    return json.dumps([{**run.experiment["data"], "repeat": None}, totals], sort_keys=True, default=str)


def is_local_baseline(other: Run, run: Run) -> bool:
    """Return whether `other` is a run of local training, in every round, with which `run` can be compared client by
    client."""
    if (
        other.method != "local"
        or other.experiment["method"].get("sampled")
        or other.experiment["seed"] != run.experiment["seed"]
    ):
        return False
    return experiment_key(other) == experiment_key(run) and split_key(other) == split_key(run)
