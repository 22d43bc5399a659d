"""Terminal output shared by the commands: progress bars, interruption messages, and lists of failures."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedtailor.data.federation import Federation
from fedtailor.errors import FedTailorError, reason
from fedtailor.experiments.experiment import Experiment
from fedtailor.experiments.resume import resume
from fedtailor.runs.reader import is_finished, is_run_folder
from fedtailor.runs.records import Record
from fedtailor.runs.run import Run, resume_hint
from fedtailor.training.signals import Interrupted

_MAX_BARS = 12  # bars of finished runs beyond this are hidden, so that the active one stays on screen
out, err = Console(), Console(stderr=True)


def run_with_progress(
    experiment: Experiment, load: Callable[[], Federation], folder: Path, label: str, progress: Progress
) -> Run:
    """Run an experiment in a folder, or resume it if it was started there. Data are not loaded for a finished run."""

    def start(on_round_end: Callable[[Record], None]) -> Run:
        if not is_run_folder(folder):
            return experiment.run(load(), on_round_end=on_round_end, folder=folder)
        fed = None if is_finished(folder) else load()
        model = None if fed is None else experiment.model(fed)
        return resume(folder, method=experiment.method, model=model, fed=fed, on_round_end=on_round_end)

    return show_progress(start, folder, label, experiment.num_rounds, progress)


def show_progress(
    start: Callable[[Callable[[Record], None]], Run], folder: Path, label: str, rounds: int | None, progress: Progress
) -> Run:
    """Run with a progress bar. Ctrl-C ends the command with a message that says how to resume."""
    task = progress.add_task(label, total=rounds, score="")

    def advance(record: Record) -> None:
        names = [key.removesuffix("_trained") for key in record if key.endswith("_trained")]
        scores = [name for name in names if isinstance(record[f"{name}_trained"], float)]
        if name := min(scores, key=lambda name: name == "loss", default=None):  # the loss only without a score
            trained, received = record[f"{name}_trained"], record[f"{name}_received"]
            progress.update(task, score=f"{name} {trained:.3f} trained, {received:.3f} received")
        progress.update(task, completed=record["round"])

    try:
        finished = start(advance)
    except KeyboardInterrupt as stop:
        progress.stop()
        hint = f"Stopped immediately; {resume_hint(folder)}" if is_run_folder(folder) else "Stopped immediately."
        interrupted = stop if isinstance(stop, Interrupted) else Interrupted(hint, 130)
        err.print(str(interrupted), markup=False, highlight=False, soft_wrap=True)
        sys.exit(interrupted.code)
    progress.update(task, completed=len(finished.records), visible=len(progress.tasks) <= _MAX_BARS)
    return finished


def progress_bars() -> Progress:
    """Return an empty set of progress bars, which shows nothing if stderr is not a terminal."""
    columns = [TextColumn("{task.description:24}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn()]
    return Progress(*columns, TextColumn("{task.fields[score]}"), console=err, disable=not err.is_terminal)


@contextmanager
def print_on_interrupt(message: str) -> Iterator[None]:
    """Print a message if the command is interrupted."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as stop:
        err.print(message, markup=False, highlight=False, soft_wrap=True)
        if isinstance(stop, KeyboardInterrupt):  # interrupted between two runs
            sys.exit(130)
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


def print_line(text: str) -> None:
    """Print text without markup, colors, or line breaks, so that paths can be copied."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)
