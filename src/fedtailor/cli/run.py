"""The commands run and resume."""

from pathlib import Path
from typing import Annotated

import typer

from fedtailor.analysis.tables import run_table
from fedtailor.cli.console import (
    out,
    print_line,
    run_with_progress,
    show_progress,
)
from fedtailor.errors import ConfigError
from fedtailor.experiments.experiment import Experiment, make_experiment, read_experiment_file
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.experiments.resume import load_or_continue
from fedtailor.progress import ProgressDisplay
from fedtailor.runs.reader import planned_rounds
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


def resume(folder: Annotated[Path, typer.Argument(help="the run folder")]) -> None:
    """Resume an interrupted run from its last checkpoint. A finished run is only shown."""
    with ProgressDisplay() as display:
        finished = show_progress(
            lambda on_round_end: load_or_continue(folder, on_round_end=on_round_end),
            folder, folder.name, planned_rounds(folder), display,
        )  # fmt: skip
    _print_run(finished)


def _folder_name(experiment: Experiment) -> str:
    name = f"{method_label(describe_method(experiment.method))}-seed{experiment.seed}"
    return name.replace("(", "-").replace(")", "")


def _progress_label(experiment: Experiment) -> str:
    return f"{experiment.method.display_name}, seed {experiment.seed}"


def _print_run(finished: Run) -> None:
    out.print(run_table(finished))
    print_line(f"Run saved in {finished.folder}")
