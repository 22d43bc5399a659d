"""Checks of printed numbers: our results beside them, arithmetic over the papers' tables, and small runs.

python benchmarks/paper_checks.py        # half a minute on one core; results/paper_checks.json

Printed numbers are those of `fedtailor paper show`. Small runs are on digits: they do not repeat a table, but show what
a method or a metric does whatever the data are. The definitions of the papers cite these checks by their names.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from math import log, nan
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.methods import FedAPA, FedAvg, FedLAG, Local
from fedtailor.methods._shared.quadratic_program import solve_simplex_qp
from fedtailor.papers import load_paper
from fedtailor.papers.definition import Row
from fedtailor.papers.running import SEEDS, default_results, read_done, select_cells

TABLE_7 = ("table-7-100", "table-7-80", "table-7-60", "table-7-40", "table-7-20")
FIRST_SIX = ("fedlag", "perfedavg", "fedrod", "fedpac", "fedbabu", "fedavg")
Found = dict[str, Any]
ROOT = Path(__file__).parents[1]


def rows(paper: str, table: str) -> dict[str, Row]:
    return {row.method: row for row in load_paper(paper).select(table)[0].rows}


def train(method: ft.Method, seed: int = 0, rounds: int = 30, **data: Any) -> ft.Run:
    fed = ft.load("digits", seed=seed, **{"clients": 10, "alpha": 0.1} | data)
    metrics = ["accuracy", "weighted_f1"]
    return ft.simulate(
        method, ft.network("mlp", fed), fed, rounds=rounds, participation=0.6, seed=seed, metrics=metrics
    )


def largest_difference(one: ft.Run, other: ft.Run) -> float:
    """Return the largest difference between the parameters that client 0 of two runs would receive next."""
    first, second = one.personal(0, "received"), other.personal(0, "received")
    return max(float((first[name] - second[name]).abs().max()) for name in second)


# our results beside the printed ones


@dataclass(frozen=True)
class Results:
    """What the paper and we have for a cell of Table 1, in %; ours by seed."""

    printed: float | None
    best: dict[int, float]
    round_10: dict[int, float]
    last: dict[int, float]

    @property
    def difference(self) -> float:
        return mean(self.best.values()) - (nan if self.printed is None else self.printed)

    @property
    def later_gain(self) -> float:
        """What the best round gains on round 10."""
        return mean(self.best[seed] - self.round_10[seed] for seed in self.best)

    def lead(self, other: "Results") -> float:
        """Our accuracy minus another's, over the seeds that both have."""
        return mean(self.best[seed] - other.best[seed] for seed in self.best.keys() & other.best)


def fedapa_results() -> dict[str, dict[str, Results]]:
    """Return column -> row -> results, as far as cells of Table 1 have been run."""
    done = read_done(ROOT / default_results("fedapa"))
    found: dict[str, dict[str, Results]] = {}
    for cell in select_cells("fedapa", "table-1"):
        keys = [] if cell.missing else [(seed, (cell.setup.fingerprint, seed)) for seed in SEEDS]
        runs = {seed: done[key]["scores"] for seed, key in keys if "scores" in done.get(key, {})}
        moments = {cell.row.label: cell.score[0]}
        if cell.row.label == "FedAvg":
            moments["FedAvg, models as trained"] = "accuracy_trained/weighted"
        for row, name in moments.items() if runs else ():
            values = [{s: 100 * run[name][at] for s, run in runs.items()} for at in ("best", "round_10", "last")]
            column = f"{cell.column.key}, {vars(cell.setup.data)['clients']} clients"
            printed = cell.printed if row == cell.row.label else None
            found.setdefault(column, {})[row] = Results(printed, *values)
    return found


def fedapa_agreement() -> Found:
    """How far our values of Table 1 are from the printed ones, over the methods of a column."""
    found: Found = {}
    for column, results in fedapa_results().items():
        gaps = [one.difference for one in results.values() if one.printed is not None]
        near = {f"within {limit}": sum(abs(gap) <= limit for gap in gaps) for limit in (0.3, 1)}
        own = results["FedAPA"].difference
        found[column] = {"methods": len(gaps), **near, "median": round(median(gaps), 2), "FedAPA": round(own, 2)}
    return found


def fedapa_after_ten_rounds() -> Found:
    """How much FedAPA gains after round 10, and how many of the other methods gain less."""
    found: Found = {}
    for column, results in fedapa_results().items():
        gains = {row: one.later_gain for row, one in results.items() if one.printed is not None}
        less = sum(gain < gains["FedAPA"] for gain in gains.values())
        found[column] = {"gain": round(gains["FedAPA"], 1), "others that gain less": less, "others": len(gains) - 1}
    return found


def fedapa_last_rounds() -> Found:
    """How far the last round is below the best one, at most over columns and seeds."""
    found: Found = {}
    for results in fedapa_results().values():
        for row, one in results.items():
            found[row] = round(max(found.get(row, 0.0), *(one.best[s] - one.last[s] for s in one.best)), 2)
    return found


def fedapa_lead_over_simple_baselines() -> Found:
    """FedAPA's accuracy minus that of baselines that the paper leaves out, over the seeds that both have."""
    return {
        column: {row: round(results["FedAPA"].lead(one), 2) for row, one in results.items() if one.printed is None}
        for column, results in fedapa_results().items()
    }


# arithmetic


def fedlag_rows_one_point_apart() -> Found:
    """How many of the differences FedCAC − DBE and DBE − GPFL are 1.00 up to 0.05, by participation."""
    found = {}
    for table in TABLE_7:
        own = rows("fedlag", table)
        pairs = [("fedcac", "dbe"), ("dbe", "gpfl")]
        gaps = np.concatenate([np.subtract(own[a].values, own[b].values) for a, b in pairs])
        found[table] = f"{int((abs(gaps - 1) < 0.0501).sum())} of {len(gaps)}"
    return found


def fedlag_fedaf_repeats() -> Found:
    return {table: [*rows("fedlag", table)["fedaf"].values[:4]] for table in TABLE_7}


def fedlag_tables_1_and_7() -> Found:
    one, seven = rows("fedlag", "table-1"), rows("fedlag", "table-7-20")
    same = [one[m].values == row.values and one[m].std == row.std for m, row in seven.items()]
    return {"equal rows, with deviations": f"{sum(same)} of {len(same)}"}


def fedlag_deviations() -> Found:
    """Deviations of Table 7, and how far those of the first six methods are from uniform between 0 and 0.30."""
    every = np.array([s for table in TABLE_7 for row in rows("fedlag", table).values() for s in row.std])
    first = np.sort(
        [s for table in TABLE_7 for m, row in rows("fedlag", table).items() if m in FIRST_SIX for s in row.std]
    )
    inside = first[first <= 0.30]
    rank = np.arange(1, len(inside) + 1) / len(inside)
    return {
        "at most 0.30": f"{int((every <= 0.30).sum())} of {len(every)}",
        "others": sorted(every[every > 0.30].tolist()),
        "first six methods, counts by 0.05": np.histogram(inside, np.arange(7) * 0.05 + 1e-9)[0].tolist(),
        "first six, Kolmogorov-Smirnov distance from uniform": round(float(abs(rank - inside / 0.30).max()), 3),
        "critical distance at 5 %": round(1.36 / len(inside) ** 0.5, 3),
    }


def fedlag_jumps() -> Found:
    names = {"mnist-0.1": 0, "cifar10-0.1": 1, "cifar10-0.5": 5, "cifar100-0.1": 2, "cifar100-0.5": 6}
    return {
        f"{method} {name}": [rows("fedlag", table)[method].values[column] for table in TABLE_7]
        for method in ("fedavg", "fedbabu", "fedpac")
        for name, column in names.items()
    }


def fedlag_change_with_participation() -> Found:
    """Accuracy on CIFAR-10 at 100 % minus that at 20 %, for alpha 0.1 and 0.5."""
    few, many = rows("fedlag", "table-7-20"), rows("fedlag", "table-7-100")
    return {m: [round(many[m].values[at] - row.values[at], 2) for at in (1, 5)] for m, row in few.items()}


def fedapa_change_from_20_to_50_clients() -> Found:
    before, after = rows("fedapa", "table-1-20-clients"), rows("fedapa", "table-1-50-clients")
    return {method: round(after[method].values[0] - row.values[0], 2) for method, row in before.items()}


def fedapa_rank_of_pfedla() -> Found:
    found = {}
    for table in load_paper("fedapa").select("table-1"):
        for at, column in enumerate(table.columns):
            order = sorted(table.rows, key=lambda row: -row.values[at])
            found[f"{table.id} {column.key}"] = [row.method for row in order].index("pfedla") + 1
    return found


def fedapm_constant_predictions() -> Found:
    """Accuracy and weighted F1 as printed, and the F1 of a model that always predicts one class: 2p² / (1 + p)."""
    found = {}
    for table in ("table-3-ku-har", "table-3-crema-d"):
        for row in load_paper("fedapm").select(table)[0].rows:
            accuracy, f1 = row.values[:2]
            found[f"{table} {row.label}"] = [accuracy, f1, round(2 * accuracy**2 / (1 + accuracy), 3)]
    return found | {"logged loss of the untrained model, and ln 8": [2.0681, round(log(8), 4)]}


def selffl_worst_tenth() -> Found:
    """Clients of 200 with no correct prediction, if each prediction is correct with probability 0.705."""
    sizes = np.exp(np.random.default_rng(0).normal(4, 1, (1000, 200))).astype(int) + 5  # the cited code's rule
    tests = {f"{share:.0%} for testing": np.maximum(1, (share * sizes).astype(int)) for share in (0.1, 0.2)}
    found = {f"cited code's sizes, {name}": round(float((0.295**n).sum(1).mean()), 2) for name, n in tests.items()}
    return found | {"all clients have one test sample": 59.0, "needed for a worst tenth of 0": 20}


def selffl_smoothing() -> Found:
    """The weight of the initial model after 200 rounds of the smoothing average."""
    return {f"C={rate}": round((1 - rate) ** 200, 4) for rate in (0.02, 0.1)}


# small runs


def fedlag_without_personal_layers() -> Found:
    same = largest_difference(train(FedLAG(lr=0.3, personal_layers=0)), train(FedAvg(lr=0.3, weights="uniform")))
    return {"largest difference of FedLAG (k = 0) from FedAvg": same}


def ditto_global_model() -> Found:
    ditto, fedavg = (train(method).server["params"] for method in (ft.methods.Ditto(lr=0.3), FedAvg(lr=0.3)))
    return {"largest difference from FedAvg": max(float((ditto[name] - fedavg[name]).abs().max()) for name in fedavg)}


def fedapa_clipping() -> Found:
    """Whether clipping changes any score, with the paper's rule and with that of the code."""
    found = {}
    for variant in ("paper", "code"):
        kept, free = (train(FedAPA(lr=0.3, clip=clip, variant=variant)).records for clip in (True, False))
        names = ("accuracy_trained", "loss_trained")
        found[variant] = max(abs(a[name] - b[name]) for a, b in zip(kept, free, strict=True) for name in names)
    return found


def fedapa_own_weight() -> Found:
    """Largest weight of another client's body, and accuracy, beside local training in the same rounds."""
    found: Found = {}
    for mu in (0.0, 0.5, 1.0):
        run = train(FedAPA(lr=0.3, self_weight=mu))
        weights = torch.as_tensor(run.records[-1]["method_metrics"]["weights"])
        own = float(weights.diagonal().mean())
        found[f"mu={mu:g}"] = {
            "mean own weight": round(own, 4),
            "accuracy": round(run.records[-1]["accuracy_trained"], 4),
        }
    return found | {"local": round(train(Local(lr=0.3, sampled=True)).records[-1]["accuracy_trained"], 4)}


def f1_above_accuracy() -> Found:
    """Mean over clients of accuracy and weighted F1: one common model, and personal models."""
    found = {}
    for seed in range(3):
        for method, moment in ((FedAvg(lr=0.3), "received"), (FedAvg(lr=0.3), "trained"), (Local(lr=0.3), "trained")):
            last = train(method, seed).records[-1]
            name = f"{method.display_name}, {moment}, seed {seed}"
            found[name] = [round(last[f"{metric}_{moment}_mean"], 3) for metric in ("accuracy", "weighted_f1")]
    return found


def fedavg_by_alpha() -> Found:
    """FedAvg with more and with less heterogeneous clients: one common model, and models as trained."""
    found: Found = {}
    for alpha in (0.1, 0.5):
        last = [train(FedAvg(lr=0.3), seed, alpha=alpha).records[-1] for seed in range(3)]
        for moment in ("received", "trained"):
            found[f"alpha {alpha}, {moment}"] = [round(one[f"accuracy_{moment}_mean"], 3) for one in last]
    return found


def fedpac_quadratic_program() -> Found:
    random = torch.Generator().manual_seed(0)
    factors = torch.randn(100, 100, 120, generator=random, dtype=torch.float64)
    started = time.perf_counter()
    solve_simplex_qp(factors @ factors.mT)
    return {"seconds for 100 clients of 100 unknowns": round(time.perf_counter() - started, 2)}


CHECKS: tuple[Callable[[], Found], ...] = (
    fedapa_agreement, fedapa_after_ten_rounds, fedapa_last_rounds, fedapa_lead_over_simple_baselines,
    fedlag_rows_one_point_apart, fedlag_fedaf_repeats, fedlag_tables_1_and_7, fedlag_deviations, fedlag_jumps,
    fedlag_change_with_participation,
    fedapa_change_from_20_to_50_clients, fedapa_rank_of_pfedla, fedapm_constant_predictions, selffl_worst_tenth,
    selffl_smoothing, fedlag_without_personal_layers, ditto_global_model, fedapa_clipping, fedapa_own_weight,
    f1_above_accuracy, fedavg_by_alpha, fedpac_quadratic_program,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    found: Found = {}
    for check in CHECKS:
        found[check.__name__] = check()
        print(check.__name__, json.dumps(found[check.__name__], indent=1), flush=True)
    about = {"date": str(date.today()), "machine": platform.machine(), "torch": torch.__version__}
    (options.out / "paper_checks.json").write_text(json.dumps(about | {"results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
