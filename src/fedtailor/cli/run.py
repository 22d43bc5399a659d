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
    progress_bars,
    run_with_progress,
    show_progress,
)
from fedtailor.cli.own_code import AllowCode, OwnMethod, OwnNetwork
from fedtailor.cli.sweep import show_sweep
from fedtailor.core.code_reference import is_reference, short_name
from fedtailor.errors import ConfigError, FedTailorError, unknown_name
from fedtailor.experiments.experiment import Experiment, make_experiment, read_experiment_file
from fedtailor.experiments.overrides import Overrides, parse_overrides
from fedtailor.experiments.own_code import NO_CONSENT, CodeConsent, check_distinct_names, parse_consent
from fedtailor.experiments.own_parts import part_types
from fedtailor.experiments.resume import resume as resume_run
from fedtailor.experiments.sweep import read_plan
from fedtailor.experiments.tuning import make_outcome
from fedtailor.methods import METHODS
from fedtailor.runs.reader import check_same_experiment, is_finished, is_run_folder, load_run, read_settings
from fedtailor.runs.run import Run, method_label
from fedtailor.runs.writer import unused_folder
from fedtailor.training.simulate import describe_method


def run(ctx: typer.Context) -> None:
    """Run one experiment.

    From a file: fedtailor run exp.toml
    From flags: fedtailor run --method fedavg --data digits --rounds 20
    The run is saved in a new folder inside --out (runs).
    """
    words, consent = parse_consent("run", ctx.args)
    flags = parse_overrides(words)
    folder = Path(flags.pop("out", "runs"))
    if len(flags.positional) > 1:
        raise ConfigError(f"run takes one experiment file, got {len(flags.positional)}.")
    base = read_experiment_file(Path(flags.positional[0])) if flags.positional else {}
    experiment = make_experiment(flags.apply_to(base), consent)
    folder = unused_folder(folder, f"{_folder_name(experiment)}-{short_name(experiment.data.name)}")
    with progress_bars() as progress:
        finished = run_with_progress(experiment, experiment.load, folder, _progress_label(experiment), progress)
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
    words, consent = parse_consent("compare", ctx.args)
    flags = parse_overrides([word for word in words if word != "--all"])
    out_folder = flags.pop("out", "")
    seeds = list(dict.fromkeys(flags.pop_list("seeds", int, [0])))
    if "seed" in flags.settings:
        raise ConfigError("compare takes --seeds instead of --seed, such as --seeds 0,1,2.")
    if all_methods and flags.positional:
        raise ConfigError("compare takes either method names or --all, not both.")
    names = list(dict.fromkeys(["local", *(METHODS if all_methods else flags.positional)]))
    check_distinct_names(names)
    failures: dict[str, str] = {}
    local = make_experiment(method_settings("local", names, flags, consent), consent)
    folder = Path(out_folder or unused_folder(Path("runs"), f"compare-{short_name(local.data.name)}"))
    feds = {seed: replace(local, seed=seed).load() for seed in seeds}
    experiments = []
    for name in names:  # report settings that do not fit before any training starts
        with collect_failures(failures, name, FedTailorError if all_methods else ()):
            experiment = make_experiment(method_settings(name, names, flags, consent), consent)
            experiment.check(feds[seeds[0]])
            experiments.append(experiment)
    seeded = [replace(experiment, seed=seed) for seed in seeds for experiment in experiments]
    _check_folder(folder, {_folder_name(each): each.describe(feds[each.seed]) for each in seeded})
    runs: list[Run] = []
    with (
        progress_bars() as progress,
        print_on_interrupt(f"To continue the comparison, run the same command with --out {folder}"),
    ):
        for experiment in seeded:
            with collect_failures(failures, name := _folder_name(experiment), Exception):
                load = partial(feds.__getitem__, experiment.seed)
                runs.append(run_with_progress(experiment, load, folder / name, _progress_label(experiment), progress))
    if runs:
        _print_comparison(runs, brief=all_methods)
        print_line(f"Runs saved in {folder}")
    print_failures(failures)
    if failures:
        raise typer.Exit(1)


def resume(
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    method: OwnMethod = None,
    network: OwnNetwork = None,
    data: Annotated[str | None, typer.Option(help="the run's own loader of data, module:function")] = None,
    allow_code: AllowCode = False,
) -> None:
    """Resume an interrupted run from its last checkpoint. A finished run is only shown.

    If the method, the network, or the data are your own code, name them again
    or pass --allow-code.
    """
    with progress_bars() as progress:
        rounds = read_settings(folder).get("rounds") if is_run_folder(folder) else None
        start = partial(resume_run, folder, method=method, model=network, fed=data, allow_code=allow_code)
        finished = show_progress(lambda call: start(on_round_end=call), folder, folder.name, rounds, progress)
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


def method_settings(name: str, names: list[str], flags: Overrides, consent: CodeConsent = NO_CONSENT) -> dict[str, Any]:
    """Return the settings of one of several methods: the common ones, and the ones set for this method only, by its
    name or by the name of the user's own class."""
    fields = {other: part_types("method", other, consent) for other in names}
    if name not in METHODS and not is_reference(name):
        raise unknown_name("method", name, METHODS)
    settings = flags.apply_to({})
    specific = {other: settings.pop(short_name(other), {}) for other in names}[name]
    common = settings.pop("method", {})
    if not isinstance(specific, dict):
        label = short_name(name)
        raise ConfigError(f"--{label} takes no value. Set one of its fields, such as --{label}.lr 0.1.")
    if not isinstance(common, dict):
        raise ConfigError("compare takes method names without a flag, such as fedtailor compare fedavg fedper.")
    known = [field for other in names for field in fields[other]]
    for setting in common:
        if setting not in known:
            raise unknown_name("field of these methods", setting, dict.fromkeys(known))
    shared = {key: value for key, value in common.items() if key in fields[name]}
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
