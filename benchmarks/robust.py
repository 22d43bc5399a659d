"""The results in docs/robust.md: honest clients' accuracy under every attack and every rule of robust aggregation.

python benchmarks/robust.py run     # train all runs that are missing
python benchmarks/robust.py show    # print the tables

20 clients share the digits, 4 of them are malicious, and the seed chooses which. All methods, rules, and attacks have
their default settings; nothing is tuned. Every run is one line of benchmarks/results/robust.jsonl. Runs that are there
are skipped, so the script can be stopped at any time and started again, also on another machine.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import fedtailor as ft
from fedtailor.core.robust import KINDS
from fedtailor.methods import METHODS
from fedtailor.training.attacks import ATTACKS

RESULTS = Path(__file__).parent / "results" / "robust.jsonl"
METHOD_NAMES = ("fedavg", "fedapa", "fedapm", "fedlag", "selffl", "local")
RULES, ATTACK_NAMES = ("none", *KINDS), ("none", *ATTACKS)
SEEDS = (0, 1, 2)
CLIENTS, ROUNDS, FRACTION = 20, 20, 0.2
GOAL = 2.0  # points that honest clients may lose


@dataclass(frozen=True)
class Job:
    """One run."""

    method: str
    rule: str
    attack: str
    seed: int


def jobs() -> Iterator[Job]:
    for seed in SEEDS:
        for method in METHOD_NAMES:
            kinds = METHODS[method]().robust_kinds
            for rule in RULES if method != "local" else RULES[:1]:
                for attack in ATTACK_NAMES if method != "local" else ("none", "label_flipped"):
                    if rule == "none" or rule in kinds:
                        yield Job(method, rule, attack, seed)


def train(job: Job) -> dict[str, Any]:
    """Return the accuracy of the honest clients, weighted by test samples and as a mean over clients; None if the run
    ended because clients diverged."""
    fed = ft.load("digits", clients=CLIENTS, partition="dirichlet", alpha=1.0, seed=job.seed)
    method, rule = METHODS[job.method](), ft.Robust(kind=job.rule, fraction=FRACTION)  # type: ignore[arg-type]
    attack = None if job.attack == "none" else ATTACKS[job.attack](fraction=FRACTION)
    malicious = set(ft.attacks.Scaled(fraction=FRACTION).choose(CLIENTS, job.seed))  # the same under every attack
    network, options = ft.network("mlp", fed), {"rounds": ROUNDS, "batch_size": 16, "evaluate_every": ROUNDS}
    try:
        run = ft.simulate(method, network, fed, **options, engine="vectorized", device="cpu",  # type: ignore[arg-type]
                          seed=job.seed, robust=rule, attack=attack)  # fmt: skip
    except ft.RunError as error:
        return {"accuracy": None, "mean": None, "error": str(error)}
    scores = {client: s for client, s in run.scores(method.ranking_moment).items() if client not in malicious}
    tested = [client["test"] for client in run.info["clients"]]
    total = sum(tested[client] for client in scores)
    weighted = sum(score * tested[client] for client, score in scores.items()) / total
    return {"accuracy": round(weighted, 5), "mean": round(mean(scores.values()), 5)}


def read_results() -> dict[Job, dict[str, Any]]:
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []
    return {Job(**{name: line[name] for name in Job.__dataclass_fields__}): line for line in lines}


def run_all() -> None:
    done = read_results()
    missing = [job for job in jobs() if job not in done]
    machine = f"{platform.machine()}, 1 thread, torch {torch.__version__}"
    for number, job in enumerate(missing, start=1):
        started = time.perf_counter()
        found = train(job)
        line = asdict(job) | found | {"seconds": round(time.perf_counter() - started, 1)}
        line |= {"date": date.today().isoformat(), "machine": machine}
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{number}/{len(missing)} {job.method} {job.rule} {job.attack} {job.seed}: {found}", flush=True)


def show() -> None:
    """Print one table per method: a row per rule, a column per attack, and how much the best rule loses."""
    done = read_results()
    print(f"Accuracy of the honest clients in %, mean over seeds {complete_seeds(done)}; –: the run diverged.")
    for method in METHOD_NAMES:
        found = {
            (rule, attack): accuracy(done, method, rule, attack)
            for rule in RULES
            for attack in ATTACK_NAMES
            if any((job.method, job.rule, job.attack) == (method, rule, attack) for job in done)
        }
        if found:
            print_table(method, found)


def print_table(method: str, found: Mapping[tuple[str, str], float]) -> None:
    rules = [rule for rule in RULES if any(row == rule for row, _ in found)]
    attacks = [attack for attack in ATTACK_NAMES if any(column == attack for _, column in found)]
    print(f"\n### {METHODS[method]().display_name}\n")
    print_row(["rule", *(attack.replace("_", " ") for attack in attacks), "largest loss"])
    print_row(["---"] * (len(attacks) + 2))
    clean = found["none", "none"]
    for rule in rules:
        values = [found.get((rule, attack), float("nan")) for attack in attacks]
        shown = [f"{100 * v:.1f}" if isfinite(v) else "–" for v in values]
        lost = f"{100 * (clean - min(values)):.1f}" if all(map(isfinite, values)) else "–"
        print_row([f"`{rule}`", *shown, lost])
    losses = [100 * (clean - max(v for rule in rules if isfinite(v := found[rule, attack]))) for attack in attacks]
    shown = [f"{loss:.1f}" if loss < GOAL else f"**{loss:.1f}**" for loss in losses]
    print_row(["*loss with the best rule*", *shown, ""])


def print_row(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |")


def complete_seeds(done: Mapping[Job, Any]) -> list[int]:
    """Return the seeds of which all runs are done, or else all seeds with a run."""
    complete = [seed for seed in SEEDS if all(job in done for job in jobs() if job.seed == seed)]
    return complete or sorted({job.seed for job in done})


def accuracy(done: Mapping[Job, Mapping[str, Any]], method: str, rule: str, attack: str) -> float:
    """Return the mean accuracy over seeds; NaN if one of the runs diverged."""
    lines = [done.get(Job(method, rule, attack, seed)) for seed in complete_seeds(done)]
    values = [line["accuracy"] for line in lines if line is not None]
    return mean(values) if values and None not in values else float("nan")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["run", "show"])
    torch.set_num_threads(1)
    {"run": run_all, "show": show}[parser.parse_args().command]()
