"""Four hospitals: FLamby's results on Fed-Heart-Disease reproduced, and personalized methods beside them.

python benchmarks/heart.py data FOLDER   # make the package's heart.csv from the publisher's files in FOLDER
python benchmarks/heart.py flamby        # FLamby's rows with its settings, split, and initial weights
python benchmarks/heart.py personal      # personalized methods on 20 splits; learning rates from validation data
python benchmarks/heart.py show          # print the tables of docs/heart.md

The results are in benchmarks/results/heart.json. On two cores, each part takes a few minutes.
"""

import argparse
import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.data.clinical.heart import COLUMNS, HOSPITALS, SHIPPED, read_complete_cases
from fedtailor.methods import METHODS, Centralized, FedAdagrad, FedAdam, FedAvg, FedProx, FedYogi, Local
from fedtailor.methods import Scaffold as SCAFFOLD
from flamby import FLAMBY_SEEDS, Scores, personalize, run_all, run_personal, scores, show_gains, write_results

RESULTS = Path(__file__).parent / "results" / "heart.json"
METRICS = ["accuracy", "balanced_accuracy", "auc"]
FLAMBY_ROUNDS = 15  # (486 // 4 // 4) · 50 // 100
PRINTED = {  # accuracy on the pooled test set, and on the test sets of the four hospitals
    "pooled": (0.795, 0.783, 0.764, 0.750, 0.644),
    "local": (None, 0.746, 0.746, 0.725, 0.702),
    "FedAvg": (0.748, 0.731, 0.719, 0.650, 0.640),
    "FedProx": (0.748, 0.731, 0.719, 0.650, 0.640),
    "SCAFFOLD": (0.748, 0.727, 0.719, 0.650, 0.640),
    "FedAdam": (0.779, 0.752, 0.746, 0.738, 0.667),
    "FedYogi": (0.779, 0.760, 0.753, 0.738, 0.676),
    "FedAdagrad": (0.779, 0.760, 0.753, 0.738, 0.676),
}
PERSONAL = (
    "local", "centralized", "fedavg", "fedprox", "scaffold", "fedavgft", "perfedavg", "ditto", "pfedme", "averaged",
    "fedala", "fedamp", "fedapa", "apple", "selffl", "fedper", "fedrep",
)  # fmt: skip
OWN_INTERCEPT = ("fedper", "fedrep")  # clients share the weights, and each has its own intercept
TEST_SEEDS = range(20, 40)
TEST_TO_TRAIN = 0.34 / 0.66  # samples of a split


class BinaryLogistic(nn.Module):
    """FLamby's model: the cross-entropy of the outputs (0, z) is the binary cross-entropy of sigmoid(z)."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(13, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(self.head(x), (1, 0))


@dataclass(frozen=True)
class Job:
    """One run."""

    stage: str
    method: str
    seed: int
    lr: float = 0.0

    def run(self) -> Scores:
        """Return metric -> values of the hospitals; the metrics of the pooled test set start with "common"."""
        torch.set_num_threads(1)
        return run_flamby(self) if self.stage == "flamby" else run_tuned(self)


def flamby_methods() -> dict[str, ft.Method]:
    """Return FLamby's methods; clients have weights by number of samples, and v is 0 before round 1."""
    adam: dict[str, Any] = {"optimizer": "adam", "lr": 0.001, "epochs": 50}
    sgd: dict[str, Any] = {"lr": 0.001, "steps": 100}
    server: dict[str, Any] = {"steps": 100, "tau": 1e-8, "initial_v": 0.0}
    return {
        "pooled": Centralized(**adam),
        "local": Local(**adam),
        "FedAvg": FedAvg(**sgd),
        "FedProx": FedProx(mu=0.01, **sgd),
        "SCAFFOLD": SCAFFOLD(weights="size", **sgd),
        "FedAdam": FedAdam(lr=0.01, server_lr=0.01, beta2=0.999, **server),
        "FedYogi": FedYogi(lr=0.003162, server_lr=0.01, beta2=0.999, **server),
        "FedAdagrad": FedAdagrad(lr=0.003162, server_lr=0.316228, beta1=0.9, **server),
    }


def flamby_federation(pooled_training: bool) -> ft.Federation:
    """Return FLamby's federation.

    The pooled training and test sets are standardized by the pooled training samples. The hospitals' test sets, on
    which the pooled model is tested as well, are standardized by each hospital's own training samples.
    """
    raw, own = (ft.load("heart", test="publisher", standardize=standardize) for standardize in (False, True))
    train, test = torch.cat(raw.train), torch.cat(raw.test)
    pooled = (raw.x - raw.x[train].mean(0)) / raw.x[train].std(0)
    x, y = pooled if pooled_training else own.x, raw.y
    return ft.Federation.from_arrays(
        [(x[a], y[a], own.x[b], y[b]) for a, b in zip(raw.train, raw.test, strict=True)],
        names=raw.names, classes=2, common_test=(pooled[test], y[test]),
    )  # fmt: skip


def run_flamby(job: Job) -> Scores:
    rounds = 1 if job.method in ("pooled", "local") else FLAMBY_ROUNDS
    torch.manual_seed(job.seed)  # FLamby's initial weights
    run = ft.simulate(
        flamby_methods()[job.method], ft.wrap(BinaryLogistic()), flamby_federation(job.method == "pooled"),
        rounds=rounds, batch_size=4, seed=job.seed, evaluate_every=rounds, engine="sequential", metrics=METRICS,
    )  # fmt: skip
    common = [] if job.method == "local" else [f"common_{name}" for name in METRICS]
    return scores(run, [*METRICS, *common])


def run_tuned(job: Job) -> Scores:
    fed = ft.load("heart", seed=job.seed)
    model = ft.network("logistic", fed, intercept_head=job.method in OWN_INTERCEPT)
    return run_personal(
        job.method, job.lr, model, fed, METRICS, is_tuning=job.stage == "tune", batch_size=16, seed=job.seed
    )


def reproduce(parallel: int) -> dict[str, Any]:
    jobs = [Job("flamby", method, seed) for method in flamby_methods() for seed in FLAMBY_SEEDS]
    found = run_all(jobs, parallel)
    return {method: [found[Job("flamby", method, seed)] for seed in FLAMBY_SEEDS] for method in flamby_methods()}


def make_csv(folder: Path) -> str:
    """Return the file of the package: the patients with all values, and the split that FLamby draws."""
    from sklearn.model_selection import train_test_split

    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["hospital", *COLUMNS, "flamby"])
    for name, title in HOSPITALS.items():
        rows = read_complete_cases(folder / f"processed.{name}.data")
        disease = rows[:, -1] > 0
        strata = disease if min(disease.sum(), (~disease).sum()) > 2 else None
        _, test = train_test_split(
            np.arange(len(rows)), train_size=0.66, test_size=1 - 0.66, random_state=43, stratify=strata
        )
        for number, row in enumerate(rows):
            writer.writerow([title, *(f"{value:g}" for value in row), "test" if number in test else "train"])
    return text.getvalue()


def mean(values: Iterable[float | None]) -> float:
    """Return the mean of the defined values."""
    return fmean([value for value in values if value is not None])


def show(results: dict[str, Any]) -> None:
    if "flamby" in results:
        show_flamby(results["flamby"])
    if "personal" in results:
        show_personal(results["personal"])


def show_flamby(found: dict[str, Any]) -> None:
    names = ["pooled test", *HOSPITALS.values()]
    print(f"\n| trained by | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    largest = 0.0
    for method, seeds in found.items():
        cells = []
        for column, printed in enumerate(PRINTED[method]):
            if printed is None:
                cells.append("–")
                continue
            values = [seed["common_accuracy"][0] if column == 0 else seed["accuracy"][column - 1] for seed in seeds]
            largest = max(largest, abs(fmean(values) - printed))
            cells.append(f"{fmean(values):.3f} ({printed:.3f})")
        print(f"| {method} | {' | '.join(cells)} |")
    print(f"\nlargest difference: {largest:.4f}")


def show_personal(found: dict[str, Any]) -> None:
    runs = found["runs"]
    for metric in METRICS:
        print(f"\n{metric}\n| method | lr | {' | '.join(HOSPITALS.values())} | mean | − local |\n|---|{'---|' * 7}")
        for method, seeds in runs.items():
            hospitals = [[seed[metric][client] for seed in seeds] for client in range(4)]
            means = [mean(values) for values in hospitals]
            gains = [
                mean(None if a is None else a - b for a, b in zip(one[metric], local[metric], strict=True))
                for one, local in zip(seeds, runs["local"], strict=True)
            ]
            cells = [f"{100 * value:.1f}" for value in (*means, fmean(means))]
            gain = "" if method == "local" else f"{100 * fmean(gains):+.1f} ± {100 * stdev(gains):.1f}"
            title = METHODS[method].class_title() + ", own intercept" * (method in OWN_INTERCEPT)
            print(f"| {title} | {found['lr'][method]} | {' | '.join(cells)} | {gain} |")
        names = list(HOSPITALS.values())
        show_gains(runs, ("fedavg", "fedrep"), metric, names, TEST_TO_TRAIN, scale=100, digits="+.1f")
    negatives = sum(seed["auc"][2] is not None for seed in runs["local"])
    print(f"\nAUC of Switzerland is defined in {negatives} of {len(runs['local'])} splits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["data", "flamby", "personal", "show"])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()
    if options.stage == "data":
        made = make_csv(options.folder)
        print("unchanged" if made == SHIPPED.read_text() else "changed")
        SHIPPED.write_text(made)
        return
    if options.stage != "show":
        is_personal = options.stage == "personal"
        found = personalize(Job, PERSONAL, TEST_SEEDS, options.parallel) if is_personal else reproduce(options.parallel)
        write_results(RESULTS, options.stage, found)
    show(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
