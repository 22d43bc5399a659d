"""The command sweep."""

from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from pathlib import Path

import typer

from fedtailor.cli.console import collect_failures, print_failures, print_on_interrupt
from fedtailor.cli.output import err, print_line
from fedtailor.cli.show import show_sweep
from fedtailor.data.dataset import Data
from fedtailor.data.federation import Federation
from fedtailor.errors import ConfigError
from fedtailor.experiments.comparison_runs import load_finished
from fedtailor.experiments.experiment import Experiment
from fedtailor.experiments.grid import Point
from fedtailor.experiments.own_code import parse_consent
from fedtailor.experiments.own_parts import OwnData
from fedtailor.experiments.resume import run_or_continue
from fedtailor.experiments.sweep import Sweep, check_can_resume, open_sweep_folder, parse_sweep
from fedtailor.experiments.tuning import Outcome, make_outcome
from fedtailor.progress import OnRoundEnd, ProgressDisplay
from fedtailor.runs.reader import check_same_experiment, is_finished, is_run_folder
from fedtailor.runs.run import Run
from fedtailor.tasks.task import Task

_CONTINUE = "To continue the sweep, run the same command again."
_Loaders = dict[tuple[Data | OwnData, int | None], Callable[[], Federation]]  # (data settings, seed) -> loader


def sweep(ctx: typer.Context) -> None:
    """Run a grid of settings.

    Example: fedtailor sweep exp.toml --method.lr 0.05,0.1 --seed 0,1,2
    A flag with several values is an axis. For a field that takes a list, repeat
    the flag: --network.hidden 64,32 --network.hidden 128.
    --validation holds out data on which the best setting is selected.
    --moment is trained or received: the models whose scores are compared. By
    default, each method is compared at the moment that ranks it.
    --out is the folder for the runs. The same command continues an interrupted
    sweep and accepts additional values. If a run fails, the others continue.
    --parallel 4 trains four runs at once in processes of this machine, and
    --ray [ADDRESS] on a Ray cluster; --cpus-per-run 2 and --gpus-per-run 0.5 are
    the resources of each run (docs/cluster.md).
    --dry-run only lists the runs.
    """
    words, consent = parse_consent("sweep", [word for word in ctx.args if word != "--dry-run"])
    requested = parse_sweep(words, consent)
    folder = requested.choose_folder()
    check_can_resume(folder, requested.plan)
    if "--dry-run" in ctx.args:
        _list_runs(folder, requested)
        return
    failures = dict(requested.invalid)
    loaders: _Loaders = {point.data_key: cache(point.experiment.load) for point in requested.points}
    invalid = _find_invalid_settings(folder, requested, loaders, failures)
    with open_sweep_folder(folder, requested.plan), print_on_interrupt(_CONTINUE):
        outcomes = _run_all(folder, requested, loaders, invalid, failures)
    if outcomes:
        show_sweep(requested.plan, outcomes)
        print_line(f"Runs saved in {folder}")
    print_failures(failures)
    if failures:
        raise typer.Exit(1)


def _run_all(
    folder: Path, requested: Sweep, loaders: _Loaders, invalid: set[str], failures: dict[str, str]
) -> list[Outcome]:
    """Run all points except invalid ones; tasks of other processes load their data themselves."""
    runner, outcomes = requested.runner, list[Outcome]()
    points = [point for point in requested.points if point.setting not in invalid or is_finished(folder / point.label)]

    def make_run(point: Point) -> Callable[[OnRoundEnd], Run | None]:
        path = folder / point.label
        if runner.is_this_process:
            return partial(run_or_continue, point.experiment, path, lambda: loaders[point.data_key]())
        return partial(_run_elsewhere, point.experiment, path.absolute())

    tasks = [Task(point.label, point.experiment.num_rounds, make_run(point)) for point in points]
    if not runner.is_this_process:
        loaders.clear()  # frees the data
    with ProgressDisplay(len(points)) as display, closing(runner.run(tasks, display)) as ended:
        for position, found in ended:
            point, following = points[position], [*points, None][position + 1]
            if found.failure is not None:
                failures[point.label] = found.failure
            else:
                with collect_failures(failures, point.label, Exception):
                    finished = found.value or load_finished(folder / point.label)
                    outcomes.append(make_outcome(finished, point.values))
            if following is None or following.data_key != point.data_key:
                loaders.pop(point.data_key, None)  # frees the data
    return outcomes


def _run_elsewhere(experiment: Experiment, folder: Path, on_round_end: OnRoundEnd) -> None:
    """Run in another process; the folder has the result."""
    run_or_continue(experiment, folder, on_round_end=on_round_end)


def _find_invalid_settings(folder: Path, requested: Sweep, loaders: _Loaders, failures: dict[str, str]) -> set[str]:
    """Report settings that do not fit together before training starts, and raise `ConfigError` if no others remain."""
    checked, invalid = set[str](), set[str]()
    for point in requested.points:
        if is_finished(folder / point.label) or point.setting in checked:
            continue
        checked.add(point.setting)
        found: dict[str, str] = {}
        with collect_failures(found, point.label, Exception):
            fed = loaders[point.data_key]()
            point.experiment.check(fed)
            if is_run_folder(folder / point.label):
                check_same_experiment(folder / point.label, point.experiment.describe(fed))
        failures |= found
        invalid |= {point.setting} if found else set()
    if all(point.setting in invalid for point in requested.points):
        raise ConfigError(next(iter(failures.values())))
    for name, reason in failures.items():
        err.print(f"{name} is skipped: {reason}", markup=False, highlight=False, soft_wrap=True)
    return invalid


def _list_runs(folder: Path, requested: Sweep) -> None:
    for point in requested.points:
        path = folder / point.label
        state = "finished" if is_finished(path) else "started" if is_run_folder(path) else "pending"
        print_line(f"{point.label}: {state}")
    print_line(f"{len(requested.points)} runs in {folder}")
    print_failures(requested.invalid)
