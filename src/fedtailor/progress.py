"""Progress of runs: bars in a terminal or a notebook, and lines on stderr if it is redirected.

with ProgressDisplay() as display, display.run("FedAvg, seed 0", rounds=100) as on_round_end:
    ft.simulate(..., on_round_end=on_round_end)
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from typing import Any, Protocol

Record = dict[str, Any]
OnRoundEnd = Callable[[Record], None]
Clock = Callable[[], float]  # seconds

_LINE_INTERVAL = 5.0  # seconds between two lines
_REFRESH_INTERVAL = 0.5  # seconds between two updates of a notebook's bars
_MAX_BARS = 12  # bars of finished runs beyond this are hidden, so that the active one stays on screen


@dataclass(eq=False)
class Bar:
    """The progress of one run, or the number of finished runs."""

    label: str
    size: int | None  # number of rounds; None: unknown
    done: int = 0
    is_total: bool = False
    ended: bool = False
    seconds_left: float | None = None
    _score: tuple[str, int] = ("", 0)  # the latest score and its round
    _first: tuple[float, int] | None = None  # time and rounds done at the first update

    def add_round(self, record: Record, now: float) -> None:
        """Count a round; a round that was not evaluated leaves the score unchanged."""
        self.advance(record["round"], now)
        if score := score_text(record):
            self._score = score, self.done

    def advance(self, done: int, now: float) -> None:
        """Set the number of finished rounds, and estimate the time left from the rounds since the first update."""
        self._first = self._first or (now, done)
        self.done, (started, before) = done, self._first
        remaining = 0 if self.size is None else self.size - done
        known = done > before and remaining > 0
        self.seconds_left = (now - started) / (done - before) * remaining if known else None

    @property
    def has_rounds(self) -> bool:
        """Whether a round was counted."""
        return self._first is not None

    @property
    def score(self) -> str:
        """The latest score, with its round if later rounds were not evaluated."""
        text, number = self._score
        return text if number == self.done or not text else f"{text} (round {number})"

    @property
    def text(self) -> str:
        """The progress in one line."""
        unit = "run" if self.is_total else "round"
        parts = [f"{unit} {self.done}" + ("" if self.size is None else f" of {self.size}"), self.score]
        if self.seconds_left is not None and not self.ended:
            parts.append(f"{timedelta(seconds=round(self.seconds_left))} left")
        return f"{self.label}: {', '.join(filter(None, parts))}"


class Output(Protocol):
    """A place where bars are shown."""

    def update(self, bar: Bar) -> None:
        """Show a new bar, or the new state of a bar."""

    def close(self) -> None:
        """Stop updating."""


class ProgressDisplay:
    """Shows the progress of one run, or of several runs one after another or at once; `runs` adds a bar for their
    number."""

    def __init__(self, runs: int | None = None, output: Output | None = None, clock: Clock = time.monotonic) -> None:
        self._total = None if runs is None else Bar("all runs", runs, is_total=True)
        self._output, self._clock = output, clock

    def __enter__(self) -> "ProgressDisplay":
        self._output = self._output or choose_output(self._clock)
        if self._total is not None:
            self._output.update(self._total)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def run(self, label: str, rounds: int | None = None) -> Iterator[OnRoundEnd]:
        """Show a bar during a run; call the function that the `with` statement returns with every round's record."""
        bar = self.start(label, rounds)
        succeeded = False
        try:
            yield lambda record: self.add_round(bar, record)
            succeeded = True
        finally:
            self.end(bar, succeeded)

    def start(self, label: str, rounds: int | None = None) -> Bar:
        """Show a new bar for a run."""
        bar = Bar(label, rounds)
        self._update(bar)
        return bar

    def add_round(self, bar: Bar, record: Record) -> None:
        """Show a round of a run."""
        bar.add_round(record, self._clock())
        self._update(bar)

    def end(self, bar: Bar, succeeded: bool = True) -> None:
        """Show that a run has ended, and count it."""
        if succeeded and not bar.has_rounds:  # the run was finished before
            bar.done = bar.size or 0
        bar.ended = True
        self._update(bar)
        self.advance()

    def advance(self) -> None:
        """Count one more run as done, such as a run that is skipped."""
        if self._total is not None:
            self._total.advance(self._total.done + 1, self._clock())
            self._update(self._total)

    def close(self) -> None:
        """Stop updating, so that other output can follow."""
        if self._output is not None:
            self._output.close()

    def _update(self, bar: Bar) -> None:
        assert self._output is not None, "ProgressDisplay is a context manager: with ProgressDisplay() as display"
        self._output.update(bar)


class TerminalBars:
    """Bars on stderr, drawn by rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
        from rich.table import Column

        # In a narrow terminal, the bar shrinks first.
        columns = [BarColumn(24), MofNCompleteColumn(table_column=Column(no_wrap=True))]
        columns += [TimeRemainingColumn(table_column=Column(no_wrap=True))]
        name, score = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[score]}"))
        # What the run prints goes above the bars, except if it goes to a file.
        shared = sys.stdout is not None and sys.stdout.isatty()
        self._progress = Progress(name, *columns, score, console=Console(stderr=True), redirect_stdout=shared)
        self._tasks = dict[Bar, TaskID]()
        self._progress.start()

    def update(self, bar: Bar) -> None:
        if bar not in self._tasks:
            self._tasks[bar] = self._progress.add_task(bar.label, total=bar.size, score="")
        visible = not bar.ended or len(self._tasks) <= _MAX_BARS
        self._progress.update(self._tasks[bar], completed=bar.done, score=bar.score, visible=visible)

    def close(self) -> None:
        self._progress.stop()


class NotebookBars:
    """Bars in the output of a notebook's cell. They are HTML that is replaced, so no widgets are needed."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._refreshed = clock, 0.0
        self._bars: list[Bar] = []
        self._handle: Any = None

    def update(self, bar: Bar) -> None:
        is_new = bar not in self._bars
        if is_new:
            self._bars.append(bar)
        if is_new or bar.ended or self._clock() - self._refreshed >= _REFRESH_INTERVAL:
            self._refresh()

    def close(self) -> None:
        if self._bars:
            self._refresh()

    def _refresh(self) -> None:
        from IPython.display import display

        self._refreshed = self._clock()
        hidden = sum(bar.ended for bar in self._bars[_MAX_BARS:])
        content = _Bars([*self._bars[:_MAX_BARS], *(bar for bar in self._bars[_MAX_BARS:] if not bar.ended)], hidden)
        if self._handle is None:
            self._handle = display(content, display_id=True)
        else:
            self._handle.update(content)


@dataclass(frozen=True)
class _Bars:
    """Bars as HTML, and as text for notebooks that are read without HTML."""

    bars: Sequence[Bar]
    hidden: int  # finished runs that are not shown

    def __repr__(self) -> str:
        return "\n".join(bar.text for bar in self.bars)

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<div style="white-space: nowrap"><progress value="{bar.done}" max="{bar.size or max(bar.done, 1)}" '
            f'style="width: 16em; vertical-align: middle"></progress> {escape(bar.text)}</div>'
            for bar in self.bars
        )
        return f"<div>{rows}{f'<div>and {self.hidden} finished runs</div>' if self.hidden else ''}</div>"


class Lines:
    """Lines on stderr: the first round, then one line every few seconds, and the last round of every run.

    While several runs are in progress, their lines take turns, and each line starts with the number of finished runs.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._total: Bar | None = None
        self._active = set[Bar]()
        self._printed = dict[Bar, tuple[int, float]]()  # run -> round and time of its last line

    def update(self, bar: Bar) -> None:
        if bar.is_total:
            self._total = bar
            return
        if not bar.ended:
            self._active.add(bar)
        if bar.has_rounds:
            is_first, now = not self._printed, self._clock()
            number, printed = self._printed.setdefault(bar, (0, now))
            is_due = bar.ended or bar.done == bar.size or now - printed >= _LINE_INTERVAL * len(self._active)
            if number != bar.done and (is_first or is_due):
                self._print(bar)
                self._printed[bar] = bar.done, now
        if bar.ended:
            self._active.discard(bar)

    def close(self) -> None:
        pass

    def _print(self, bar: Bar) -> None:
        position = ""
        if self._total is not None:
            done, size = self._total.done, self._total.size
            position = f"[{done}/{size} finished] " if len(self._active) > 1 else f"[{done + 1}/{size}] "
        with suppress(OSError, ValueError):  # nobody reads stderr, or it is closed
            print(f"{position}{bar.text}", file=sys.stderr, flush=True)


class Silent:
    """Shows nothing."""

    def update(self, bar: Bar) -> None:
        pass

    def close(self) -> None:
        pass


def choose_output(clock: Clock = time.monotonic) -> Output:
    """Return bars in a notebook or a terminal, and lines otherwise."""
    if in_notebook():
        return NotebookBars(clock)
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with suppress(ImportError):  # training needs only torch and numpy
            return TerminalBars()
    return Lines(clock)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook.

    >>> in_notebook()
    False
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def score_text(record: Record) -> str:
    """Return the scores in a round's record at both moments: of the first metric, or of the loss without metrics.

    >>> score_text({"round": 1, "loss_trained": 0.5, "accuracy_trained": 0.8125, "accuracy_received": 0.75})
    'accuracy 0.812 trained, 0.750 received'
    """
    names = [name.removesuffix("_trained") for name in record if name.endswith("_trained")]
    scored = [name for name in names if isinstance(record[f"{name}_trained"], float)]
    if not scored:
        return ""
    name = min(scored, key=lambda name: name == "loss")
    found = {moment: record.get(f"{name}_{moment}") for moment in ("trained", "received")}
    values = [f"{value:.3f} {moment}" for moment, value in found.items() if isinstance(value, float)]
    return f"{name} {', '.join(values)}"
