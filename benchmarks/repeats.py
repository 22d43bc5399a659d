"""Intervals over redrawn splits: their coverage on simulated data, and the gains of four hospitals (docs/compare.md).

python benchmarks/repeats.py coverage   # how often 95 % intervals contain the true difference of 0; half a minute
python benchmarks/repeats.py heart      # the AUC of FedAvg, pFedMe, and Ditto at four hospitals; a few minutes

The results are in benchmarks/results/repeats.json.
"""

import argparse
import json
import platform
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import fedtailor as ft
from fedtailor.analysis.statistics import paired_t_test
from fedtailor.data.splits.resampling import draw_split

RESULTS = Path(__file__).parent / "results" / "repeats.json"
CLIENTS = ((46, 0.5), (130, 0.78), (300, 0.46))  # samples, and fraction of class 1
DESIGNS = ((10, None), (20, None), (1, 5), (4, 5), (1, 10))  # repeats and folds; without folds, 34 % are tested
DATA_SETS = 400
Array = NDArray[Any]


def accuracy(feature: Array, y: Array, train: Array, test: Array) -> float:
    """Return the accuracy of a threshold halfway between the classes' means."""
    low, high = (feature[train][y[train] == label].mean() for label in (0, 1))
    return float(np.mean((feature[test] > (low + high) / 2) == y[test]))


def auc(feature: Array, y: Array, train: Array, test: Array) -> float:
    """Return the fraction of pairs of test samples that the feature orders by class."""
    own, labels = feature[test], y[test]
    return float(np.mean(own[labels == 1][:, None] > own[labels == 0]))


def coverage(samples: int, fraction: float, repeats: int, folds: int | None, score: Any) -> dict[str, float]:
    """Return how often the corrected and the naive interval contain 0, the difference between two features that are
    equally informative."""
    random, inside = np.random.default_rng(0), {"corrected": 0, "naive": 0}
    y, splits = (np.arange(samples) < round(fraction * samples)).astype(np.int64), repeats * (folds or 1)
    num_test = round(samples * (1 / folds if folds else 0.34))
    for number in range(DATA_SETS):
        features = random.normal(size=(2, samples)) + y
        parts = [draw_split(y, num_test, number * splits + split, 0, folds) for split in range(splits)]
        ours, theirs = ([score(feature, y, *part) for part in parts] for feature in features)
        for kind, ratio in (("corrected", num_test / (samples - num_test)), ("naive", 0.0)):
            interval = paired_t_test(ours, theirs, ratio).interval
            inside[kind] += interval is None or interval[0] <= 0 <= interval[1]
    return {kind: count / DATA_SETS for kind, count in inside.items()}


def measure_coverage() -> list[dict[str, Any]]:
    """Return the coverage for all sizes of clients, designs, and scores."""
    return [
        {"samples": samples, "class_1": fraction, "repeats": repeats, "folds": folds, "score": score.__name__}
        | coverage(samples, fraction, repeats, folds, score)
        for samples, fraction in CLIENTS
        for repeats, folds in DESIGNS
        for score in (accuracy, auc)
    ]


def compare_hospitals() -> dict[str, Any]:
    """Return the rows per hospital and method, by cross-validation and by repeated splits."""
    designs: dict[str, dict[str, Any]] = {"folds": {"folds": 5, "repeats": 4}, "splits": {"repeats": 20}}
    found = {
        name: ft.compare(
            ["fedavg", "pfedme", "ditto"], "logistic", "heart", rounds=20, batch_size=16, metrics=["auc", "accuracy"],
            progress=True, **design,
        )
        for name, design in designs.items()
    }  # fmt: skip
    return {
        name: {"clients": result.rows("client_mean"), "verdict": result.verdict()} for name, result in found.items()
    }


def main() -> None:
    """Run one part and add its result to the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["coverage", "heart"])
    part = parser.parse_args().part
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    results[part] = measure_coverage() if part == "coverage" else compare_hospitals()
    results |= {"date": str(date.today()), "torch": torch.__version__, "machine": platform.machine()}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
