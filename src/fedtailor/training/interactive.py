"""What `ft.simulate` and `ft.resume` add for people: a progress display, and partial runs in interactive sessions."""

import logging
import sys
from collections.abc import Callable

from fedtailor.runs.records import Record
from fedtailor.runs.run import Run
from fedtailor.training.signals import Interrupted

log = logging.getLogger("fedtailor")
OnRoundEnd = Callable[[Record], None]


def run_interactively(
    train: Callable[[OnRoundEnd | None], Run],
    on_round_end: OnRoundEnd | None,
    progress: bool,
    label: str,
    rounds: int | None,
) -> Run:
    """Return `train(on_round_end)`, with a progress display if requested.

    In an interactive session, a run that was interrupted once is returned instead of raising `Interrupted`, so that
    `run = ft.simulate(...)` does not lose it. A second interruption raises, which also ends a loop over runs.
    """
    try:
        return _run_with_progress(train, on_round_end, label, rounds) if progress else train(on_round_end)
    except Interrupted as stop:
        if stop.run is None or stop.immediately or not is_interactive():
            raise
        hint = "" if stop.run.folder is None else f" Continue it with ft.resume({str(stop.run.folder)!r})."
        log.warning("Interrupted: the run is returned with %s.%s", stop.run.rounds_text, hint)
        return stop.run


def _run_with_progress(
    train: Callable[[OnRoundEnd | None], Run], on_round_end: OnRoundEnd | None, label: str, rounds: int | None
) -> Run:
    from fedtailor.progress import ProgressDisplay

    with ProgressDisplay() as display, display.run(label, rounds) as show:

        def show_and_call(record: Record) -> None:
            show(record)
            if on_round_end is not None:
                on_round_end(record)

        return train(show_and_call)


def is_interactive() -> bool:
    """Return whether this process is a notebook's kernel, IPython, or Python's own prompt.

    >>> is_interactive()
    False
    """
    ipython = sys.modules.get("IPython")
    return hasattr(sys, "ps1") or (ipython is not None and ipython.get_ipython() is not None)
