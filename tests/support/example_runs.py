"""Runs with given scores, built without training."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedtailor.analysis.run_summary import compare_runs
from fedtailor.analysis.verdict import verdict_sentences
from fedtailor.methods import METHODS
from fedtailor.runs.run import Run

Scores = dict[int, float]


def method_title(method: str) -> str:
    """Return the proper name of a method; an unknown name is its own title."""
    return METHODS[method]().display_name if method in METHODS else method


def run_with_scores(
    method: str,
    scores: Scores,
    seed: int = 0,
    before: Scores | None = None,
    test_sizes: list[int] | None = None,
    names: list[str] | None = None,
    score: str = "accuracy",
    higher: bool = True,
    split_seed: int | None = None,
    fields: dict[str, Any] | None = None,
    rounds: int = 2,
    failed: dict[int, str] | None = None,
    num_clients: int | None = None,
    ranked_by: str = "trained",
    initial_weights: str = "seed",
    repeat: int | None = None,
) -> Run:
    """Return a run that ends with these scores as trained; received scores are 0.1 lower. Clients without a score were
    not evaluated."""
    records = []
    for number in range(1, rounds + 1):
        now = scores if number == rounds or before is None else before
        values = {f"{score}_trained": now, f"{score}_received": {c: s - 0.1 for c, s in now.items()}}
        values |= {f"loss_{moment}": dict.fromkeys(now, 1.0) for moment in ("received", "trained")}
        sent = 0 if method == "local" else 1_000_000
        records.append({
            "round": number, "clients": list(scores), "missed": {}, "failed": failed or {}, "per_client": values,
            "bytes_up": sent, "bytes_down": 2 * sent, "seconds": 1.5, "method_metrics": {},
        })  # fmt: skip
    numbers = range(num_clients or len(scores))
    test_sizes, names = test_sizes or [1_000] * len(numbers), names or [str(client) for client in numbers]
    clients = [
        {"name": names[c], "train": 10 * (c + 1), "validation": 0, "test": test_sizes[c], "classes": [c + 1, 1, 0]}
        for c in numbers
    ]
    info = {
        "method_title": method_title(method), "score": score, "higher_is_better": higher, "clients": clients,
        "engine": "pool", "device": "cpu", "ranked_by": ranked_by, "initial_weights": initial_weights,
    }  # fmt: skip
    experiment = {
        "seed": seed, "rounds": rounds, "method": {"name": method, **(fields or {})}, "network": {"name": "mlp"},
        "data": {"name": "example data", "seed": seed if split_seed is None else split_seed}, "channel": {},
    }  # fmt: skip
    if repeat is not None:  # a redrawn split
        experiment["data"] = {"name": "example data", "seed": 0, "repeat": repeat}
    return Run(experiment, info, records, {}, lambda client: {}, lambda client, moment: {})


def run_with_metrics(
    method: str,
    scores: Sequence[Scores],  # per round
    method_metrics: Sequence[Mapping[str, Any]] | None = None,
    per_client: Sequence[Mapping[str, Mapping[int, float]]] | None = None,
    classes: Sequence[list[int]] | None = None,
    seed: int = 0,
) -> Run:
    """Return a run that records these metrics in its rounds; without `classes`, the clients' classes are unknown."""
    run = run_with_scores(method, scores[-1], seed, before=scores[0], rounds=len(scores))
    for index, record in enumerate(run.records):
        record["method_metrics"] = dict(method_metrics[index]) if method_metrics else {}
        record["per_client"] |= per_client[index] if per_client else {}
    for number, client in enumerate(run.info["clients"]):
        client["classes"] = classes[number] if classes else None
    run.info["layers"] = ["body", "head"]
    return run


def verdict_text(runs: list[Run]) -> str:
    """Return the verdict of runs that form one group as text."""
    return " ".join(verdict_sentences(compare_runs(runs)))


def runs_with_clear_winner(seeds: int = 1, clients: int = 20) -> list[Run]:
    """Return runs in which FedPer is better for every client; Ditto and local training differ only in sign."""
    runs = []
    for seed in range(seeds):
        local = {c: 0.5 + 0.01 * ((c * 7 + seed) % 10) for c in range(clients)}
        runs.append(run_with_scores("local", local, seed))
        runs.append(run_with_scores("fedper", {c: s + 0.1 + 0.002 * (c % 5) for c, s in local.items()}, seed))
        runs.append(run_with_scores("ditto", {c: s + (0.02 if c % 2 else -0.02) for c, s in local.items()}, seed))
    return runs
