"""Self-FL's Figures 4 to 6 with 200 repeats: Gaussian data, where local training has a closed form.

python benchmarks/selffl_gaussian.py                # a minute on one core; results/selffl_gaussian.json
python benchmarks/selffl_gaussian.py --check        # and compare the repeats that are in results/papers/selffl.jsonl

A client's steps of gradient descent are Equation 6, so a round is a few lines of arithmetic over all repeats. Data,
participants, and initial weights are those of FedTailor's runs with the same seed. Per-FedAvg uses whole batches here,
which it divides at random there. Errors are absolute; the last rows of each case are estimates in closed form.
"""

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fedtailor as ft
from fedtailor.data.generated import Gaussian
from fedtailor.data.sample_table import SampleTable
from fedtailor.papers.jobs import read_results
from fedtailor.training.participation import make_schedule

Array = NDArray[np.float64]
CASES = {"homogeneous": Gaussian(between=0.001, largest=20), "heterogeneous": Gaussian(between=1.0, largest=200)}
RATES = (0.1, 0.2, 0.5, 0.8, 1.0)
WITHIN, LR, STEPS, ROUNDS = 0.1, 1e-4, 50, 200
UNKNOWN = -1.0


@dataclass(frozen=True)
class Repeats:
    """All repeats of one case; arrays have one row per repeat and one column per client."""

    between: float
    sizes: Array
    theta: Array  # θ_m
    local: Array  # θ_m^(L), the mean of the client's samples
    start: Array  # initial weight, one per repeat
    active: NDArray[np.int64]  # [repeats, rounds, clients of a round]

    @property
    def own(self) -> Array:
        """σ_m²."""
        return WITHIN / self.sizes

    def descend(self, start: Array, steps: Array | int, clients: NDArray[np.int64]) -> Array:
        """Return the weights after so many steps (Equation 6)."""
        left = (1 - LR / pick(self.own, clients)) ** steps
        return left * start + (1 - left) * pick(self.local, clients)

    def errors(self, common: Array, own: Array) -> tuple[Array, Array]:
        """Return the error of the common parameter and the mean error of the local ones, one per repeat."""
        return abs(common - 1.6), abs(own - self.theta).mean(1)


def pick(values: Array, clients: NDArray[np.int64]) -> Array:
    return np.take_along_axis(values, clients, 1)


def put(values: Array, clients: NDArray[np.int64], new: Array) -> None:
    np.put_along_axis(values, clients, new, 1)


def average(values: Array, weights: Array) -> Array:
    return np.asarray((weights * values).sum(1) / weights.sum(1))


def make_repeats(data: Gaussian, rate: float, count: int) -> Repeats:
    """Return data, initial weights, and participants as in FedTailor's runs with the seeds 0 to count − 1."""
    model = ft.network("logistic", ft.load("gaussian"), bias=False)
    tables = [replace(data, seed=seed, scaled=False).read() for seed in range(count)]
    samples = [[own[:-1] for own in samples_by_client(one)] for one in tables]  # the last one is the parameter
    return Repeats(
        between=data.between,
        sizes=np.array([[len(own) for own in one] for one in samples], float),
        theta=np.array([[own[-1] for own in samples_by_client(one)] for one in tables]),
        local=np.array([[own.mean() for own in one] for one in samples]),
        start=np.array([float(next(iter(model.init(seed).values()))) for seed in range(count)]),
        active=np.array([make_schedule(data.clients, ROUNDS, rate, seed) for seed in range(count)]),
    )


def samples_by_client(table: SampleTable) -> list[Array]:
    return [table.y[table.owner == client] for client in range(len(table.owner_names))]


def fedavg(case: Repeats, personal: bool = False, tuning: int = 0) -> tuple[Array, Array]:
    """`personal`: clients keep their models as trained; otherwise, they use the common one, fine-tuned with steps."""
    common, own = case.start, np.repeat(case.start[:, None], case.sizes.shape[1], 1)
    for clients in case.active.swapaxes(0, 1):
        trained = case.descend(common[:, None], STEPS, clients)
        put(own, clients, trained)
        common = average(trained, pick(case.sizes, clients))
    everyone = np.repeat(np.arange(case.sizes.shape[1])[None], len(common), 0)
    return common, own if personal else case.descend(common[:, None], tuning, everyone)


def perfedavg(case: Repeats) -> tuple[Array, Array]:
    """Per-FedAvg without division of its batches; one step of adaptation, and equal weights."""
    common, rate = case.start, LR / case.own
    for clients in case.active.swapaxes(0, 1):
        left, target = (1 - pick(rate * (1 - rate), clients)) ** STEPS, pick(case.local, clients)
        common = (left * common[:, None] + (1 - left) * target).mean(1)
    return common, case.local + (1 - rate) * (common[:, None] - case.local)


def ditto(case: Repeats, lam: float = 1.0, with_rate: bool = True) -> tuple[Array, Array]:
    """`with_rate` false: the proximal term is not multiplied by the learning rate, as Section G.1 prints it."""
    common, own = case.start, np.repeat(case.start[:, None], case.sizes.shape[1], 1)
    pull = lam * (LR if with_rate else 1)
    for clients in case.active.swapaxes(0, 1):
        rate, target, center = LR / pick(case.own, clients), pick(case.local, clients), common[:, None]
        best = (rate * target + pull * center) / (rate + pull)
        put(own, clients, best + (1 - rate - pull) ** STEPS * (pick(own, clients) - best))
        common = average(case.descend(center, STEPS, clients), pick(case.sizes, clients))
    return common, own


def pfedme(case: Repeats, lam: float = 15.0, inner: int = 5) -> tuple[Array, Array]:
    common, own = case.start, np.repeat(case.start[:, None], case.sizes.shape[1], 1)
    for clients in case.active.swapaxes(0, 1):
        copy = np.repeat(common[:, None], clients.shape[1], 1)
        personal, rate, target = copy, LR / pick(case.own, clients), pick(case.local, clients)
        for _ in range(STEPS):
            best = (rate * target + LR * lam * copy) / (rate + LR * lam)
            personal = best + (1 - rate - LR * lam) ** inner * (personal - best)
            copy = copy - LR * lam * (copy - personal)
        put(own, clients, personal)
        common = average(copy, pick(case.sizes, clients))
    return common, own


@dataclass(frozen=True)
class SelfFL:
    """Algorithm 1, and Algorithm 2 with minimum_steps; with the true variances or with estimates."""

    known: bool = True
    smoothing: bool = True
    warmup: int = 0  # rounds of FedAvg
    max_steps: float = inf
    minimum_steps: int = 0

    def __call__(self, case: Repeats) -> tuple[Array, Array]:
        repeats, clients = case.sizes.shape
        zeros = np.zeros((repeats, clients))
        common, own = case.start, np.repeat(case.start[:, None], clients, 1)
        state = {"optimum": own.copy(), "mean": zeros.copy(), "variance": zeros.copy(), "count": zeros.copy()}
        state["sent"] = case.own.copy() if self.known else zeros + UNKNOWN
        between = np.full(repeats, case.between if self.known else 0.0)
        for number, active in enumerate(case.active.swapaxes(0, 1), start=1):
            weights = 1 / np.maximum(between[:, None] + fill(state["sent"], state["sent"]), 1e-12)
            start, steps = self._plan(case, common, between, weights.sum(1), state, number, active)
            trained = case.descend(start, steps, active)
            optimum = case.descend(trained, self.minimum_steps, active)
            put(own, active, trained)
            put(state["optimum"], active, optimum)
            self._estimate(state, number, active, optimum)
            if not self.known and active.shape[1] > 1:
                between = optimum.var(1)
            if number <= self.warmup:
                common = average(optimum, pick(case.sizes, active))
                continue
            used = fill(pick(state["sent"], active), state["sent"])
            mean = average(optimum, 1 / np.maximum(between[:, None] + used, 1e-12))
            share = active.shape[1] / clients if self.smoothing else 1.0
            common = (1 - share) * common + share * mean
        return common, own

    def _plan(
        self, case: Repeats, common: Array, between: Array, total: Array, state: dict[str, Array], number: int,
        active: NDArray[np.int64],
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return where the clients of a round start (Equation 10), and how many steps they take (Equation 8)."""
        variance = pick(case.own if self.known else state["variance"], active)
        adapt = (self.known | (pick(state["count"], active) >= 2)) & (number > self.warmup)
        weight = 1 / np.maximum(between[:, None] + variance, 1e-12)
        others = np.where(adapt, total[:, None] - weight, 1.0)
        moved = common[:, None] - weight / others * (pick(state["optimum"], active) - common[:, None])
        solvable = variance > LR
        variance = np.where(solvable, variance, 2 * LR)
        steps = np.clip(np.round(-np.log1p(1 / (others * variance)) / np.log1p(-LR / variance)), 1, self.max_steps)
        steps = np.where(solvable, steps, 1)
        return np.where(adapt, moved, common[:, None]), np.where(adapt, steps, 20 if self.max_steps == 40 else STEPS)

    def _estimate(self, state: dict[str, Array], number: int, active: NDArray[np.int64], new: Array) -> None:
        """Update the variances over rounds (Equations 13 and 19)."""
        if self.known or number <= self.warmup:
            return
        count, old, variance = (pick(state[name], active) for name in ("count", "mean", "variance"))
        count, mean = count + 1, old + (new - old) / (count + 1)
        variance = (1 - 1 / count) * (variance + (mean - old) ** 2) + (new - mean) ** 2 / count
        for name, value in (("count", count), ("mean", mean), ("variance", variance)):
            put(state[name], active, value)
        put(state["sent"], active, np.where(count >= 2, variance, UNKNOWN))


def fill(variances: Array, known: Array) -> Array:
    """Replace unknown variances by the mean of the known ones."""
    is_known = known >= 0
    average = np.where(is_known, known, 0).sum(1) / np.maximum(is_known.sum(1), 1)
    return np.where(variances >= 0, variances, average[:, None])


METHODS: dict[str, Callable[[Repeats], tuple[Array, Array]]] = {
    "FedAvg": fedavg,
    "FedAvg, models as trained": partial(fedavg, personal=True),
    "FedAvg-FT": partial(fedavg, tuning=5),
    "PerFedAvg, whole batches": perfedavg,
    "DITTO": ditto,
    "DITTO, λ 0.01 without the learning rate": partial(ditto, lam=0.01, with_rate=False),
    "pFedMe": pfedme,
    "Self-FL, known variances": SelfFL(),
    "Self-FL, known variances, no smoothing": SelfFL(smoothing=False),
    "Self-FL, known variances, at most 40 steps": SelfFL(max_steps=40),
    "Self-FL, known variances, 50 rounds of FedAvg first": SelfFL(warmup=50),
    "Self-FL, estimated variances": SelfFL(known=False, warmup=5, max_steps=200),
    "Self-FL, estimated variances, at most 40 steps": SelfFL(known=False, warmup=5, max_steps=40),
    "Self-FL, estimated variances, 50 rounds of FedAvg first": SelfFL(known=False, warmup=50, max_steps=200),
    "Algorithm 2": SelfFL(minimum_steps=500),
}


def closed_forms(case: Repeats) -> dict[str, tuple[Array, Array]]:
    """Return the errors of estimates that need no training; the posterior mean has the least squared error."""
    weights, own, local = 1 / (case.between + case.own), case.own, case.local
    common = average(local, weights)  # θ^(G), Equation 2
    others, pull = (x.sum(1, keepdims=True) - x for x in (weights, weights * local))
    optimum = (local / own + pull) / (1 / own + others)  # θ^(FL), Equation 3
    posterior = (local / own + common[:, None] / case.between) / (1 / own + 1 / case.between)
    found = {"local optimum": local, "FL-optimal (Equation 3)": optimum, "posterior mean of Equation 1": posterior}
    return {name: case.errors(common, value) for name, value in found.items()}


def check(found: dict[str, Any], path: Path) -> None:
    """Print the largest difference from the runs of `fedtailor paper run selffl` with the same seeds."""
    largest, count = 0.0, 0
    for run in read_results(path):
        (table, *names, _), settings = run["run"].split(", "), run["settings"]
        label, rate = ", ".join(names), f"C={settings['participation']:g}"
        if settings["data"]["name"] != "gaussian" or label not in METHODS or "scores" not in run:
            continue
        case = "homogeneous" if settings["data"]["between"] < 1 else "heterogeneous"
        name = "global_mae_received" if table.endswith("a") else "mae_trained"
        name = "mae_received" if table.endswith("b") and label in ("FedAvg", "FedAvg-FT") else name
        ours = found[case][label][rate]["seeds"][run["seed"]][0 if table.endswith("a") else 1]
        largest, count = max(largest, abs(ours - run["scores"][f"{name}/mean"]["last"])), count + 1
    print(f"{count} runs of {path}: the largest difference is {largest:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name, data in CASES.items():
        found[name] = {method: {} for method in METHODS}
        for rate in RATES:
            case = make_repeats(data, rate, options.repeats)
            for method, run in METHODS.items():
                found[name][method][f"C={rate:g}"] = summarize(case.errors(*run(case)))
        found[name] |= {method: summarize(errors) for method, errors in closed_forms(case).items()}
        print_case(name, found[name])
    if options.check:
        check(found, Path("results", "papers", "selffl.jsonl"))
    for row in [row for case in found.values() for row in case.values()]:
        for cell in [row] if "common" in row else row.values():
            del cell["seeds"]
    about = {"date": str(date.today()), "machine": platform.machine(), "repeats": options.repeats}
    path = options.out / "selffl_gaussian.json"
    path.write_text(json.dumps(about | {"results": found}, indent=1) + "\n")


def summarize(errors: tuple[Array, Array]) -> dict[str, Any]:
    """Return means and standard errors over repeats, and the errors of the first repeats."""
    result: dict[str, Any] = {}
    for name, values in zip(("common", "local"), errors, strict=True):
        result |= {name: round(values.mean(), 5), f"{name}_error": round(values.std() / len(values) ** 0.5, 5)}
    return result | {"seeds": np.stack(errors, 1)[:10].tolist()}


def print_case(name: str, rows: dict[str, Any]) -> None:
    print(f"{name}: error of the common parameter / mean error of the local ones")
    for label, row in rows.items():
        cells = [row] if "common" in row else row.values()
        print(f"  {label:58}", *(f"{cell['common']:.4f} / {cell['local']:.4f}" for cell in cells))


if __name__ == "__main__":
    main()
