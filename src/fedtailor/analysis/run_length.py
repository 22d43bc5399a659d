"""State how many rounds runs have, and which of them stopped early."""

from collections.abc import Sequence

from fedtailor.analysis.formatting import count_of
from fedtailor.runs.run import Run


def rounds_in_words(runs: Sequence[Run]) -> str:
    """Return the number of rounds of these runs, such as "20 rounds", or "12 to 20 rounds" if they stopped early."""
    if len(runs) == 1:
        return runs[0].rounds_text
    return f"{_range(runs)} round{'' if _range(runs) == '1' else 's'}"


def early_stopping_note(runs: Sequence[Run]) -> str:
    """Return a sentence on the runs that stopped early; empty if none did."""
    stopped = [run for run in runs if run.stopped_early]
    if not stopped:
        return ""
    first = stopped[0].experiment
    which = "The run stopped" if len(runs) == 1 else f"{len(stopped)} of {len(runs)} runs stopped"
    why = f"the validation score had not improved for {count_of(first['patience'], 'evaluation')}"
    return f"{which} early, after {_range(stopped)} of {count_of(first['rounds'], 'round')}: {why}."


def _range(runs: Sequence[Run]) -> str:
    counts = sorted({len(run.records) for run in runs})
    return f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
