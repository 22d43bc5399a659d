"""Run the cells of a paper's tables, and compare their scores with the printed ones."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache, partial
from hashlib import sha256
from math import hypot, inf, isfinite
from pathlib import Path
from shutil import rmtree
from statistics import mean, stdev
from typing import Any

import torch

from fedtailor.core.model import Model
from fedtailor.data.dataset import Data
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, FedTailorError
from fedtailor.networks import network
from fedtailor.papers.cells import Cell, Setup, make_cells, parse_overrides
from fedtailor.papers.definition import CURVE_ROUNDS, load_paper
from fedtailor.papers.jobs import Result, read_results, run_jobs
from fedtailor.papers.unfinished import checkpoint_folder, is_in_use, train_or_continue
from fedtailor.progress import OnRoundEnd
from fedtailor.runs.records import Record, Values
from fedtailor.runs.run import MOMENTS, Run
from fedtailor.runs.summaries import weighted_mean
from fedtailor.tasks.task import Runner
from fedtailor.training.client_failures import FailedRoundError
from fedtailor.training.config import TrainingConfig
from fedtailor.training.signals import Interrupted
from fedtailor.training.simulate import train
from fedtailor.version import VERSION

log = logging.getLogger("fedtailor")

SEEDS = (0, 1, 2)
_STATISTICS = {"weighted": "", "mean": "_mean"}  # -> the end of a record's key
_TRAIN_LOSS = "train_loss"  # of each client's model after it last trained, on its training samples
_TENTHS = ("worst_tenth", "largest_tenth_weighted")
Results = Mapping[tuple[str, int], Result]  # (fingerprint, seed) -> result
Curve = dict[int, float]  # round -> score


@dataclass(frozen=True)
class Job:
    """One run: a cell with one seed."""

    setup: Setup
    label: str  # of the first cell that needs it
    seed: int
    device: str

    @property
    def shown(self) -> tuple[str, int]:
        """What a progress display shows, and the number of rounds."""
        return f"{self.label}, seed {self.seed}", self.setup.config.num_rounds

    @property
    def key(self) -> tuple[str, int]:
        return self.setup.fingerprint, self.seed

    @property
    def config(self) -> TrainingConfig:
        return replace(self.setup.config, seed=self.seed, device=self.device)

    @property
    def folder_name(self) -> str:
        """The name of the folder for checkpoints, which depends on engine and device as well."""
        config = repr(replace(self.config, device=str(self.config.torch_device)))
        return f"{self.setup.fingerprint}-seed{self.seed}-{sha256(config.encode()).hexdigest()[:8]}"

    def load(self) -> tuple[Model, Federation]:
        """Load the data, and build the network for them."""
        fed = _load(replace(self.setup.data, seed=self.seed))
        return network(self.setup.describe()["network"]["name"], fed, **vars(self.setup.network)), fed


@dataclass(frozen=True)
class CellResult:
    """A cell beside our results."""

    cell: Cell
    scores: tuple[float, ...]  # one per seed, in the paper's unit
    seeds: tuple[int, ...] = ()
    error: str = ""  # of a run that diverged

    @property
    def mean(self) -> float | None:
        return mean(self.scores) if self.scores else None

    @property
    def std(self) -> float | None:
        return stdev(self.scores) if len(self.scores) > 1 else None

    @property
    def difference(self) -> float | None:
        """Our mean minus the printed value."""
        ours, printed = self.mean, self.cell.printed
        return None if ours is None or printed is None else ours - printed

    @property
    def is_within(self) -> bool | None:
        """Whether the difference is at most two standard deviations of a difference of single runs; None if unknown.

        Papers seldom print a standard deviation; then ours stands for both."""
        ours, printed = self.std, self.cell.printed_std
        if ours is None or self.difference is None:
            return None
        return abs(self.difference) <= 2 * hypot(ours, ours if printed is None else printed)


def default_results(paper: str) -> Path:
    """Return the file of a paper's results in the current folder.

    >>> default_results("fedapa").name
    'fedapa.jsonl'
    """
    return Path("results", "papers", f"{paper}.jsonl")


def select_cells(
    paper: str, table: str | None = None, only: Sequence[str] = (), override: Sequence[str] = ()
) -> list[Cell]:
    """Return the cells of a table, or of all tables of a paper.

    >>> [cell.printed for cell in select_cells("fedapa", "table-4", only=["fedapa"])]
    [84.41, 84.76, 85.85, 84.02, 82.95]
    """
    found, overrides = load_paper(paper), parse_overrides(override)
    cells = [cell for one in found.select(table) for cell in make_cells(found, one, only, overrides)]
    if not cells and only:
        raise ConfigError(f"No cell of {paper}{f' {table}' if table else ''} matches '{','.join(only)}'.")
    return cells


def make_jobs(cells: Sequence[Cell], seeds: Sequence[int] = SEEDS, device: str = "auto") -> list[Job]:
    """Return the runs that cells need, each once, by seed and data, so that processes load few data sets.

    >>> len(select_cells("fedapa", "table-4")), len(make_jobs(select_cells("fedapa", "table-4"), [0]))
    (25, 9)
    """
    jobs: dict[tuple[str, int], Job] = {}
    for seed in seeds:
        for cell in cells:
            if not cell.missing:
                job = Job(cell.setup, cell.label, seed, device)
                jobs.setdefault(job.key, job)
    return sorted(jobs.values(), key=lambda job: (job.seed, repr(job.setup.data)))


def run(
    paper: str,
    table: str | None = None,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = SEEDS,
    device: str = "auto",
    runner: Runner | None = None,
    seconds: float = inf,
    results: Path | None = None,
    override: Sequence[str] = (),
) -> int:
    """Run what is missing of a table and return how many runs were made; each is one line of the file of results.

    A run that was stopped continues from its last checkpoint. A runner in other processes is one of
    `tasks.choice.choose_runner`.

    >>> from tempfile import TemporaryDirectory
    >>> tiny = ["rounds=1", "data.name=digits", "data.min_size=2", "data.test=0.25", "network.name=mlp"]
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "results.jsonl")
    ...     [run("fedapa", "table-4", only=["mu=0.3"], seeds=[0], override=tiny, results=file) for _ in range(2)]
    [5, 0]
    """
    path = results or default_results(paper)
    done = read_done(path)
    cells = [cell for cell in select_cells(paper, table, only, override) if not cell.why_not]
    jobs = [job for job in make_jobs(cells, seeds, device) if job.key not in done]
    if not jobs:
        return 0
    with checkpoint_folder(path.parent) as folder:
        return run_jobs(partial(_run_in_folder, folder), jobs, path, runner, seconds, lambda job: job.shown)


def read_done(path: Path) -> dict[tuple[str, int], Result]:
    """Return the results in a file by fingerprint and seed. Runs that failed are repeated, unless they diverged."""
    return {(one["fingerprint"], one["seed"]): one for one in read_results(path) if not one.get("repeat")}


def compare(cells: Sequence[Cell], done: Results) -> list[CellResult]:
    """Return the cells with our scores of all seeds that are there."""
    by_setup: dict[str, list[Result]] = {}
    for (fingerprint, _), result in sorted(done.items()):
        by_setup.setdefault(fingerprint, []).append(result)
    return [CellResult(cell, ()) if cell.missing else _compare(cell, by_setup) for cell in cells]


def _run_in_folder(folder: Path | None, job: Job, on_round_end: OnRoundEnd) -> Result | None:
    """Run a job with checkpoints in a subfolder; None if another command is running it."""
    path = None if folder is None else folder / job.folder_name
    if path is not None and is_in_use(path):
        log.warning("%s is left out, because another command trains it now.", job.shown[0])
        return None
    try:
        result = run_job(job, on_round_end, path)
    except Interrupted as stop:  # its message says how to resume a single run
        label, rounds = job.shown
        after = f" after round {len(stop.run.records)} of {rounds}" if stop.run else ""
        message = f"Stopped {label}{' immediately' if stop.immediately else ''}{after}."
        raise Interrupted(message, stop.code, stop.run, stop.immediately) from None
    if path is not None and not result.get("repeat"):
        rmtree(path, ignore_errors=True)
    return result


def run_job(job: Job, on_round_end: OnRoundEnd | None = None, folder: Path | None = None) -> Result:
    """Train and return the result; a run that fails has the key "error" instead of scores, and "repeat" unless it
    would fail again: data may have been missing, or memory, or a disk may have been full."""
    setup, started = job.setup, time.perf_counter()
    about: Result = {"run": job.label, "fingerprint": setup.fingerprint, "seed": job.seed, "settings": setup.describe()}
    config = job.config
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        start = train if folder is None else partial(train_or_continue, folder)
        found = start(config, setup.method, *job.load(), on_round_end)
        outcome: Result = {"scores": _collect(found, config.metrics or ["accuracy"]), "seconds": _seconds(found)}
    except (FedTailorError, RuntimeError, OSError) as error:
        seconds = time.perf_counter() - started
        outcome = {"error": str(error), "repeat": not isinstance(error, FailedRoundError), "seconds": round(seconds, 1)}
    device = torch.cuda.get_device_name() if config.torch_device.type == "cuda" else "CPU"
    versions = {"device": device, "torch": torch.__version__, "fedtailor": VERSION}
    return about | outcome | {"date": str(date.today())} | versions


def _seconds(found: Run) -> float:
    """Return the seconds of training and evaluation, also of the rounds before the run was stopped."""
    return round(sum(float(each["seconds"] + each.get("seconds_evaluating", 0.0)) for each in found.records), 1)


@lru_cache(maxsize=2)
def _load(data: Data) -> Federation:
    return data.load()


def _collect(found: Run, metrics: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return metric_moment/statistic -> its value in the last round, its best value with its round, and its values in
    `CURVE_ROUNDS` as far as these were evaluated."""
    scores: dict[str, dict[str, float]] = {}
    pick = max if found.info["higher_is_better"] else min
    for metric in (*metrics, *(f"global_{name}" for name in metrics)):
        for moment in MOMENTS:
            for statistic, end in _STATISTICS.items():
                curve = _curve(found.records, f"{metric}_{moment}{end}")
                scores |= _summarize(f"{metric}_{moment}/{statistic}", curve, pick)
    scores |= _summarize(f"{_TRAIN_LOSS}_trained/weighted", _train_losses(found), min)
    for moment in MOMENTS:
        last_round, best_round = (found.summarize(moment, choice) or {} for choice in ("last", "best_test"))
        for name in _TENTHS:
            if last_round.get(name) is not None and best_round.get(name) is not None:
                summary = {"last": last_round[name], "best": best_round[name]}
                scores[f"{found.info['score']}_{moment}/{name}"] = summary
    return {name: {key: round(value, 5) for key, value in values.items()} for name, values in scores.items()}


def _summarize(name: str, curve: Curve, pick: Callable[..., int]) -> dict[str, dict[str, float]]:
    if not curve:
        return {}
    best = pick(curve, key=curve.__getitem__)
    rounds = {f"round_{number}": curve[number] for number in CURVE_ROUNDS if number in curve}
    return {name: {"last": curve[max(curve)], "best": curve[best], "best_round": best, **rounds}}


def _train_losses(found: Run) -> Curve:
    """Return the training loss after each round, over the samples of all clients that have trained.

    It comes from the losses of each round's participants, which every run records, so it costs no evaluation. It is
    empty if rounds were not evaluated, because the losses of their participants are not known.
    """
    sizes = [client["train"] for client in found.info["clients"]]
    latest: Values = {}
    curve: Curve = {}
    for record in found.records:
        losses: Values = record["per_client"].get("loss", {})
        if not losses.keys() >= set(record["clients"]):
            return {}
        latest |= losses
        mean_loss = weighted_mean(latest, sizes)
        if mean_loss is not None and isfinite(mean_loss):
            curve[record["round"]] = mean_loss
    return curve


def _curve(records: Sequence[Record], key: str) -> Curve:
    values: dict[int, Any] = {record["round"]: record.get(key) for record in records}
    return {number: value for number, value in values.items() if value is not None and isfinite(value)}


def _compare(cell: Cell, by_setup: Mapping[str, list[Result]]) -> CellResult:
    name, choice = cell.score
    runs = by_setup.get(cell.setup.fingerprint, [])
    found = {run["seed"]: run.get("scores", {}).get(name, {}) for run in runs}
    scores = {seed: cell.report.scale * one[choice] for seed, one in found.items() if choice in one}
    error = next((str(run["error"]) for run in runs if "error" in run), "")
    return CellResult(cell, tuple(scores.values()), tuple(scores), error)
