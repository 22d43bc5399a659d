"""The results in docs/methods/averaged.md: methods with and without a running mean of their personal models.

python benchmarks/averaged.py tune --workers 8     # learning rate and weight decay, judged on validation data
python benchmarks/averaged.py test --workers 8     # the chosen settings with three seeds that did not choose them
python benchmarks/averaged.py memory --workers 8   # the memory, judged on validation data
python benchmarks/averaged.py all --workers 8      # all methods on one of the settings
python benchmarks/averaged.py activity --workers 8 # activities of thirty people, one client each
python benchmarks/averaged.py show                 # print the tables

Every run is one line of benchmarks/results/averaged.jsonl. Runs that are there are skipped, so the script can be
stopped at any time and started again, also on another machine.
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from datetime import date
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import fedtailor as ft
from fedtailor.methods import METHODS, Averaged

RESULTS = Path(__file__).parent / "results" / "averaged.jsonl"
METHOD_NAMES = ("local", "fedavg", "fedrep", "fedbabu", "fedala", "fedapa", "fedlag", "fedpac", "ditto", "selffl")
TUNING_SEED, TEST_SEEDS = 0, (20, 21, 22)
RATES, DECAYS, MEMORIES = (0.02, 0.05), (0.0, 1e-3), (0.5, 0.8, 0.9, 0.95, 0.98)
UNSUITABLE = ("centralized", "averaged")


@dataclass(frozen=True)
class Job:
    """One run."""

    stage: str
    data: str
    partition: str  # dirichlet (alpha 0.1), pathological (2 classes per client), or by_owner
    clients: int
    method: str
    memory: float  # 0: without the mean
    lr: float
    weight_decay: float
    seed: int

    @property
    def rounds(self) -> int:
        return {20: 100, 100: 200}.get(self.clients, 100)

    @property
    def participation(self) -> float:
        return 0.2 if self.clients == 100 else 0.8

    @property
    def setting(self) -> tuple[str, str, int]:
        return self.data, self.partition, self.clients

    def make_method(self) -> ft.Method:
        """Return the method with this learning rate and weight decay, as far as it has these settings."""
        kind = METHODS[self.method]
        known = {f.name for f in fields(kind)} - kind.fixed_settings.keys()
        wanted = {"lr": self.lr, "weight_decay": self.weight_decay, "epochs": 2}
        wanted |= {"sampled": True} if self.method == "local" else {}
        inner = kind(**{name: value for name, value in wanted.items() if name in known})
        return Averaged(inner, memory=self.memory) if self.memory else inner


def settings() -> Iterator[tuple[str, str, int]]:
    for clients in (20, 100):
        for data in ("cifar10", "fashion-mnist"):
            for partition in ("dirichlet", "pathological"):
                yield data, partition, clients


def decays(method: str) -> tuple[float, ...]:
    """Return the weight decays that are tried; Self-FL has none."""
    return DECAYS if issubclass(METHODS[method], ft.LocalTraining) else DECAYS[:1]


def tuning_jobs() -> Iterator[Job]:
    """The settings of 100 clients use what is chosen with 20 clients on the same data and partition."""
    for setting in settings():
        for method in METHOD_NAMES if setting[2] == 20 else ():
            for lr in RATES:
                for decay in decays(method):
                    for memory in (0.0, 0.9):
                        yield Job("tune", *setting, method, memory, lr, decay, TUNING_SEED)


def test_jobs(done: dict[Job, Any]) -> Iterator[Job]:
    chosen = choose(done)
    for seed in TEST_SEEDS:
        for setting in settings():
            for method in METHOD_NAMES:
                for memory in (0.0, 0.9):
                    if (best := chosen.get((setting[0], setting[1], method, memory))) is not None:
                        yield Job("test", *setting, method, memory, *best, seed)


def memory_jobs() -> Iterator[Job]:
    for setting in settings():
        for method in ("fedavg", "fedlag", "ditto") if setting[2] == 20 else ():
            for memory in MEMORIES:
                yield Job("memory", *setting, method, memory, 0.05, 1e-3, TUNING_SEED)


def all_jobs() -> Iterator[Job]:
    for seed in TEST_SEEDS:
        for method in METHODS:
            for memory in (0.0, 0.9) if method not in UNSUITABLE else ():
                yield Job("all", "cifar10", "dirichlet", 20, method, memory, 0.05, 1e-3, seed)


def activity_jobs() -> Iterator[Job]:
    for seed in TEST_SEEDS:
        for method in METHOD_NAMES:
            for memory in (0.0, 0.9):
                yield Job("activity", "hapt", "by_owner", 30, method, memory, 0.05, 1e-3, seed)


def choose(done: dict[Job, Any]) -> dict[tuple[str, str, str, float], tuple[float, float]]:
    """Return the learning rate and weight decay with the best validation accuracy in the last round."""
    best: dict[tuple[str, str, str, float], tuple[float, float, float]] = {}
    counts: dict[tuple[str, str, str, float], int] = defaultdict(int)
    for job, result in done.items():
        if job.stage == "tune":
            key = job.data, job.partition, job.method, job.memory
            counts[key] += 1
            found = result["validation"][-1] if result["validation"] else float("-inf")
            best[key] = max(best.get(key, (float("-inf"), 0.0, 0.0)), (found, job.lr, job.weight_decay))
    whole = {method: len(RATES) * len(decays(method)) for method in METHOD_NAMES}
    return {key: (lr, decay) for key, (_, lr, decay) in best.items() if counts[key] == whole[key[2]]}


@lru_cache(maxsize=4)
def load(data: str, partition: str, clients: int, seed: int) -> ft.Federation:
    if partition == "by_owner":
        return ft.load(data, seed=seed, transitions=False)
    return ft.load(data, clients=clients, partition=partition, alpha=0.1, classes_per_client=2, seed=seed)


def run(job: Job) -> dict[str, Any]:
    torch.set_num_threads(1)
    fed = load(*job.setting, job.seed)
    model = ft.network("activity" if job.data == "hapt" else "lenet5", fed)
    started = time.perf_counter()
    try:
        found = ft.simulate(
            job.make_method(), model, fed, rounds=job.rounds, participation=job.participation, seed=job.seed,
            validation=0.2 if job.stage in ("tune", "memory") else 0.0, evaluate_every=10, metrics=["accuracy"],
        )  # fmt: skip
    except ft.FedTailorError as error:
        return asdict(job) | {"error": str(error), "validation": []}
    records = [record for record in found.records if "accuracy_trained" in record]
    scores = {
        name: [round(record[key], 5) for record in records if record.get(key) is not None]
        for name, key in (
            ("trained", "accuracy_trained"), ("received", "accuracy_received"), ("validation", "validation_trained"),
        )
    }  # fmt: skip
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    times = {"seconds": round(time.perf_counter() - started, 1), "date": str(date.today())}
    return asdict(job) | scores | times | {"device": device, "torch": torch.__version__}


def read_results() -> dict[Job, Any]:
    names = [f.name for f in fields(Job)]
    lines = RESULTS.read_text().splitlines() if RESULTS.is_file() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return {Job(**{name: one[name] for name in names}): one for one in found}


def show(done: dict[Job, Any]) -> None:
    """Print the mean accuracy in the last round, without and with the mean, by stage and setting."""
    groups: dict[Any, dict[Any, dict[float, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for job, result in done.items():
        scores = result.get("validation" if job.stage in ("tune", "memory") else "trained")
        if scores:
            row = job.method if job.stage != "tune" else (job.method, job.lr, job.weight_decay)
            groups[job.stage, *job.setting][row][job.memory].append(100 * scores[-1])
    for group, rows in sorted(groups.items(), key=str):
        print(*group)
        for row, by_memory in sorted(rows.items(), key=str):
            cells = [f"{m}: {statistics.mean(v):.1f} ({len(v)})" for m, v in sorted(by_memory.items())]
            print("  ", row, " ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tune", "test", "memory", "all", "activity", "show"])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this time")
    options = parser.parse_args()
    done = read_results()
    if options.stage == "show":
        show(done)
        return
    jobs = {"tune": tuning_jobs, "memory": memory_jobs, "all": all_jobs, "activity": activity_jobs}
    planned = list(test_jobs(done) if options.stage == "test" else jobs[options.stage]())
    missing = [job for job in planned if job not in done]
    print(f"{len(planned) - len(missing)} of {len(planned)} runs are done")
    started, count = time.monotonic(), 0
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool, RESULTS.open("a") as file:
        waiting = iter(missing)
        running = {pool.submit(run, job) for _, job in zip(range(options.workers), waiting, strict=False)}
        while running:
            for future in as_completed(running):
                running.remove(future)
                file.write(json.dumps(future.result()) + "\n")
                file.flush()
                count += 1
                if time.monotonic() - started < options.seconds and (job := next(waiting, None)) is not None:
                    running.add(pool.submit(run, job))
                break
    print(f"{count} runs in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
