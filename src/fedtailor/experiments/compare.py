"""Compare methods with each other and with local training, over seeds."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedtailor.analysis.comparison_result import ComparisonResult, check_target
from fedtailor.analysis.formatting import format_value, setting_labels
from fedtailor.analysis.statistics import MIN_SEEDS
from fedtailor.core.client_models import AnyModel, AnyModelLike, as_any_model
from fedtailor.core.code_reference import reference_to
from fedtailor.core.local_training import training_settings
from fedtailor.core.method import Method
from fedtailor.data.datasets import load
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError, FedTailorError, unknown_name
from fedtailor.experiments.comparison_runs import ComparisonRun, run_all
from fedtailor.experiments.own_parts import OwnNetwork, takes_federation
from fedtailor.methods import METHODS, Centralized, Local
from fedtailor.networks import network
from fedtailor.runs.files import safe_file_name
from fedtailor.runs.reader import check_same_experiment, is_finished, is_run_folder, load_run
from fedtailor.runs.run import folder_label, method_label
from fedtailor.runs.toml import flatten_settings
from fedtailor.tasks.choice import choose_runner
from fedtailor.training.config import TrainingConfig
from fedtailor.training.simulate import check_fit, describe_method, make_config

Networks = AnyModelLike | str | Callable[[Federation], AnyModelLike]
Splits = Federation | str | Callable[[int], Federation]


@dataclass(frozen=True)
class _Draw:
    """The training seed and the data that all methods share in one of their runs."""

    name: str  # in the names of run folders
    label: str  # for people
    seed: int
    fed: Federation


def compare(
    methods: Sequence[Method | str],
    model: Networks,
    data: Splits,
    *,
    seeds: Sequence[int] = (0,),
    repeats: int | None = None,
    folds: int | None = None,
    centralized: bool = False,
    sampled_local: bool = False,
    target: float | None = None,
    folder: str | Path | None = None,
    progress: bool = False,
    skip_invalid: bool = False,
    parallel: int | None = None,
    ray: str | bool | None = None,
    cpus_per_run: float | None = None,
    gpus_per_run: float | None = None,
    **settings: Any,
) -> ComparisonResult:
    """Train several methods on the same data with several seeds, and compare them with local training.

    Local training is added unless it is among the methods, with the optimizer settings of the first method. If a run
    fails, the others continue, and `failures` of the result says why.

    Args:
        methods: Methods, or their names (with default fields).
        model: A network as in `ft.simulate`, the name of a built-in network, or a class or function whose first
            parameter is `fed`.
        data: A federation, the same for all seeds; or a function of the seed that returns one, such as
            `lambda seed: ft.load("digits", clients=20, seed=seed)`; or the name of a built-in data set.
        seeds: One run per method and seed. A significance test needs at least three.
        repeats: For small clients: one run per method and redrawn split of every client's samples into training and
            test samples (`Federation.resplit`), with a new training seed each. The result then has an interval per
            client. The clients are those of the first seed.
        folds: Cross-validation with this number of folds inside every client, `repeats` times (default 1).
        centralized: Add a reference row: one model, trained on the pooled training data of all clients.
        sampled_local: Add a reference row: local training only in the rounds in which a server selects the client,
            the same amount of training as in the federated methods.
        target: A score, such as 0.9; the result then shows the rounds, bytes, and seconds to reach it.
        folder: A folder for the runs. The same call continues an interrupted comparison.
        progress: Show progress in the terminal or the notebook.
        skip_invalid: Leave out methods that do not support this model or data, instead of raising an error.
        parallel: Number of processes of this machine that train one run each; it needs a folder.
        ray: Address of a Ray cluster on which the runs are trained, or True for a cluster of this machine; it needs a
            folder that all nodes share.
        cpus_per_run: Cores of each run at the same time.
        gpus_per_run: GPUs of each run at the same time, such as 0.5 for two runs per GPU.
        settings: Arguments of `ft.simulate`, such as `rounds` and `participation`.

    >>> import fedtailor as ft
    >>> result = ft.compare([ft.methods.FedPer(lr=0.05)], "mlp", ft.load("digits", clients=4), rounds=2)
    >>> sorted(result.group.methods)
    ['FedPer', 'Local training']
    """
    chosen = _with_references(methods, centralized, sampled_local)
    if isinstance(seeds, int) or not seeds:
        raise ConfigError(f"seeds must be a list of numbers, such as [0, 1, 2], got {seeds!r}.")
    if "seed" in settings:
        raise ConfigError("compare takes seeds=[...] instead of seed.")
    root, runner = None if folder is None else Path(folder), choose_runner(parallel, ray, cpus_per_run, gpus_per_run)
    if root is None and not runner.is_this_process:
        raise ConfigError("Runs in other processes are saved; pass a folder, such as folder='runs/comparison'.")
    draws = _draws(data, list(dict.fromkeys(seeds)), repeats, folds)
    labels = setting_labels([(m.display_name, flatten_settings(describe_method(m))) for m in chosen])
    failures: dict[str, str] = {}
    jobs = list[ComparisonRun]()
    for draw in draws:
        net, config = _model(model, draw.fed), make_config(**settings, seed=draw.seed)
        jobs += [
            ComparisonRun(
                f"{name}-{draw.name}", f"{label}, {draw.label}", method, net, draw.fed, _config_for(method, config)
            )
            for (name, method), label in zip(_names(chosen).items(), labels, strict=True)
        ]
    first = jobs[0].model
    if target is not None and draws[0].fed.classes is not None and getattr(first, "metrics_are_default", True):
        check_target(target, (jobs[0].config.metrics or ["accuracy"])[0])
    invalid = _find_invalid(jobs[: len(chosen)], skip_invalid, failures)
    jobs = [job for job in jobs if job.method not in invalid]
    if root is not None:
        _check_folder(root, jobs)
    return ComparisonResult(run_all(jobs, root, runner, progress, failures), failures, target, root)


def load_comparison(folder: str | Path, target: float | None = None) -> ComparisonResult:
    """Load the finished runs of a comparison from its folder.

    >>> load_comparison("nowhere")
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: 'nowhere' contains no finished run. Pass a run folder or a folder of runs.
    """
    paths = sorted(path.parent for path in Path(folder).glob("*/experiment.toml"))
    finished = [path for path in paths if is_finished(path)]
    if not finished:
        raise ConfigError(f"'{folder}' contains no finished run. Pass a run folder or a folder of runs.")
    missing = {path.name: "the run is not finished." for path in paths if path not in finished}
    return ComparisonResult([load_run(path) for path in finished], missing, target, Path(folder))


def _with_references(methods: Sequence[Method | str], centralized: bool, sampled_local: bool) -> list[Method]:
    """Return the methods, with local training first and the requested references last."""
    if isinstance(methods, (str, Method)):
        raise ConfigError("compare takes a list of methods, such as [ft.methods.FedAvg()].")
    if not methods:
        raise ConfigError("compare needs at least one method; see fedtailor list methods.")
    found = [_method(method) for method in methods]
    local = next((method for method in found if isinstance(method, Local) and not method.sampled), None)
    if local is None:
        local = _with_options(Local, found)
        found = [local, *found]
    if sampled_local:
        found.append(replace(local, sampled=True))
    if centralized and not any(isinstance(method, Centralized) for method in found):
        found.append(_with_options(Centralized, [local]))
    return found


def _method(method: Method | str) -> Method:
    if isinstance(method, str):
        if method not in METHODS:
            raise unknown_name("method", method, METHODS)
        return METHODS[method]()
    if not isinstance(method, Method):
        raise ConfigError(f"A method must be an instance such as ft.methods.FedAvg(lr=0.1), or a name, got {method!r}.")
    return method


def _with_options(kind: type[Local] | type[Centralized], methods: Sequence[Method]) -> Any:
    """Return a reference with the optimizer settings of the first method that has some."""
    return kind(**next((settings for settings in map(training_settings, methods) if settings), {}))


def _config_for(method: Method, config: TrainingConfig) -> TrainingConfig:
    """Return the settings of a method's run: the global model is evaluated if the method has one."""
    return replace(config, evaluate_global=config.evaluate_global and method.has_global_model)


def _draws(data: Splits, seeds: Sequence[int], repeats: int | None, folds: int | None) -> list[_Draw]:
    """Return the data of each run of a method: one federation per seed, or one with its samples split anew."""
    if repeats is None and folds is None:
        return [_Draw(f"seed{seed}", f"seed {seed}", seed, _federation(data, seed)) for seed in seeds]
    for name, value in (("repeats", repeats), ("folds", folds)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} must be a number such as 10, got {value!r}.")
    splits, first = (repeats or 1) * (folds or 1), seeds[0] * (folds or 1)
    if splits < MIN_SEEDS:
        raise ConfigError(f"An interval needs at least {MIN_SEEDS} splits; use more repeats or folds, got {splits}.")
    if len(seeds) > 1:
        raise ConfigError("With repeats or folds, the training seed changes with the split; give at most one seed.")
    fed = _federation(data, seeds[0])
    if fed.settings.get("repeat") is not None:
        raise ConfigError("compare draws the splits itself; leave out data.repeat and data.folds.")
    numbers = range(first, first + splits)  # another seed gives other splits
    return [_Draw(f"repeat{n}", f"split {n}", n, fed.resplit(n, folds)) for n in numbers]


def _federation(data: Splits, seed: int) -> Federation:
    found = load(data, seed=seed) if isinstance(data, str) else data(seed) if callable(data) else data
    if not isinstance(found, Federation):
        raise ConfigError("data must be an ft.Federation, a function of the seed that returns one, or a name.")
    return found


def _model(model: Networks, fed: Federation) -> AnyModel:
    if isinstance(model, str):
        return network(model, fed)
    is_code = isinstance(model, type) or inspect.isroutine(model)
    if not is_code or not takes_federation(model):
        return as_any_model(model)  # type: ignore[arg-type]
    made = model(fed)  # type: ignore[operator,call-arg]
    return made if isinstance(made, AnyModel) else OwnNetwork(reference_to(model), {}, model).model(fed)  # type: ignore[arg-type]


def _names(methods: Sequence[Method]) -> dict[str, Method]:
    """Return folder name -> method: its key. If several methods have the same key, the names of the later ones contain
    the fields that differ from the first, so that names stay the same when methods are added."""
    if twice := next((method for method in methods if methods.count(method) > 1), None):
        raise ConfigError(f"{twice.display_name} is listed twice with the same fields; list it once.")
    found, first = dict[str, Method](), dict[str, dict[str, Any]]()
    for method in methods:
        settings = describe_method(method)
        key, values = method_label(settings), flatten_settings(settings)
        before = first.setdefault(key, values)
        changed = {name: value for name, value in values.items() if before.get(name) != value}
        parts = [name if value is True else f"{name}{format_value(value)}" for name, value in changed.items()]
        text = "-".join([folder_label(settings), *parts])
        found[safe_file_name(text)] = method
    return found


def _find_invalid(jobs: Sequence[ComparisonRun], skip: bool, failures: dict[str, str]) -> list[Method]:
    """Check that all settings fit together before any training; return the methods that do not, if they are skipped."""
    invalid = []
    for job in jobs:
        try:
            check_fit(job.config, job.method, job.model, job.fed)
        except FedTailorError as error:
            if not skip:
                raise
            failures[job.name.rpartition("-")[0]] = str(error)
            invalid.append(job.method)
    return invalid


def _check_folder(folder: Path, jobs: Sequence[ComparisonRun]) -> None:
    """Reject a folder that contains anything but these runs; hidden files, as of the live page, are ignored."""
    names = {job.name for job in jobs}
    others = (
        [p for p in folder.iterdir() if p.name not in names and not p.name.startswith(".")] if folder.is_dir() else []
    )
    if others:
        listed = ", ".join(sorted(path.name for path in others)[:5])
        if all(map(is_run_folder, others)):
            fix = "compare these methods and seeds or repeats as well, remove these folders, or choose a new folder"
            raise ConfigError(f"The folder '{folder}' contains runs of another comparison ({listed}); {fix}.")
        raise ConfigError(f"The folder '{folder}' contains other files ({listed}). Choose a new folder.")
    for job in jobs:
        if is_run_folder(folder / job.name):
            check_same_experiment(folder / job.name, job.describe())
