"""The commands run and resume."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.analysis.tables import run_table
from fedtailor.cli.console import run_with_progress, show_progress
from fedtailor.cli.output import out, print_line
from fedtailor.cli.own_code import AllowCode, OwnData, OwnMethod, OwnNetwork
from fedtailor.core.code_reference import short_name
from fedtailor.errors import ConfigError
from fedtailor.experiments.experiment import Experiment, make_experiment, read_experiment_file
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.experiments.own_code import parse_consent
from fedtailor.experiments.resume import load_or_continue
from fedtailor.progress import ProgressDisplay
from fedtailor.runs.reader import planned_rounds
from fedtailor.runs.run import Run, folder_label
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
    if given := {"repeats", "folds"} & flags.settings.keys():
        fix = "use fedtailor compare for several, or --data.repeat 3 for another one"
        raise ConfigError(f"run trains on one split, so it does not take --{min(given)}; {fix}.")
    base = read_experiment_file(Path(flags.positional[0])) if flags.positional else {}
    experiment = make_experiment(flags.apply_to(base), consent)
    folder = unused_folder(folder, f"{_folder_name(experiment)}-{short_name(experiment.data.name)}")
    with ProgressDisplay() as display:
        finished = run_with_progress(experiment, folder, _progress_label(experiment), display)
    _print_run(finished)


def resume(
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    method: OwnMethod = None,
    network: OwnNetwork = None,
    data: OwnData = None,
    allow_code: AllowCode = False,
    engine: Annotated[str | None, typer.Option(help="continue with another engine")] = None,
    actors: Annotated[int | None, typer.Option(help="continue with another number of actors of the engine ray")] = None,
    ray_address: Annotated[str | None, typer.Option(help="continue on another Ray cluster")] = None,
) -> None:
    """Resume an interrupted run from its last checkpoint. A finished run is only shown.

    If the method, the network, or the data are your own code, name them again
    or pass --allow-code.
    """
    parts: dict[str, Any] = {"method": method, "model": network, "fed": data, "allow_code": allow_code}
    parts |= {"engine": engine, "actors": actors, "ray_address": ray_address}
    start = partial(load_or_continue, folder, **parts)
    with ProgressDisplay() as display:
        finished = show_progress(
            lambda call: start(on_round_end=call), folder, folder.name, planned_rounds(folder), display
        )
    _print_run(finished)


def _folder_name(experiment: Experiment) -> str:
    return f"{folder_label(describe_method(experiment.method))}-seed{experiment.seed}"


def _progress_label(experiment: Experiment) -> str:
    return f"{experiment.method.display_name}, seed {experiment.seed}"


def _print_run(finished: Run) -> None:
    out.print(run_table(finished))
    print_line(f"Run saved in {finished.folder}")
