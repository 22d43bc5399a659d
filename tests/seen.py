"""Runs made up by hand, to be looked at."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedtailor.record import elsewhere
from fedtailor.run import FORMAT, Run
from fedtailor.see import verdict
from fedtailor.see.digest import Group, groups

Scores = dict[int, float]


def made_run(
    method: str = "fedavg",
    scores: Sequence[Mapping[int, float]] = ({0: 0.5, 1: 0.7},),  # round by round, client -> as trained
    monitor: Sequence[Mapping[str, Any]] | None = None,
    per_client: Sequence[Mapping[str, Mapping[int, float]]] | None = None,
    classes: Sequence[Sequence[int]] | None = None,
    names: Sequence[str] | None = None,
    seed: int = 0,
    train: Sequence[int] | None = None,
    **experiment: Any,
) -> Run:
    """A run with these numbers, every client in every round; what is received scores a tenth less."""
    count = len(scores[0])
    names, train = names or [str(c) for c in range(count)], train or [10 * (c + 1) for c in range(count)]
    clients = [
        {
            "name": names[c],
            "train": train[c],
            "validation": 0,
            "test": 10,
            "classes": list(classes[c]) if classes else None,
        }
        for c in range(count)
    ]
    records = []
    for place, own in enumerate(scores):
        received = {client: value - 0.1 for client, value in own.items()}
        tables: dict[str, Any] = {"bytes_up": dict.fromkeys(own, 100), "bytes_down": dict.fromkeys(own, 100)}
        for moment, values in (("received", received), ("trained", dict(own))):
            tables |= {f"accuracy_{moment}": values, f"loss_{moment}": {c: 1 - v for c, v in values.items()}}
        tables |= dict(per_client[place]) if per_client else {}
        means = {name: sum(v.values()) / len(v) for name, v in tables.items() if not name.startswith("bytes")}
        records.append(
            {"round": place + 1, "clients": list(own), "missed": {}, "failed": {}, "bytes_up": 100 * count,
             "bytes_down": 100 * count, "seconds": 0.5, "per_client": tables, "diverged": [],
             "monitor": dict(monitor[place]) if monitor else {}, **means}
        )  # fmt: skip
    info = {
        "format": FORMAT, "fedtailor": "0.1.0", "engine": "sequential", "engine_why": "",
        "chunk": None, "device": "cpu",
        "threads": 1, "torch": "2", "parameters": 25, "score": "accuracy", "higher_is_better": True,
        "layers": ["body", "head"], "clients": clients, "fingerprint": {},
    }  # fmt: skip
    asked = {
        "method": {"name": method, "lr": 0.1}, "network": {"name": "mlp"}, "data": {"name": "digits"}, "channel": {},
        "rounds": len(scores), "seed": seed, **experiment,
    }  # fmt: skip
    return Run(asked, info, records, {}, elsewhere, elsewhere)


def made(
    method: str,
    scores: Scores,
    seed: int = 0,
    before: Scores | None = None,
    tests: list[int] | None = None,
    names: list[str] | None = None,
    score: str = "accuracy",
    higher: bool = True,
    split_seed: int | None = None,
    fields: dict[str, Any] | None = None,
    rounds: int = 2,
    failed: dict[int, str] | None = None,
    people: int | None = None,
) -> Run:
    """A run of two rounds or more that ends with these scores of clients; `received` is a tenth less."""
    lines = []
    for number in range(1, rounds + 1):
        now = scores if number == rounds or before is None else before
        values = {f"{score}_trained": now, f"{score}_received": {c: s - 0.1 for c, s in now.items()}}
        values |= {f"loss_{moment}": dict.fromkeys(now, 1.0) for moment in ("received", "trained")}
        crossed = 0 if method == "local" else 1_000_000
        lines.append({
            "round": number, "clients": list(scores), "missed": {}, "failed": failed or {}, "per_client": values,
            "bytes_up": crossed, "bytes_down": 2 * crossed, "seconds": 1.5, "monitor": {},
        })  # fmt: skip
    everyone = range(people or len(scores))  # of whom not all need have scores
    tests, names = tests or [1] * len(everyone), names or [str(client) for client in everyone]
    known = [
        {"name": names[c], "train": 10 * (c + 1), "validation": 0, "test": tests[c], "classes": [c + 1, 1, 0]}
        for c in everyone
    ]
    info = {"score": score, "higher_is_better": higher, "clients": known, "engine": "pool", "device": "cpu"}
    experiment = {
        "seed": seed, "rounds": rounds, "method": {"name": method, **(fields or {})}, "network": {"name": "mlp"},
        "data": {"name": "made up", "seed": seed if split_seed is None else split_seed}, "channel": {},
    }  # fmt: skip
    return Run(experiment, info, lines, {}, lambda client: {}, lambda client, moment: {})


def one(runs: list[Run]) -> Group:
    (group,) = groups(runs)
    return group


def answer(runs: list[Run]) -> str:
    group = one(runs)
    return " ".join(verdict.which_is_best(group, verdict.leads(group)))


def clear(seeds: int = 1, clients: int = 20) -> list[Run]:
    """fedper is ahead for every client, ditto level with training alone but for the sign."""
    runs = []
    for seed in range(seeds):
        alone = {c: 0.5 + 0.01 * ((c * 7 + seed) % 10) for c in range(clients)}
        runs.append(made("local", alone, seed))
        runs.append(made("fedper", {c: s + 0.1 + 0.002 * (c % 5) for c, s in alone.items()}, seed))
        runs.append(made("ditto", {c: s + (0.02 if c % 2 else -0.02) for c, s in alone.items()}, seed))
    return runs
