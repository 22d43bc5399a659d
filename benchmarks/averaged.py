"""The results in docs/methods/averaged.md: methods with and without a running mean of their personal models.

python benchmarks/averaged.py tune --parallel 8     # learning rate and weight decay, judged on validation data
python benchmarks/averaged.py test --parallel 8     # the chosen settings with three seeds that did not choose them
python benchmarks/averaged.py memory --parallel 8   # the memory, judged on validation data
python benchmarks/averaged.py all --parallel 8      # all methods on one of the settings
python benchmarks/averaged.py activity --parallel 8 # activities of thirty people, one client each
python benchmarks/averaged.py further --parallel 8  # variants of the mean, judged on validation data
python benchmarks/averaged.py show                  # print the tables

A run evaluates each client's model as it last trained it and the mean of its models: the mean changes nothing in
training, so both have the numbers of separate runs. Every run is one line of benchmarks/results/averaged.jsonl. Runs
that are there are skipped, so the script can be stopped at any time and started again, also on another machine.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

import torch

import fedtailor as ft
from averaged_variants import VARIANTS, LayerMemory, Variant
from fedtailor.methods import METHODS
from fedtailor.papers import jobs
from fedtailor.progress import OnRoundEnd
from fedtailor.tasks.choice import choose_runner

RESULTS = Path(__file__).parent / "results" / "averaged.jsonl"
METHOD_NAMES = ("local", "fedavg", "fedrep", "fedbabu", "fedala", "fedapa", "fedlag", "fedpac", "ditto", "selffl")
TUNING_SEED, TEST_SEEDS = 0, (20, 21, 22)
RATES, DECAYS = (0.02, 0.05), (0.0, 1e-3)
MEMORIES = ((0.5, 0.8), (0.95, 0.98))  # two in a run; 0.9 is in the stage "tune"
UNSUITABLE = ("centralized", "averaged")
KINDS = ("plain", "mean")  # the last trained model or a variant's model, and the mean
VALIDATION_STAGES = ("tune", "memory", "further")


@dataclass(frozen=True)
class Job:
    """One run."""

    stage: str
    data: str
    partition: str  # dirichlet (alpha 0.1), pathological (2 classes per client), or by_owner
    clients: int
    method: str
    lr: float
    weight_decay: float
    seed: int
    memory: float = 0.9
    other_memory: float = 0.0  # of the other mean; 0: the last trained model

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
        if self.method in VARIANTS:
            return VARIANTS[self.method]()
        kind = METHODS[self.method]
        known = {f.name for f in fields(kind)} - kind.fixed_settings.keys()
        wanted = {"lr": self.lr, "weight_decay": self.weight_decay, "epochs": 2}
        wanted |= {"sampled": True} if self.method == "local" else {}
        inner = kind(**{name: value for name, value in wanted.items() if name in known})
        if self.other_memory:
            return LayerMemory(inner, memory=self.memory, head=self.other_memory, body=self.other_memory)
        return Variant(inner, memory=self.memory)


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
                    yield Job("tune", *setting, method, lr, decay, TUNING_SEED)


def test_jobs(done: dict[Job, Any]) -> Iterator[Job]:
    chosen = choose(done)
    for seed in TEST_SEEDS:
        for data, partition, clients in settings():
            for method in METHOD_NAMES:
                for rates in sorted({*chosen.get((data, partition, method), {}).values()}):
                    yield Job("test", data, partition, clients, method, *rates, seed)


def memory_jobs() -> Iterator[Job]:
    for setting in settings():
        for method in ("fedavg", "fedlag", "ditto") if setting[2] == 20 else ():
            for other, memory in MEMORIES:
                yield Job("memory", *setting, method, 0.05, 1e-3, TUNING_SEED, memory, other)


def further_jobs() -> Iterator[Job]:
    for setting in settings():
        for method in VARIANTS if setting[2] == 20 else ():
            yield Job("further", *setting, method, 0.05, 1e-3, TUNING_SEED)


def all_jobs() -> Iterator[Job]:
    for seed in TEST_SEEDS:
        for method in sorted(METHODS.keys() - UNSUITABLE):
            yield Job("all", "cifar10", "dirichlet", 20, method, 0.05, 1e-3, seed)


def reuse_tests(planned: list[Job], done: dict[Job, Any], path: Path) -> dict[Job, Any]:
    """Store the results of the stage "test" that are also runs of the planned stage, and return them."""
    found = {job: done.get(replace(job, stage="test")) for job in planned if job not in done}
    reused = {job: result | {"stage": job.stage} for job, result in found.items() if result}
    jobs.run_jobs(lambda result, _: result, list(reused.values()), path)
    return reused


def activity_jobs() -> Iterator[Job]:
    for seed in TEST_SEEDS:
        for method in METHOD_NAMES:
            yield Job("activity", "hapt", "by_owner", 30, method, 0.05, 1e-3, seed)


def choose(done: dict[Job, Any]) -> dict[tuple[str, str, str], dict[str, tuple[float, float]]]:
    """Return the learning rate and weight decay with the best validation accuracy in the last round, separately for the
    last model ("plain") and for the mean ("mean"), of methods for which all were tried."""
    tried: dict[tuple[str, str, str], list[tuple[Job, Any]]] = defaultdict(list)
    for job, result in done.items():
        if job.stage == "tune":
            tried[job.data, job.partition, job.method].append((job, result))
    found = {}
    for key, runs in tried.items():
        if len(runs) == len(RATES) * len(decays(key[2])):
            best = {kind: max(runs, key=lambda run: last(run[1], f"validation_{kind}"))[0] for kind in KINDS}
            found[key] = {kind: (job.lr, job.weight_decay) for kind, job in best.items()}
    return found


def last(result: dict[str, Any], name: str) -> float:
    """Return a score of the last round in %; a run that diverged has none."""
    return 100 * result[name][-1] if result.get(name) else float("-inf")


@lru_cache(maxsize=4)
def load(data: str, partition: str, clients: int, seed: int) -> ft.Federation:
    if partition == "by_owner":
        return ft.load(data, seed=seed, transitions=False)
    return ft.load(data, clients=clients, partition=partition, alpha=0.1, classes_per_client=2, seed=seed)


def label(job: Job) -> tuple[str, int]:
    """Return what the progress display shows, and the number of rounds."""
    return f"{job.method} on {job.data}, lr {job.lr:g}, seed {job.seed}", job.rounds


def run(job: Job, on_round_end: OnRoundEnd) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.cuda.empty_cache()  # other processes need it
    fed = load(*job.setting, job.seed)
    model = ft.network("activity" if job.data == "hapt" else "lenet5", fed)
    started = time.perf_counter()
    try:
        found = ft.simulate(
            job.make_method(), model, fed, rounds=job.rounds, participation=job.participation, seed=job.seed,
            validation=0.2 if job.stage in VALIDATION_STAGES else 0.0, evaluate_every=10, metrics=["accuracy"],
            on_round_end=on_round_end,
        )  # fmt: skip
    except ft.FedTailorError as error:
        return asdict(job) | {"error": str(error)}
    keys = {"plain": "accuracy_received", "mean": "accuracy_trained"}
    keys |= {"validation_plain": "validation_received", "validation_mean": "validation_trained"}
    scores = {
        name: [round(record[key], 5) for record in found.records if record.get(key) is not None]
        for name, key in keys.items()
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    times = {"seconds": round(time.perf_counter() - started, 1), "date": str(date.today())}
    return asdict(job) | scores | times | {"device": device, "torch": torch.__version__}


def read_results(path: Path) -> dict[Job, Any]:
    return {Job(**{f.name: one.get(f.name, f.default) for f in fields(Job)}): one for one in jobs.read_results(path)}


Scores = dict[str, dict[int, float]]  # last model ("plain") or mean ("mean") -> seed -> accuracy in %


def show(done: dict[Job, Any]) -> None:
    """Print one table per stage: accuracy in the last round of the last (or a variant's) models → of their means."""
    chosen = choose(done)
    tables: dict[str, dict[str, dict[str, Scores]]] = defaultdict(lambda: defaultdict(dict))
    for job, result in done.items():
        cell = tables[job.stage][title(job.method)].setdefault(column(job), defaultdict(dict))
        for kind in KINDS:
            rates = chosen.get((job.data, job.partition, job.method), {}).get(kind)
            if job.stage not in ("tune", "test") or rates == (job.lr, job.weight_decay):
                cell[kind][job.seed] = last(result, score_name(job, kind))
    for stage in [name for name in tables if name != "memory"]:
        rows, columns = tables[stage], sorted({column for row in tables[stage].values() for column in row})
        seeds = {column: common_seeds([row.get(column, {}) for row in rows.values()]) for column in columns}
        cells = {
            method: [format_cell(row[column], seeds[column]) if column in row else "–" for column in columns]
            for method, row in rows.items()
        }
        print_table(stage, columns, cells)


def show_memory(done: dict[Job, Any]) -> None:
    """Print the validation accuracy of the mean for each memory. Memory 0, the last model, and 0.9 are in "tune"."""
    rows: dict[str, dict[float, str]] = defaultdict(dict)
    methods = {job.method for job in memory_jobs()}
    for job, result in done.items():
        is_tuning = job.stage == "tune" and (job.lr, job.weight_decay) == (0.05, 1e-3) and job.method in methods
        if job.stage == "memory" or is_tuning:
            for memory, kind in zip((job.other_memory, job.memory), KINDS, strict=True):
                rows[f"{title(job.method)}, {column(job)}"][memory] = f"{last(result, score_name(job, kind)):.1f}"
    columns = sorted({memory for row in rows.values() for memory in row})
    print_table("memory", columns, {name: [row.get(one, "–") for one in columns] for name, row in rows.items()})


def print_table(name: str, columns: Sequence[object], rows: dict[str, list[str]]) -> None:
    print(f"\n{name}\n| | {' | '.join(map(str, columns))} |\n|---|{'---|' * len(columns)}")
    for row, cells in sorted(rows.items()):
        print(f"| {row} | {' | '.join(cells)} |")


def title(method: str) -> str:
    return METHODS[method].class_title() if method in METHODS else method


def column(job: Job) -> str:
    names = {"dirichlet": "Dir(0.1)", "pathological": "2 classes", "by_owner": "by person"}
    return f"{job.data}, {names[job.partition]}, {job.clients} clients"


def score_name(job: Job, kind: str) -> str:
    return f"validation_{kind}" if job.stage in VALIDATION_STAGES else kind


def show_gain_by_round(done: dict[Job, Any], stage: str) -> None:
    """Print the mean gain at every evaluation over all runs of a stage that did not diverge, except local training."""
    runs = [(job, result) for job, result in done.items() if job.stage == stage and job.method != "local"]
    series = [[result.get(score_name(job, kind)) for kind in KINDS] for job, result in runs if "error" not in result]
    gains = [[100 * (mean - plain) for plain, mean in zip(*pair, strict=True)] for pair in series]
    if gains:
        means = [f"{statistics.mean(column):+.1f}" for column in zip(*gains, strict=True)]
        print(f"\n{stage}: gain in {len(gains)} runs, every ten rounds: {' '.join(means)}")


def common_seeds(cells: list[Scores]) -> list[int]:
    """Return the seeds that all cells of a column have, so that rows can be compared."""
    return sorted(set.intersection(*({*cell[kind]} for cell in cells if cell for kind in KINDS)))


def format_cell(scores: Scores, seeds: list[int]) -> str:
    """Return both means over seeds, the standard deviation of the gain, and the number of seeds; and how many diverged,
    which are not in the means."""
    pairs = [(scores["plain"][seed], scores["mean"][seed]) for seed in seeds]
    finished = [pair for pair in pairs if isfinite(pair[0])]
    diverged = f"{len(pairs) - len(finished)} of {len(pairs)} diverged" if len(finished) < len(pairs) else ""
    if not finished:
        return diverged or "–"
    text = " → ".join(f"{statistics.mean(values):.1f}" for values in zip(*finished, strict=True))
    gains = [mean - plain for plain, mean in finished]
    spread = f"±{statistics.stdev(gains):.1f}; {len(gains)}" if len(gains) > 1 else ""
    notes = ", ".join(filter(None, [spread, diverged]))
    return text + (f" ({notes})" if notes else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tune", "test", "memory", "all", "activity", "further", "show"])
    parser.add_argument("--parallel", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    done = read_results(options.results)
    if options.stage == "show":
        show(done)
        show_memory(done)
        for stage in ("tune", "activity"):
            show_gain_by_round(done, stage)
        return
    stages = {
        "tune": tuning_jobs,
        "memory": memory_jobs,
        "all": all_jobs,
        "activity": activity_jobs,
        "further": further_jobs,
    }
    planned = list(test_jobs(done) if options.stage == "test" else stages[options.stage]())
    done |= reuse_tests(planned, done, options.results)
    missing = [job for job in planned if job not in done]
    print(f"{len(planned) - len(missing)} of {len(planned)} runs are done")
    runner = choose_runner(options.parallel, cpus_per_run=1)
    count = jobs.run_jobs(run, missing, options.results, runner, options.seconds, label)
    print(f"{count} runs were added")


if __name__ == "__main__":
    main()
