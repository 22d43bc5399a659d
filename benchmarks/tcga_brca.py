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
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.data.clinical.tcga_brca import REGIONS
from fedtailor.methods import METHODS, Centralized, FedAdagrad, FedAdam, FedAvg, FedProx, FedYogi, Local
from fedtailor.methods import Scaffold as SCAFFOLD
from flamby import (
    FLAMBY_SEEDS,
    Loader,
    Scores,
    federated_loaders,
    flamby_order,
    gains_over_local,
    interval,
    personalize,
    run_all,
    run_personal,
    scores,
    show_gains,
    write_results,
)

RESULTS = Path(__file__).parent / "results" / "tcga_brca.json"
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
EXPRESSION = ", FLamby's expression"
FLAMBY_ROUNDS = 5  # (866 // 6 // 8) · 30 // 100
BATCH, STEPS = 8, 100
ORDERS = range(20)  # orders of batches that the library draws
PERSONAL = (
    "local", "centralized", "fedavg", "fedprox", "scaffold", "fedadam", "fedavgft", "perfedavg", "ditto", "pfedme",
    "averaged", "fedala", "fedamp", "fedapa", "apple", "selffl",
)  # fmt: skip
TEST_SEEDS = range(20)
TEST_TO_TRAIN = 0.2 / 0.8  # samples of a split


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

    def run(self) -> Scores:
        """Return metric -> values of the regions; the metric of the pooled test set is "common_c_index"."""
        torch.set_num_threads(1)
        return run_flamby(self) if self.stage == "flamby" else run_tuned(self)


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


def run_flamby(job: Job) -> Scores:
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


def run_tuned(job: Job) -> Scores:
    fed = ft.load("tcga-brca", folder=job.folder, seed=job.seed)
    model, is_tuning = ft.network("logistic", fed), job.stage == "tune"
    return run_personal(job.method, job.lr, model, fed, ["c_index"], is_tuning, batch_size=32, seed=job.seed)


def personal(folder: str, parallel: int) -> dict[str, Any]:
    return personalize(partial(Job, folder), PERSONAL, TEST_SEEDS, parallel)


def reproduce(folder: str, parallel: int) -> dict[str, Any]:
    rows = [*flamby_methods(), f"local{EXPRESSION}"]
    found = run_all([Job(folder, "flamby", row, seed) for row in rows for seed in FLAMBY_SEEDS], parallel)
    return {row: [found[Job(folder, "flamby", row, seed)] for seed in FLAMBY_SEEDS] for row in rows}


def vary_order(folder: str, parallel: int) -> dict[str, Any]:
    """Return method -> cell (the pooled test set, then the regions) -> the mean of the five seeds, for each order."""
    jobs = [
        Job(folder, "flamby", method, seed, order=order)
        for method, seed, order in product(flamby_methods(), FLAMBY_SEEDS, ORDERS)
    ]
    found = run_all(jobs, parallel)

    def mean(method: str, order: int, cell: int) -> float | None:
        runs = [found[Job(folder, "flamby", method, seed, order=order)] for seed in FLAMBY_SEEDS]
        return None if PRINTED[method][cell] is None else round(fmean(cell_value(run, cell) for run in runs), 5)

    cells = range(len(REGIONS) + 1)
    return {m: [[mean(m, order, cell) for order in ORDERS] for cell in cells] for m in flamby_methods()}


def cell_value(run: dict[str, Any], cell: int) -> float:
    """Return a value of a run: on the pooled test set, or in a region."""
    value: float = run["common_c_index"][0] if cell == 0 else run["c_index"][cell - 1]
    return value


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
        for cell, printed in enumerate(PRINTED[method.removesuffix(EXPRESSION)]):
            if printed is None:
                cells.append("–")
                continue
            value = fmean(cell_value(seed, cell) for seed in seeds)
            differences += [(abs(value - printed), method, names[cell])] * (method in PRINTED)
            cells.append(f"{value:.3f} ({printed:.3f})")
        print(f"| {method} | {' | '.join(cells)} |")
    for limit in (0.0005, 0.01, 0.02, 0.05):
        print(f"within {limit}: {sum(d <= limit for d, *_ in differences)} of {len(differences)}")
    print("beyond 0.01:", ", ".join(f"{m} {c} {d:.3f}" for d, m, c in sorted(differences, reverse=True) if d > 0.01))
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
    print(f"printed value inside the range over orders: {inside} of {total}")


def show_personal(found: dict[str, Any]) -> None:
    """Print the regions, and the mean without Canada, where the C-index is undefined in most splits."""
    runs = found["runs"]
    columns = ["method", "lr", *REGIONS, "mean of five", "− local", "splits better than local"]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for method, seeds in runs.items():
        pairs = list(zip(seeds, runs["local"], strict=True))
        values = [[v for seed in seeds if (v := seed["c_index"][region]) is not None] for region in range(6)]
        means = [mean_of(seed["c_index"][:-1]) for seed in seeds]
        gains = [mean_of(gain(a, b)[:-1]) for a, b in pairs]
        by_region = gains_over_local(runs, method, "c_index")
        better = ", ".join(f"{sum(g > 0 for g in own)}/{len(own)}" for own in by_region)
        cells = [f"{fmean(one):.3f}" for one in values]
        shown = "" if method == "local" else interval(gains, TEST_TO_TRAIN, "+.3f")
        overall = interval(means, TEST_TO_TRAIN, ".3f")
        title, lr = METHODS[method].class_title(), found["lr"][method]
        print(f"| {title} | {lr} | {' | '.join(cells)} | {overall} | {shown} | {better} |")
    show_gains(runs, [name for name in runs if name != "local"], "c_index", REGIONS[:-1], TEST_TO_TRAIN)
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
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()
    if options.stage != "show":
        stages = {"flamby": reproduce, "order": vary_order, "personal": personal}
        write_results(RESULTS, options.stage, stages[options.stage](options.folder, options.parallel))
    show(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
