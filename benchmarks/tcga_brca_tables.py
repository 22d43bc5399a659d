"""Tables of docs/tcga_brca.md, and what FLamby prints."""

from math import nan
from statistics import fmean
from typing import Any

from fedtailor.analysis.statistics import mean_interval
from fedtailor.data.tcga_brca import REGIONS
from fedtailor.methods import METHODS

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
TEST_TO_TRAIN = 0.2 / 0.8  # samples in each of the redrawn splits, which overlap


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
        by_region = [[g for a, b in pairs if (g := gain(a, b)[region]) is not None] for region in range(6)]
        better = ", ".join(f"{sum(g > 0 for g in own)}/{len(own)}" for own in by_region)
        cells = [f"{fmean(one):.3f}" for one in values]
        shown = "" if method == "local" else interval(gains, "+.3f")
        overall = interval(means, ".3f")
        title, lr = METHODS[method].class_title(), found["lr"][method]
        print(f"| {title} | {lr} | {' | '.join(cells)} | {overall} | {shown} | {better} |")
    show_gains(runs)
    defined = [sum(seed["c_index"][region] is not None for seed in runs["local"]) for region in range(6)]
    print(f"\nsplits in which the C-index is defined: {dict(zip(REGIONS, defined, strict=True))}")


def show_gains(runs: dict[str, Any]) -> None:
    """Print the gain of each region over local training, without Canada."""
    print(f"\n| gain over local training | {' | '.join(REGIONS[:-1])} |\n|{'---|' * len(REGIONS)}")
    for method in [name for name in runs if name != "local"]:
        pairs = [gain(a, b) for a, b in zip(runs[method], runs["local"], strict=True)]
        own = [[g for pair in pairs if (g := pair[region]) is not None] for region in range(5)]
        print(f"| {METHODS[method].class_title()} | {' | '.join(interval(one, '+.3f') for one in own)} |")


def interval(values: list[float], digits: str) -> str:
    """Return the mean over splits and its 95 % interval by the corrected resampled t test."""
    low, high = mean_interval(values, TEST_TO_TRAIN) or (nan, nan)
    return f"{fmean(values):{digits}} ({low:{digits}} to {high:{digits}})"


def gain(one: dict[str, Any], other: dict[str, Any]) -> list[float | None]:
    pairs = zip(one["c_index"], other["c_index"], strict=True)
    return [None if a is None or b is None else a - b for a, b in pairs]


def mean_of(values: list[float | None]) -> float:
    """Return the mean of the defined values."""
    return fmean(value for value in values if value is not None)
