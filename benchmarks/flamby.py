"""What the benchmarks of FLamby's data sets share (heart.py, tcga_brca.py): personalized methods whose learning rates
are chosen on validation data, result files, and FLamby's order of batches.

FLamby draws batches with PyTorch's DataLoader: a permutation for every pass of a client, continued in the next round.
Worker processes draw the first permutations when the loaders are created, which is before the seed is set again and
after the previous method has run. With the same order, results can be compared without the noise of the order.
"""

import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import date
from itertools import product
from math import isnan, nan
from multiprocessing import get_context
from operator import methodcaller
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.analysis.statistics import mean_interval
from fedtailor.core.batch import Batch
from fedtailor.core.client_batches import ClientBatches
from fedtailor.core.trees import Tree
from fedtailor.methods import METHODS, Averaged, FedAvg

FLAMBY_SEEDS = range(42, 47)
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
TUNING_SEEDS = range(100, 105)
Scores = dict[str, Any]  # metric -> values of the clients
Job = TypeVar("Job")


def run_all(jobs: Sequence[Job], parallel: int) -> dict[Job, Scores]:
    """Call the method `run` of all jobs in worker processes."""
    with ProcessPoolExecutor(parallel, get_context("spawn")) as pool:
        return dict(zip(jobs, pool.map(methodcaller("run"), jobs, chunksize=4), strict=True))


def personalize(
    make_job: Callable[[str, str, int, float], Any], methods: Sequence[str], test_seeds: Sequence[int], parallel: int
) -> dict[str, Any]:
    """Return the results of methods on test data, with the learning rate that is best on validation data of other
    splits. A job has a stage, "tune" or "test", a method, a seed, and a learning rate."""
    tuned = run_all([make_job("tune", *one) for one in product(methods, TUNING_SEEDS, RATES)], parallel)
    validation = {
        method: {
            lr: fmean(tuned[make_job("tune", method, seed, lr)]["validation"] for seed in TUNING_SEEDS) for lr in RATES
        }
        for method in methods
    }
    chosen = {method: max(rates, key=lambda lr: rates[lr]) for method, rates in validation.items()}
    found = run_all(
        [make_job("test", method, seed, chosen[method]) for method in methods for seed in test_seeds], parallel
    )
    runs = {m: [found[make_job("test", m, seed, chosen[m])] for seed in test_seeds] for m in methods}
    return {"validation": validation, "lr": chosen, "runs": runs}


def run_personal(
    name: str, lr: float, model: ft.Model, fed: ft.Federation, metrics: Sequence[str], is_tuning: bool, **settings: Any
) -> Scores:
    """Train a method with its default settings and this learning rate for 20 rounds; return the validation score with
    `is_tuning`, and otherwise the test scores."""
    try:
        method = _make_method(name, lr)
    except ft.ConfigError:
        return {"validation": -1.0}  # pFedMe needs lr < 1/λ
    run = ft.simulate(
        method, model, fed, rounds=20, evaluate_every=20, engine="sequential", metrics=metrics,
        validation=0.25 if is_tuning else 0.0, **settings,
    )  # fmt: skip
    if is_tuning:
        return {"validation": run.records[-1][f"validation_{run.info['ranked_by']}"]}
    return scores(run, metrics)


def _make_method(name: str, lr: float) -> ft.Method:
    if name == "averaged":
        return Averaged(FedAvg(lr=lr))
    extra = {"share": "all"} if name == "fedapa" else {}  # a linear model has no body
    return METHODS[name](lr=lr, **extra)  # type: ignore[call-arg]


def scores(run: ft.Run, names: Sequence[str]) -> Scores:
    """Return metric -> values of the clients in the last round; None where a metric is undefined."""
    found = {name: run.scores(run.info["ranked_by"], "last", name) for name in names}
    values = {name: [one.get(client, nan) for client in range(run.num_clients)] for name, one in found.items()}
    return {name: [None if isnan(value) else round(value, 5) for value in row] for name, row in values.items()}


def gains_over_local(runs: dict[str, list[Scores]], method: str, metric: str) -> list[list[float]]:
    """Return the gains of each client over local training, in the splits in which its score is defined."""
    splits = [
        zip(own[metric], local[metric], strict=True) for own, local in zip(runs[method], runs["local"], strict=True)
    ]
    by_client = zip(*splits, strict=True)
    return [[a - b for a, b in pairs if a is not None and b is not None] for pairs in by_client]


def interval(values: list[float], test_to_train: float, digits: str) -> str:
    """Return the mean over splits and its 95 % interval by the corrected resampled t test, because splits overlap."""
    low, high = mean_interval(values, test_to_train) or (nan, nan)
    return f"{fmean(values):{digits}} ({low:{digits}} to {high:{digits}})"


def show_gains(
    runs: dict[str, list[Scores]], methods: Sequence[str], metric: str, clients: Sequence[str], test_to_train: float,
    scale: float = 1.0, digits: str = "+.3f",
) -> None:  # fmt: skip
    """Print a table of the gains of the first clients over local training."""
    print(f"\n| gain in {metric} | {' | '.join(clients)} |\n|{'---|' * (len(clients) + 1)}")
    for method in methods:
        gains = gains_over_local(runs, method, metric)[: len(clients)]
        cells = [interval([scale * gain for gain in own], test_to_train, digits) for own in gains]
        print(f"| {METHODS[method].class_title()} | {' | '.join(cells)} |")


def write_results(path: Path, stage: str, result: Any) -> None:
    """Replace the result of a stage in a file, with the date and the machine."""
    results = json.loads(path.read_text()) if path.is_file() else {}
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    results |= {stage: result, "date": str(date.today()), "torch": torch.__version__, "machine": machine}
    lines = json.dumps(results, indent=1)
    path.write_text(re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), lines) + "\n")


def draw() -> int:
    """Return a random number as a DataLoader draws its seeds."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


class Loader:
    """Batches of one client, with a new permutation for every pass. With a seed, the first pass begins when the client
    trains, after the seed is set; otherwise now, as with worker processes."""

    def __init__(self, samples: Tensor, batch_size: int, seed: int | None = None) -> None:
        self._samples, self._batch_size, self._seed = samples, batch_size, seed
        self._batches = self._new_pass() if seed is None else None

    def _new_pass(self) -> Iterator[Tensor]:
        draw()  # the seed of the worker processes
        generator = torch.Generator()
        generator.manual_seed(draw())
        return iter(torch.split(torch.randperm(len(self._samples), generator=generator), self._batch_size))

    def next(self) -> Tensor:
        """Return the positions of the next batch among the client's samples."""
        if self._batches is None and self._seed is not None:
            torch.manual_seed(self._seed)
        batch = None if self._batches is None else next(self._batches, None)
        if batch is None:
            self._batches = self._new_pass()
            batch = next(self._batches)
        return self._samples[batch]


def federated_loaders(sizes: Sequence[int], batch_size: int, rounds: int, steps: int, seed: int) -> list[Loader]:
    """Return the loaders of a federated method, after another one has run and has been tested, and set the seed."""
    torch.manual_seed(seed)
    done = [0] * len(sizes)
    for _ in range(rounds):
        for client, size in enumerate(sizes):
            batches = -(-size // batch_size)
            begun = max(-(-done[client] // batches), 1)  # passes
            done[client] += steps
            for _ in range(2 * (-(-done[client] // batches) - begun)):
                draw()
    for _ in range(len(sizes) + 1):  # the tests
        draw()
    loaders = [Loader(torch.arange(size), batch_size) for size in sizes]
    torch.manual_seed(seed)
    return loaders


@contextmanager
def flamby_order(loaders: Sequence[Loader]) -> Iterator[None]:
    """Let the clients of the sequential engine train on these batches."""

    def run_steps(
        self: ClientBatches, step: Callable[[Tree, Batch], Tree], state: Tree, steps: int, *other: Any
    ) -> Tree:
        for _ in range(steps):
            chosen = loaders[int(self.index)].next()
            weight = torch.ones(len(chosen), dtype=self._shared.dtype)
            state = step(state, self._gather(self._samples[chosen], weight, lambda: torch.tensor(0), None))
        return state

    with mock.patch.object(ClientBatches, "_run_steps_unmapped", run_steps):
        yield
