"""Six regions: FLamby's results on Fed-TCGA-BRCA reproduced, and personalized methods beside them.

python benchmarks/tcga_brca.py flamby FOLDER     # FLamby's rows with its settings, split, and initial weights
python benchmarks/tcga_brca.py order FOLDER      # the same rows with 20 other orders of batches per seed
python benchmarks/tcga_brca.py personal FOLDER   # personalized methods on 20 splits; rates from validation data
python benchmarks/tcga_brca.py show              # print the tables of docs/tcga_brca.md

FOLDER contains FLamby's brca.csv and train_test_split.csv. The results are in benchmarks/results/tcga_brca.json. On two
cores, each part takes a few minutes.
"""

import argparse
import json
import os
import platform
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from itertools import product
from math import isnan, nan
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.analysis.statistics import mean_interval
from fedtailor.data.tcga_brca import REGIONS
from fedtailor.methods import METHODS, Averaged, Centralized, FedAdagrad, FedAdam, FedAvg, FedProx, FedYogi, Local
from fedtailor.methods import Scaffold as SCAFFOLD

RESULTS = Path(__file__).parent / "results" / "tcga_brca.json"
FLAMBY_SEEDS = range(42, 47)
FLAMBY_ROUNDS = 5  # (866 // 6 // 8) · 30 // 100
ORDERS = range(20)  # other orders of batches; 0 is that of the table
PRINTED = {  # C-index on the pooled test set, and on the test sets of the six regions
    "pooled": (0.704, 0.773, 0.582, 0.706, 0.629, 0.766, 0.600),
    "local": (None, 0.644, 0.527, 0.850, 0.596, 0.851, 0.667),
    "FedAvg": (0.735, 0.745, 0.627, 0.691, 0.675, 0.787, 0.867),
    "FedProx": (0.717, 0.715, 0.668, 0.667, 0.667, 0.791, 0.867),
    "SCAFFOLD": (0.699, 0.593, 0.755, 0.676, 0.454, 0.911, 0.733),
    "FedAdam": (0.842, 0.849, 0.655, 0.881, 0.604, 0.902, 1.000),
    "FedYogi": (0.842, 0.849, 0.655, 0.881, 0.604, 0.902, 1.000),
    "FedAdagrad": (0.834, 0.848, 0.623, 0.872, 0.679, 0.855, 1.000),
}
PERSONAL = (
    "local", "centralized", "fedavg", "fedprox", "scaffold", "fedadam", "fedavgft", "perfedavg", "ditto", "pfedme",
    "averaged", "fedala", "fedamp", "fedapa", "apple", "selffl",
)  # fmt: skip
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
TUNING_SEEDS, TEST_SEEDS = range(100, 105), range(20)


class CoxModel(nn.Module):
    """FLamby's model, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(39, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Job:
    """One run."""

    folder: str
    stage: str
    method: str
    seed: int
    lr: float = 0.0
    order: int = 0

    def run(self) -> dict[str, Any]:
        """Return metric -> values of the regions; the metric of the pooled test set is "common_c_index"."""
        torch.set_num_threads(1)
        return run_flamby(self) if self.stage == "flamby" else run_personal(self)


def flamby_methods() -> dict[str, ft.Method]:
    """Return FLamby's methods; clients have weights by number of samples, and v is 0 before round 1."""
    adam: dict[str, Any] = {"optimizer": "adam", "lr": 0.1, "epochs": 30}
    server: dict[str, Any] = {"lr": 0.01, "steps": 100, "tau": 1e-8, "initial_v": 0.0}
    return {
        "pooled": Centralized(**adam),
        "local": Local(**adam),
        "FedAvg": FedAvg(lr=0.1, steps=100),
        "FedProx": FedProx(mu=0.1, lr=0.1, steps=100),
        "SCAFFOLD": SCAFFOLD(weights="size", lr=0.01, steps=100),
        "FedAdam": FedAdam(server_lr=0.1, beta2=0.999, **server),
        "FedYogi": FedYogi(server_lr=0.1, beta2=0.999, **server),
        "FedAdagrad": FedAdagrad(server_lr=1.0, beta1=0.9, **server),
    }


def flamby_federation(folder: str) -> ft.Federation:
    """Return FLamby's federation, without standardization; the common test set contains all test samples."""
    fed = ft.load("tcga-brca", folder=folder, test="publisher", standardize=False)
    x, y, test = fed.x, fed.y, torch.cat(fed.test)
    return ft.Federation.from_arrays(
        [(x[a], y[a], x[b], y[b]) for a, b in zip(fed.train, fed.test, strict=True)],
        names=fed.names, survival=True, common_test=(x[test], y[test]),
    )  # fmt: skip


def run_flamby(job: Job) -> dict[str, Any]:
    rounds = 1 if job.method in ("pooled", "local") else FLAMBY_ROUNDS
    torch.manual_seed(job.seed)  # FLamby's initial weights
    run = ft.simulate(
        flamby_methods()[job.method], ft.wrap(CoxModel(), loss="survival"), flamby_federation(job.folder),
        rounds=rounds, batch_size=8, seed=job.seed + 1000 * job.order, evaluate_every=rounds, engine="sequential",
    )  # fmt: skip
    return scores(run, ["c_index"] if job.method == "local" else ["c_index", "common_c_index"])


def make_method(name: str, lr: float) -> ft.Method:
    """Return a method with its default settings and this learning rate."""
    if name == "averaged":
        return Averaged(FedAvg(lr=lr))
    extra = {"share": "all"} if name == "fedapa" else {}  # a linear model has no body
    return METHODS[name](lr=lr, **extra)  # type: ignore[call-arg]


def run_personal(job: Job) -> dict[str, Any]:
    fed, is_tuning = ft.load("tcga-brca", folder=job.folder, seed=job.seed), job.stage == "tune"
    try:
        method = make_method(job.method, job.lr)
    except ft.ConfigError:
        return {"validation": -1.0}  # pFedMe needs lr < 1/λ
    run = ft.simulate(
        method, ft.network("logistic", fed), fed, rounds=20, batch_size=32, seed=job.seed, evaluate_every=20,
        engine="sequential", validation=0.25 if is_tuning else 0.0,
    )  # fmt: skip
    if is_tuning:
        return {"validation": run.records[-1][f"validation_{run.info['ranked_by']}"]}
    return scores(run, ["c_index"])


def scores(run: ft.Run, names: list[str]) -> dict[str, list[float | None]]:
    """Return metric -> values of the regions; None where a metric is undefined."""
    found = {name: run.scores(run.info["ranked_by"], "last", name) for name in names}
    values = {name: [one.get(client, nan) for client in range(len(REGIONS))] for name, one in found.items()}
    return {name: [None if isnan(value) else round(value, 5) for value in row] for name, row in values.items()}


def run_all(jobs: list[Job], workers: int) -> dict[Job, dict[str, Any]]:
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return dict(zip(jobs, pool.map(Job.run, jobs, chunksize=4), strict=True))


def reproduce(folder: str, workers: int) -> dict[str, Any]:
    jobs = [Job(folder, "flamby", method, seed) for method in flamby_methods() for seed in FLAMBY_SEEDS]
    found = run_all(jobs, workers)
    return {m: [found[Job(folder, "flamby", m, seed)] for seed in FLAMBY_SEEDS] for m in flamby_methods()}


def vary_order(folder: str, workers: int) -> dict[str, Any]:
    """Return method -> cell (the pooled test set, then the regions) -> the mean of the five seeds, for each order."""
    jobs = [
        Job(folder, "flamby", method, seed, order=order)
        for method, seed, order in product(flamby_methods(), FLAMBY_SEEDS, ORDERS)
    ]
    found = run_all(jobs, workers)

    def mean(method: str, order: int, cell: int) -> float | None:
        runs = [found[Job(folder, "flamby", method, seed, order=order)] for seed in FLAMBY_SEEDS]
        return None if PRINTED[method][cell] is None else round(fmean(cell_value(run, cell) for run in runs), 5)

    cells = range(len(REGIONS) + 1)
    return {m: [[mean(m, order, cell) for order in ORDERS] for cell in cells] for m in flamby_methods()}


def cell_value(run: dict[str, Any], cell: int) -> float:
    """Return a value of a run: on the pooled test set, or in a region."""
    value: float = run["common_c_index"][0] if cell == 0 else run["c_index"][cell - 1]
    return value


def personalize(folder: str, workers: int) -> dict[str, Any]:
    tuning = [Job(folder, "tune", *one) for one in product(PERSONAL, TUNING_SEEDS, RATES)]
    tuned = run_all(tuning, workers)
    validation = {
        method: {
            lr: fmean(tuned[Job(folder, "tune", method, seed, lr)]["validation"] for seed in TUNING_SEEDS)
            for lr in RATES
        }
        for method in PERSONAL
    }
    chosen = {method: max(rates, key=lambda lr: rates[lr]) for method, rates in validation.items()}
    jobs = [Job(folder, "test", method, seed, chosen[method]) for method in PERSONAL for seed in TEST_SEEDS]
    found = run_all(jobs, workers)
    runs = {m: [found[Job(folder, "test", m, seed, chosen[m])] for seed in TEST_SEEDS] for m in PERSONAL}
    return {"validation": validation, "lr": chosen, "runs": runs}


def show(results: dict[str, Any]) -> None:
    if "flamby" in results:
        show_flamby(results["flamby"], results.get("order", {}))
    if "personal" in results:
        show_personal(results["personal"])


def show_flamby(found: dict[str, Any], orders: dict[str, Any]) -> None:
    names = ["pooled test", *REGIONS]
    print(f"\n| trained by | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    differences = []
    for method, seeds in found.items():
        cells = []
        for cell, printed in enumerate(PRINTED[method]):
            if printed is None:
                cells.append("–")
                continue
            value = fmean(cell_value(seed, cell) for seed in seeds)
            differences.append((abs(value - printed), method, names[cell]))
            cells.append(f"{value:.3f} ({printed:.3f})")
        print(f"| {method} | {' | '.join(cells)} |")
    for limit in (0.02, 0.05):
        print(f"within {limit}: {sum(d <= limit for d, *_ in differences)} of {len(differences)}")
    print("beyond 0.05:", ", ".join(f"{m} {c} {d:.3f}" for d, m, c in sorted(differences, reverse=True) if d > 0.05))
    if orders:
        show_orders(orders)


def show_orders(found: dict[str, Any]) -> None:
    names, inside, total = ["pooled test", *REGIONS], 0, 0
    print(f"\n| trained by | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for method, rows in found.items():
        cells = []
        for printed, values in zip(PRINTED[method], rows, strict=True):
            if printed is None:
                cells.append("–")
                continue
            is_inside = min(values) <= printed <= max(values)
            inside, total = inside + is_inside, total + 1
            cells.append(f"{min(values):.3f} to {max(values):.3f}{'' if is_inside else f' (printed {printed:.3f})'}")
        print(f"| {method} | {' | '.join(cells)} |")
    print(f"printed value inside the range of {len(ORDERS)} orders: {inside} of {total}")


def show_personal(found: dict[str, Any]) -> None:
    runs = found["runs"]
    print(f"\n| method | lr | {' | '.join(REGIONS)} | mean | − local |\n|---|{'---|' * 9}")
    for method, seeds in runs.items():
        values = [[v for seed in seeds if (v := seed["c_index"][region]) is not None] for region in range(6)]
        means = [mean_of(seed["c_index"]) for seed in seeds]
        gains = [mean_of(gain(a, b)) for a, b in zip(seeds, runs["local"], strict=True)]
        low, high = mean_interval(means) or (nan, nan)
        cells = [f"{fmean(one):.3f}" for one in values]
        shown = "" if method == "local" else f"{fmean(gains):+.3f} ± {stdev(gains):.3f}"
        overall = f"{fmean(means):.3f} ({low:.3f} to {high:.3f})"
        print(
            f"| {METHODS[method].class_title()} | {found['lr'][method]} | {' | '.join(cells)} | {overall} | {shown} |"
        )
    defined = [sum(seed["c_index"][region] is not None for seed in runs["local"]) for region in range(6)]
    print(f"\nsplits in which the C-index is defined: {dict(zip(REGIONS, defined, strict=True))}")


def gain(one: dict[str, Any], other: dict[str, Any]) -> list[float | None]:
    pairs = zip(one["c_index"], other["c_index"], strict=True)
    return [None if a is None or b is None else a - b for a, b in pairs]


def mean_of(values: list[float | None]) -> float:
    """Return the mean of the defined values."""
    return fmean(value for value in values if value is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["flamby", "order", "personal", "show"])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if options.stage != "show":
        stages = {"flamby": reproduce, "order": vary_order, "personal": personalize}
        results[options.stage] = stages[options.stage](options.folder, options.workers)
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        results |= {"date": str(date.today()), "torch": torch.__version__, "machine": machine}
        text = json.dumps(results, indent=1)
        RESULTS.write_text(re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n")
        results = json.loads(RESULTS.read_text())
    show(results)


if __name__ == "__main__":
    main()
