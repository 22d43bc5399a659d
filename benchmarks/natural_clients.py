"""Natural clients: people, roles in plays, films, and hospitals. Who gains from federating?

python benchmarks/natural_clients.py              # run what is missing in the result file, then print the tables
python benchmarks/natural_clients.py --show       # print the tables of docs/natural_clients.md only
python benchmarks/natural_clients.py --fresh      # start again

The learning rate and the number of rounds are chosen by the validation accuracy, on samples that are held out from the
training data of the same split; then the model is trained on all training data. Each finished run is written to
benchmarks/results/natural_clients.json at once, so the script can be stopped at any time and started again. It takes
about 17 minutes on two idle cores, and downloads 33 MB once.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from datetime import date
from math import isnan
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Literal

import torch

import fedtailor as ft
from fedtailor.methods import METHODS

RESULTS = Path(__file__).parent / "results" / "natural_clients.json"
SEEDS = (1, 2, 3)
ALL = ("local", "fedavg", "fedavgft", "fedper", "ditto", "fedala", "fedamp", "fedapa", "selffl")
MAJORITY = "majority"  # each client's most frequent class, without training


@dataclass(frozen=True)
class Case:
    """A data set, a network, and the settings that are tried."""

    data: dict[str, Any]
    network: dict[str, Any]
    rates: tuple[float, ...]
    rounds: tuple[int, ...]  # multiples of the first one
    batch_size: int
    engine: Literal["sequential", "vectorized"]
    splits: bool  # whether each seed has another split; otherwise, settings are chosen for the first seed only
    methods: tuple[str, ...] = field(default=ALL)

    def load(self, seed: int) -> ft.Federation:
        settings = dict(self.data)
        return ft.load(settings.pop("name"), seed=seed if self.splits else SEEDS[0], **settings)


_ACTIVITY = {
    "name": "hapt", "window": 128, "step": 128, "transitions": False, "features": True, "normalize": "channel",
}  # fmt: skip
CASES = {
    "30 people, tested on their last recording": Case(
        data={**_ACTIVITY, "test": "publisher"}, network={"name": "mlp"},
        rates=(0.03, 0.1, 0.3), rounds=(10, 20, 30), batch_size=16, engine="vectorized", splits=False,
    ),
    "30 people, tested on random windows": Case(
        data=_ACTIVITY, network={"name": "mlp"},
        rates=(0.03, 0.1, 0.3), rounds=(10, 20, 30), batch_size=16, engine="vectorized", splits=True,
    ),
    "12 roles of Shakespeare": Case(
        data={"name": "shakespeare-plays", "step": 81, "min_characters": 10_000, "clients": 12},
        network={"name": "lstm", "embedding": 8, "hidden": 64},
        rates=(0.3, 1.0, 2.0), rounds=(4, 8, 12), batch_size=8, engine="sequential", splits=False,
    ),
    "299 films": Case(
        data={"name": "film-reviews", "min_size": 30}, network={"name": "mlp", "hidden": (16,)},
        rates=(0.1, 0.5, 2.0), rounds=(10, 20, 30), batch_size=32, engine="vectorized", splits=True,
    ),
    "4 hospitals": Case(
        data={"name": "heart"}, network={"name": "mlp", "hidden": (16,)},
        rates=(0.01, 0.03, 0.1), rounds=(10, 20, 30), batch_size=16, engine="sequential", splits=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One run, to choose settings or to test them."""

    case: str
    method: str
    seed: int
    lr: float
    rounds: int
    is_tuning: bool

    @property
    def key(self) -> str:
        stage = "tuning" if self.is_tuning else "test"
        return f"{stage} | {self.case} | {self.method} | seed {self.seed} | lr {self.lr} | rounds {self.rounds}"

    def run(self) -> dict[str, Any]:
        """Return the validation accuracy after some rounds, or the test accuracy of each client after the last."""
        torch.set_num_threads(1)
        started, case = time.perf_counter(), CASES[self.case]
        fed, network = case.load(self.seed), dict(case.network)
        model = ft.network(network.pop("name"), fed, **network)
        try:
            run = ft.simulate(
                METHODS[self.method](lr=self.lr), model, fed, rounds=self.rounds, seed=self.seed,  # type: ignore[call-arg]
                evaluate_every=case.rounds[0] if self.is_tuning else self.rounds, batch_size=case.batch_size,
                engine=case.engine, validation=0.25 if self.is_tuning else 0.0,
            )  # fmt: skip
        except (ft.ConfigError, ft.RunError):  # FedAMP needs lr ≤ α/λ; training diverged
            if not self.is_tuning:
                raise
            return {"validation": dict.fromkeys(case.rounds, -1.0), "seconds": round(time.perf_counter() - started, 1)}
        moment = run.info["ranked_by"]
        if self.is_tuning:
            found = {r["round"]: r.get(f"validation_{moment}_mean") for r in run.records if r["round"] in case.rounds}
            result: dict[str, Any] = {"validation": {n: -1.0 if v is None or isnan(v) else v for n, v in found.items()}}
        else:
            scores = run.scores(moment, "last", "accuracy")
            result = {"accuracy": [round(scores[client], 4) for client in range(fed.num_clients)]}
        return {**result, "seconds": round(time.perf_counter() - started, 1)}


def majority(case: Case, seed: int) -> dict[str, Any]:
    """Return the accuracy of answering each client's most frequent training class."""
    fed = case.load(seed)
    values = [(fed.y[b] == fed.y[a].mode().values).float().mean() for a, b in zip(fed.train, fed.test, strict=True)]
    return {"accuracy": [round(float(value), 4) for value in values], "seconds": 0.0}


def tuning_jobs(names: Iterable[str]) -> list[Job]:
    """Return the runs that choose settings."""
    return [
        Job(name, method, seed, lr, CASES[name].rounds[-1], is_tuning=True)
        for name in names
        for method in CASES[name].methods
        for seed in (SEEDS if CASES[name].splits else SEEDS[:1])
        for lr in CASES[name].rates
    ]


def chosen(name: str, method: str, seed: int, found: dict[str, Any]) -> tuple[float, int, float]:
    """Return the learning rate and the rounds with the highest validation accuracy, and this accuracy."""
    case = CASES[name]
    tuned = seed if case.splits else SEEDS[0]
    keys = {lr: Job(name, method, tuned, lr, case.rounds[-1], is_tuning=True).key for lr in case.rates}
    scores = {(lr, n): found[key]["validation"][str(n)] for lr, key in keys.items() for n in case.rounds}
    best = max(scores, key=lambda setting: scores[setting])
    return *best, scores[best]


def test_jobs(names: Iterable[str], found: dict[str, Any]) -> list[Job]:
    """Return the runs with the chosen settings."""
    return [
        Job(name, method, seed, *chosen(name, method, seed, found)[:2], is_tuning=False)
        for name in names
        for method in CASES[name].methods
        for seed in SEEDS
    ]


def run_all(jobs: list[Job], results: dict[str, Any], parallel: int) -> None:
    """Run the jobs that are not in the results, and write each result at once."""
    missing = [job for job in jobs if job.key not in results["runs"]]
    with ProcessPoolExecutor(parallel, get_context("spawn")) as pool:
        futures = {pool.submit(job.run): job for job in missing}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                job = futures[future]
                results["runs"][job.key] = json.loads(json.dumps(future.result()))  # as read from the file
                write(results)
                print(f"{number}/{len(missing)} {job.key}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def write(results: dict[str, Any]) -> None:
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in results["runs"].items())
    head = json.dumps({key: value for key, value in results.items() if key != "runs"}, indent=1)
    text = f'{head[:-2]},\n "runs": {{\n{rows}\n }}\n}}\n'
    new = RESULTS.with_suffix(".new")
    new.write_text(text)
    new.replace(RESULTS)


def show(results: dict[str, Any]) -> None:
    found = results["runs"]
    for name, case in CASES.items():
        accuracy = {MAJORITY: [found[f"{MAJORITY} | {name} | seed {seed}"]["accuracy"] for seed in SEEDS]}
        settings = {MAJORITY: ""}
        for method in case.methods:
            jobs = [Job(name, method, seed, *chosen(name, method, seed, found)[:2], False) for seed in SEEDS]
            accuracy[method] = [found[job.key]["accuracy"] for job in jobs]
            settings[method] = ", ".join(dict.fromkeys(f"{job.lr:g} × {job.rounds}" for job in jobs))
        local = [fmean(values) for values in zip(*accuracy["local"], strict=True)]
        print(f"\n### {name}\n\n| method | accuracy | − local | gain | lose | equal | median | lr × rounds |")
        print(f"|{'---|' * 8}")
        for method, seeds in accuracy.items():
            print(row(method, seeds, accuracy["local"], local, settings[method]))
        total = sum(value["seconds"] for key, value in found.items() if f"| {name} |" in key)
        print(f"\n{len(local)} clients, {total / 60:.1f} minutes of one core")


def row(method: str, seeds: list[list[float]], local_seeds: list[list[float]], local: list[float], used: str) -> str:
    """Return one row of a table: accuracy as mean over clients, then over seeds; gains per client, over all seeds."""
    means = [fmean(values) for values in seeds]
    gains = [a - b for a, b in zip([fmean(values) for values in zip(*seeds, strict=True)], local, strict=True)]
    differences = [a - fmean(b) for a, b in zip(means, local_seeds, strict=True)]
    title = "most frequent class" if method == MAJORITY else METHODS[method].class_title()
    cells = ["", "", "", "", ""]
    if method != "local":
        counts = [sum(g > 1e-6 for g in gains), sum(g < -1e-6 for g in gains), sum(abs(g) <= 1e-6 for g in gains)]
        spread = f"{100 * fmean(differences):+.1f} ± {100 * stdev(differences):.1f}"
        cells = [spread, *map(str, counts), f"{100 * median(gains):+.1f}"]
    return f"| {title} | {100 * fmean(means):.1f} ± {100 * stdev(means):.1f} | {' | '.join(cells)} | {used} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    is_resumed = RESULTS.is_file() and not options.fresh
    results = json.loads(RESULTS.read_text()) if is_resumed else {"runs": {}}
    if not options.show:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, {options.parallel} processes"
        results |= {"date": str(date.today()), "torch": str(torch.__version__), "machine": machine}
        results["cases"] = {name: asdict(case) for name, case in CASES.items()}
        for name, case in CASES.items():  # also downloads the data before the processes start
            for seed in SEEDS:
                results["runs"].setdefault(f"{MAJORITY} | {name} | seed {seed}", majority(case, seed))
        run_all(tuning_jobs(CASES), results, options.parallel)
        run_all(test_jobs(CASES, results["runs"]), results, options.parallel)
        write(results)
    show(results)


if __name__ == "__main__":
    main()
