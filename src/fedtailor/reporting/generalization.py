"""The parts of the report beyond personal models on their clients' test samples: a common test set, held-out clients,
training samples, and the global model."""

from rich.table import Table as ConsoleTable

from fedtailor.analysis.comparison_tables import generalization_table, train_and_global_table
from fedtailor.analysis.formatting import ScoreFormat, count_of, method_in_text
from fedtailor.analysis.rows import method_rows
from fedtailor.analysis.run_summary import Comparison
from fedtailor.reporting.figures.figure import Table
from fedtailor.reporting.page import Section
from fedtailor.runs.records import COMMON, HELD_OUT

_MOMENTS = {"received": "when they join", "trained": "after one round of training"}


def generalization_section(group: Comparison) -> Section | None:
    """Return the section with the scores on the common test set and of held-out clients; None if there are none."""
    table = generalization_table(group)
    if table is None:
        return None
    answer = [*_common_sentences(group), *_held_out_sentences(group), str(table.caption)]
    title = "How do models do beyond their own clients?"
    return Section("generalization", title, answer, (), [_for_page(table)])


def train_and_global_section(group: Comparison) -> Section | None:
    """Return the section with the scores on training samples and of the global model; None if there are none."""
    table = train_and_global_table(group)
    if table is None:
        return None
    title = "How do models do on training samples, and how does the global model do?"
    return Section("train-and-global", title, [str(table.caption)], (), [_for_page(table)], is_reference=True)


def _for_page(table: ConsoleTable) -> tuple[str, Table]:
    """Return the title of a table of the terminal, and the table for the page."""
    headings = [" ".join(str(column.header).split()) for column in table.columns]
    return str(table.title), Table(headings, [list(row) for row in zip(*(c.cells for c in table.columns), strict=True)])


def _common_sentences(group: Comparison) -> list[str]:
    if "common_test" not in group.first.info:
        return []
    found = {moment: _best(group, COMMON, moment) for moment in ("trained", "received")}
    samples = count_of(group.first.info["common_test"], "sample")
    best = [f"{name} ({text}) as {moment}" for moment, pair in found.items() if pair for name, text in [pair]]
    where = f"On the {samples} of the common test set"
    return [f"{where}, the models of {' and of '.join(best)} score best."] if best else []


def _held_out_sentences(group: Comparison) -> list[str]:
    held_out = len(group.first.held_out_clients)
    found = {moment: _best(group, HELD_OUT, moment) for moment in _MOMENTS} if held_out else {}
    best = [f"{_MOMENTS[m]} with {name} ({text})" for m, pair in found.items() if pair for name, text in [pair]]
    clients = f"The {count_of(held_out, 'client')} that never trained with the others"
    return [f"{clients} {'scores' if held_out == 1 else 'score'} best {', and '.join(best)}."] if best else []


def _best(group: Comparison, prefix: str, moment: str) -> tuple[str, str] | None:
    """Return the ranked method with the best score, and that score; None if no method has one."""
    name = f"{prefix}{group.first.info['score']}"
    rows = [row for row in method_rows(group) if not row["is_reference"]]
    scores = {row["method"]: row[key] for row in rows if row.get(key := f"{name}_{moment}") is not None}
    if not scores:
        return None
    label = max(scores, key=lambda label: group.sign * scores[label])
    return method_in_text(label), ScoreFormat(name).text(scores[label])
