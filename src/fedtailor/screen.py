"""What commands show of runs while they go on: bars, Ctrl-C, what fails."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedtailor import resuming
from fedtailor.errors import Refused
from fedtailor.experiment import Experiment
from fedtailor.federation import Federation
from fedtailor.interrupt import Interrupted
from fedtailor.lines import Record
from fedtailor.record import holds_run, is_finished
from fedtailor.run import Run, go_on_with

_MOST_BARS = 12  # finished runs on the screen: the one that runs must stay in sight
out, err = Console(), Console(stderr=True)


def carry_out(
    experiment: Experiment, load: Callable[[], Federation], folder: Path, label: str, progress: Progress
) -> Run:
    """Carry an experiment out in a folder, or go on with it if it was begun there. A finished one needs no data."""

    def go(advance: Callable[[Record], None]) -> Run:
        if not holds_run(folder):
            return experiment.run(load(), record=advance, folder=folder)
        return resuming.resume(folder, fed=None if is_finished(folder) else load(), record=advance)

    return watched(go, folder, label, experiment.length, progress)


def watched(
    go: Callable[[Callable[[Record], None]], Run], folder: Path, label: str, rounds: int | None, progress: Progress
) -> Run:
    """Run with a bar; Ctrl-C ends the command with how to go on."""
    task = progress.add_task(label, total=rounds, score="")

    def advance(record: Record) -> None:
        names = [key for key in record if key.endswith("_trained") and isinstance(record[key], float)]
        if name := min(names, key=lambda name: name == "loss_trained", default=None):  # the score, if there is one
            progress.update(task, score=f"{name.replace('_', ' ')} {record[name]:.3f}")
        progress.update(task, completed=record["round"])

    try:
        finished = go(advance)
    except KeyboardInterrupt as stop:
        progress.stop()
        at_once = Interrupted(f"Left at once; {go_on_with(folder)}" if holds_run(folder) else "Left at once.", 130)
        told = stop if isinstance(stop, Interrupted) else at_once
        err.print(str(told), markup=False, highlight=False, soft_wrap=True)
        sys.exit(told.code)
    progress.update(task, completed=len(finished.records), visible=len(progress.tasks) <= _MOST_BARS)
    return finished


def bars() -> Progress:
    """Where runs get a bar each; nothing where nobody looks."""
    columns = [TextColumn("{task.description:24}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn()]
    return Progress(*columns, TextColumn("{task.fields[score]}"), console=err, disable=not err.is_terminal)


@contextmanager
def hint(words: str) -> Iterator[None]:
    """Say how to go on, should the command be stopped."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as stop:
        err.print(words, markup=False, highlight=False, soft_wrap=True)
        if isinstance(stop, KeyboardInterrupt):  # between two runs
            sys.exit(130)
        raise


@contextmanager
def going_on(failures: dict[str, str], name: str, over: type[Exception] | tuple[()]) -> Iterator[None]:
    """Keep what fails under its name with its reason, and go on."""
    try:
        yield
    except over as error:
        kind = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
        failures[name] = kind + (str(error).splitlines()[0] if str(error) else "without a word")


def say_failures(failures: Mapping[str, str]) -> None:
    """Name what failed, and why."""
    for name, why in failures.items():
        err.print(f"[bold red]{escape(name)} failed:[/] {escape(why)}", soft_wrap=True, highlight=False)


def say(sentence: str) -> None:
    """A sentence as it is: no markup, no colours, no line breaks inside a path."""
    out.print(sentence, markup=False, highlight=False, soft_wrap=True)
