"""Six regions: FLamby's results on Fed-TCGA-BRCA reproduced, and personalized methods beside them.

python benchmarks/tcga_brca.py flamby FOLDER     # FLamby's rows with its settings, split, weights, and order of batches
python benchmarks/tcga_brca.py order FOLDER      # the same rows with 20 other orders of batches
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
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from itertools import product
from math import isnan, nan
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.data.clinical.tcga_brca import REGIONS
from fedtailor.methods import METHODS, Averaged, Centralized, FedAdagrad, FedAdam, FedAvg, FedProx, FedYogi, Local
from fedtailor.methods import Scaffold as SCAFFOLD
from flamby_order import Loader, federated_loaders, flamby_order
from tcga_brca_tables import EXPRESSION, PRINTED, cell_value, show

RESULTS = Path(__file__).parent / "results" / "tcga_brca.json"
FLAMBY_SEEDS = range(42, 47)
FLAMBY_ROUNDS = 5  # (866 // 6 // 8) · 30 // 100
BATCH, STEPS = 8, 100
ORDERS = range(20)  # orders of batches that the library draws
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
    order: int | None = None  # None: FLamby's

    def run(self) -> dict[str, Any]:
        """Return metric -> values of the regions; the metric of the pooled test set is "common_c_index"."""
        torch.set_num_threads(1)
        return run_flamby(self) if self.stage == "flamby" else run_personal(self)


def flamby_methods() -> dict[str, ft.Method]:
    """Return FLamby's methods; clients have weights by number of samples, and v is 0 before round 1."""
    adam: dict[str, Any] = {"optimizer": "adam", "lr": 0.1, "epochs": 30}
    server: dict[str, Any] = {"lr": 0.01, "steps": STEPS, "tau": 1e-8, "initial_v": 0.0}
    return {
        "pooled": Centralized(**adam),
        "local": Local(**adam),
        "FedAvg": FedAvg(lr=0.1, steps=STEPS),
        "FedProx": FedProx(mu=0.1, lr=0.1, steps=STEPS),
        "SCAFFOLD": SCAFFOLD(weights="size", lr=0.01, steps=STEPS),
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


def summed_exponentials(outputs: Tensor, targets: Tensor, sample_weight: Tensor) -> Tensor:
    """FLamby's expression of the loss, which sums exponentials before the logarithm."""
    order = targets[:, 1].argsort(descending=True, stable=True)
    shifted = outputs[order, 0] - outputs.max()
    terms = (shifted.exp().cumsum(0).log() - shifted) * targets[order, 0]
    return terms[order.argsort()]


def run_flamby(job: Job) -> dict[str, Any]:
    """Train with FLamby's order of batches, or with one of the library; the initial weights are FLamby's."""
    name = job.method.removesuffix(EXPRESSION)
    rounds, fed = 1 if name in ("pooled", "local") else FLAMBY_ROUNDS, flamby_federation(job.folder)
    torch.manual_seed(job.seed)
    model = ft.wrap(CoxModel(), loss="survival" if name == job.method else summed_exponentials)
    sizes = [len(train) for train in fed.train]
    loaders = federated_loaders(sizes, BATCH, FLAMBY_ROUNDS, STEPS, job.seed)
    if name == "local":
        loaders = [Loader(torch.arange(size), BATCH, job.seed) for size in sizes]
    elif name == "pooled":
        loaders = [Loader(file_order(job.folder), BATCH, job.seed)]
    with nullcontext() if job.order is not None else flamby_order(loaders):
        run = ft.simulate(
            flamby_methods()[name], model, fed, rounds=rounds, batch_size=BATCH, evaluate_every=rounds,
            seed=job.seed + 1000 * (job.order or 0), engine="sequential", metrics=["c_index"],
        )  # fmt: skip
    return scores(run, ["c_index"] if name == "local" else ["c_index", "common_c_index"])


def file_order(folder: str) -> Tensor:
    """Return the positions of all training samples, region by region, in the order of the file."""
    fed = ft.load("tcga-brca", folder=folder, test="publisher")
    return torch.cat(fed.train).argsort()


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
    rows = [*flamby_methods(), f"local{EXPRESSION}"]
    found = run_all([Job(folder, "flamby", row, seed) for row in rows for seed in FLAMBY_SEEDS], workers)
    return {row: [found[Job(folder, "flamby", row, seed)] for seed in FLAMBY_SEEDS] for row in rows}


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
