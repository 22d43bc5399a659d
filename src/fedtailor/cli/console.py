"""Terminal output shared by the commands: progress, interruption messages, and lists of failures."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.markup import escape

from fedtailor.cli.output import err
from fedtailor.errors import FedTailorError, reason
from fedtailor.experiments.experiment import Experiment
from fedtailor.experiments.resume import run_or_continue
from fedtailor.progress import OnRoundEnd, ProgressDisplay
from fedtailor.runs.reader import is_run_folder
from fedtailor.runs.run import Run, resume_hint
from fedtailor.training.signals import Interrupted


def run_with_progress(experiment: Experiment, folder: Path, label: str, display: ProgressDisplay) -> Run:
    """Run an experiment in a folder with a progress bar."""

    def start(on_round_end: OnRoundEnd) -> Run:
        return run_or_continue(experiment, folder, on_round_end=on_round_end)

    return show_progress(start, folder, label, experiment.num_rounds, display)


def show_progress(
    start: Callable[[OnRoundEnd], Run], folder: Path, label: str, rounds: int | None, display: ProgressDisplay
) -> Run:
    """Run with a progress bar. Ctrl-C ends the command with a message that says how to resume."""
    try:
        with display.run(label, rounds) as on_round_end:
            return start(on_round_end)
    except KeyboardInterrupt as stop:
        display.close()
        hint = f"Stopped immediately; {resume_hint(folder)}" if is_run_folder(folder) else "Stopped immediately."
        interrupted = stop if isinstance(stop, Interrupted) else Interrupted(hint)
        err.print(str(interrupted), markup=False, highlight=False, soft_wrap=True)
        sys.exit(interrupted.code)


@contextmanager
def print_on_interrupt(message: str) -> Iterator[None]:
    """Print a message if the command is interrupted."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as stop:
        during_run = [str(stop)] if isinstance(stop, Interrupted) else []
        for line in [*during_run, message]:
            err.print(line, markup=False, highlight=False, soft_wrap=True)
        if isinstance(stop, KeyboardInterrupt):
            sys.exit(stop.code if isinstance(stop, Interrupted) else 130)
        raise


@contextmanager
def collect_failures(failures: dict[str, str], name: str, caught: type[Exception] | tuple[()]) -> Iterator[None]:
    """Store the message of a caught exception under a name and continue."""
    try:
        yield
    except caught as error:
        failures[name] = f"{reason(error, with_type=not isinstance(error, FedTailorError))}."


def print_failures(failures: Mapping[str, str]) -> None:
    """Print what failed, and why."""
    for name, text in failures.items():
        err.print(f"[bold red]{escape(name)} failed:[/] {escape(text)}", soft_wrap=True, highlight=False)
