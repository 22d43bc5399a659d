"""The commands run, compare, resume, and show."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.analysis.client_gains import gain_sentences
from fedtailor.analysis.run_summary import compare_runs
from fedtailor.analysis.tables import comparison_table, other_metrics, run_table
from fedtailor.analysis.verdict import verdict_sentences
from fedtailor.cli.console import (
    collect_failures,
    out,
    print_failures,
    print_line,
    print_on_interrupt,
    run_with_progress,
    show_progress,
)
from fedtailor.cli.sweep import show_sweep
from fedtailor.errors import ConfigError, FedTailorError, unknown_name
from fedtailor.experiments.experiment import Experiment, make_experiment, read_experiment_file
from fedtailor.experiments.overrides import Overrides, parse_overrides
from fedtailor.experiments.parsing import field_help
from fedtailor.experiments.resume import resume as resume_run
from fedtailor.experiments.sweep import read_plan
from fedtailor.experiments.tuning import make_outcome
from fedtailor.methods import METHODS
from fedtailor.progress import ProgressDisplay
from fedtailor.runs.reader import check_same_experiment, is_finished, is_run_folder, load_run, planned_rounds
from fedtailor.runs.run import Run, method_label
from fedtailor.runs.writer import unused_folder
from fedtailor.training.simulate import describe_method


def run(ctx: typer.Context) -> None:
    """Run one experiment.

    From a file: fedtailor run exp.toml
    From flags: fedtailor run --method fedavg --data digits --rounds 20
    The run is saved in a new folder inside --out (runs).
    """
    flags = parse_overrides(ctx.args)
    folder = Path(flags.pop("out", "runs"))
    if len(flags.positional) > 1:
        raise ConfigError(f"run takes one experiment file, got {len(flags.positional)}.")
    base = read_experiment_file(Path(flags.positional[0])) if flags.positional else {}
    experiment = make_experiment(flags.apply_to(base))
    folder = unused_folder(folder, f"{_folder_name(experiment)}-{experiment.data.name}")
    with ProgressDisplay() as display:
        finished = run_with_progress(experiment, experiment.load, folder, _progress_label(experiment), display)
    _print_run(finished)


def compare(ctx: typer.Context) -> None:
    """Compare methods with each other and with local training.

    Example: fedtailor compare fedavg fedper --seeds 0,1,2 --out FOLDER
    --method.FIELD sets a field of all methods that have it.
    --NAME.FIELD sets a field of one method.
    --all compares all methods.
    --out is the folder for the runs. The same command with --out continues an
    interrupted comparison. If a run fails, the others continue.
    """
    all_methods = "--all" in ctx.args
    flags = parse_overrides([word for word in ctx.args if word != "--all"])
    out_folder = flags.pop("out", "")
    seeds = list(dict.fromkeys(flags.pop_list("seeds", int, [0])))
    if "seed" in flags.settings:
        raise ConfigError("compare takes --seeds instead of --seed, such as --seeds 0,1,2.")
    if all_methods and flags.positional:
        raise ConfigError("compare takes either method names or --all, not both.")
    names = list(dict.fromkeys(["local", *(METHODS if all_methods else flags.positional)]))
    failures: dict[str, str] = {}
    local = make_experiment(method_settings("local", names, flags))
    folder = Path(out_folder or unused_folder(Path("runs"), f"compare-{local.data.name}"))
    feds = {seed: replace(local, seed=seed).load() for seed in seeds}
    experiments = []
    for name in names:  # report settings that do not fit before any training starts
        with collect_failures(failures, name, FedTailorError if all_methods else ()):
            experiment = make_experiment(method_settings(name, names, flags))
            experiment.check(feds[seeds[0]])
            experiments.append(experiment)
    seeded = [replace(experiment, seed=seed) for seed in seeds for experiment in experiments]
    _check_folder(folder, {_folder_name(each): each.describe(feds[each.seed]) for each in seeded})
    runs: list[Run] = []
    with (
        print_on_interrupt(f"To continue the comparison, run the same command with --out {folder}"),
        ProgressDisplay(len(seeded)) as display,
    ):
        for experiment in seeded:
            with collect_failures(failures, name := _folder_name(experiment), Exception):
                load = partial(feds.__getitem__, experiment.seed)
                runs.append(run_with_progress(experiment, load, folder / name, _progress_label(experiment), display))
    if runs:
        _print_comparison(runs, brief=all_methods)
        print_line(f"Runs saved in {folder}")
    print_failures(failures)
    if failures:
        raise typer.Exit(1)


def resume(folder: Annotated[Path, typer.Argument(help="the run folder")]) -> None:
    """Resume an interrupted run from its last checkpoint. A finished run is only shown."""
    with ProgressDisplay() as display:
        finished = show_progress(
            lambda on_round_end: resume_run(folder, on_round_end=on_round_end),
            folder, folder.name, planned_rounds(folder), display,
        )  # fmt: skip
    _print_run(finished)


def show(folder: Annotated[Path, typer.Argument(help="a run folder, or a folder of runs")]) -> None:
    """Print the table of a run, a comparison, or a sweep."""
    if is_run_folder(folder):
        out.print(run_table(load_run(folder)))
        return
    plan = read_plan(folder)
    paths = sorted(path.parent for path in folder.glob("*/experiment.toml"))
    finished = [path for path in paths if is_finished(path)]
    if not finished:
        raise ConfigError(f"'{folder}' contains no finished run. Pass a run folder or a folder of runs.")
    if plan is not None:
        planned = [path for path in finished if path.name in plan.runs]
        show_sweep(plan, [make_outcome(load_run(path), plan.runs[path.name]) for path in planned])
    else:
        _print_comparison([load_run(path) for path in finished])
    if len(finished) < len(paths):
        print_line(f"Unfinished runs are not shown: {', '.join(path.name for path in paths if path not in finished)}.")


def method_settings(name: str, names: list[str], flags: Overrides) -> dict[str, Any]:
    """Return the settings of one of several methods: the common ones, and the ones set for this method only."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    settings = flags.apply_to({})
    specific = {other: settings.pop(other, {}) for other in names}[name]
    common = settings.pop("method", {})
    if not isinstance(specific, dict):
        raise ConfigError(f"--{name} takes no value. Set one of its fields, such as --{name}.lr 0.1.")
    if not isinstance(common, dict):
        raise ConfigError("compare takes method names without a flag, such as fedtailor compare fedavg fedper.")
    known = {field for other in names if other in METHODS for field in field_help(METHODS[other])}
    for setting in common:
        if setting not in known:
            raise unknown_name("field of these methods", setting, known)
    shared = {key: value for key, value in common.items() if key in field_help(METHODS[name])}
    return settings | {"method": {"name": name} | shared | specific}


def _check_folder(folder: Path, experiments: Mapping[str, Any]) -> None:
    """Reject a folder that contains anything but these experiments; hidden files, as of the live page, are ignored."""
    if folder.is_dir() and any(p.name not in experiments for p in folder.iterdir() if not p.name.startswith(".")):
        raise ConfigError(f"The folder '{folder}' contains other files. Choose a new folder with --out.")
    for name, experiment in experiments.items():
        if is_run_folder(folder / name):
            check_same_experiment(folder / name, experiment)


def _folder_name(experiment: Experiment) -> str:
    name = f"{method_label(describe_method(experiment.method))}-seed{experiment.seed}"
    return name.replace("(", "-").replace(")", "")


def _progress_label(experiment: Experiment) -> str:
    return f"{experiment.method.display_name}, seed {experiment.seed}"


def _print_run(finished: Run) -> None:
    out.print(run_table(finished))
    print_line(f"Run saved in {finished.folder}")


def _print_comparison(runs: list[Run], brief: bool = False) -> None:
    group = compare_runs(runs)
    out.print(comparison_table(group))
    if not brief:
        out.print(other_metrics(group))
    out.print(" ".join([*verdict_sentences(group), *gain_sentences(group)]), markup=False, highlight=False)
