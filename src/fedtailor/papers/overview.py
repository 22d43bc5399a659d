"""What is in the tables, what of it can be run here, and our results beside the printed ones, as rows of text."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedtailor.papers.cells import Cell, data_state, make_cells
from fedtailor.papers.definition import Paper, PaperTable
from fedtailor.papers.jobs import read_results
from fedtailor.papers.running import SEEDS, CellResult, Results, make_jobs

SHOW_HEADINGS = ("row (†: ours)", "column", "paper", "ours (seeds)", "Δ", "within")
NONE = "–"
OURS_MARK = " †"  # of rows that the paper does not have
SIDE_BY_SIDE_NOTE = (
    f"paper / ours (mean ± standard deviation over {len(SEEDS)} seeds, or the number in parentheses); "
    f"≠: differs by more than the spread; {NONE}: not run;{OURS_MARK}: not in the paper"
)


def list_lines(paper: Paper) -> list[str]:
    """Return the name of a paper, and three lines about each of its tables.

    >>> from fedtailor.papers.definition import load_paper
    >>> list_lines(load_paper("fedapa"))[:2]
    ['FedAPA (fedapa)', '  table-1-20-clients: 96 of 96 cells can be run, 96 runs per seed']
    """
    lines = [f"{paper.name} ({paper.key})"]
    for table in paper.tables:
        cells = make_cells(paper, table)
        able = [cell for cell in cells if not cell.missing]
        runs = f", {len(make_jobs(able, [0]))} runs per seed" if able else ""
        lines.append(f"  {table.id}: {len(able)} of {len(cells)} cells can be run{runs}")
        lines.append(f"    {table.title}")
        states = {cell.setup.data.name: data_state(cell.setup.data) for cell in able}
        data = [
            f"{', '.join(n for n, s in states.items() if s == state)} {state}"
            for state in dict.fromkeys(states.values())
        ]
        lines.append(f"    {'; '.join(data) or table.missing}")
    return lines


def missing_lines(cells: Sequence[Cell]) -> list[str]:
    """Return one line for each reason for which cells cannot be run here."""
    reasons = Counter(reason for cell in cells if (reason := cell.why_not))
    return [f"{count} cells are not run: {reason}." for reason, count in reasons.items()]


def failure_lines(path: Path) -> list[str]:
    """Return one line for each reason for which runs in a file of results failed, and have not succeeded since."""
    latest = {(one["fingerprint"], one["seed"]): one for one in read_results(path)}
    reasons = Counter(one["error"] for one in latest.values() if "error" in one)
    return [f"{count} runs failed: {reason}" for reason, count in reasons.items()]


def show_rows(comparisons: Sequence[CellResult]) -> Iterator[tuple[str, ...]]:
    """Return a line about each cell of a table, for `SHOW_HEADINGS`."""
    for one in comparisons:
        digits = one.cell.report.digits
        printed = _with_std(one.cell.printed, one.cell.printed_std, digits)
        if one.cell.row.ours:
            printed = ""  # the paper does not have this row
        ours = _with_std(one.mean, one.std, digits)
        difference = NONE if one.difference is None else f"{one.difference:+.{digits}f}"
        within = {None: NONE, True: "yes", False: "no"}[one.is_within]
        count = f" ({len(one.scores)})" if one.scores else ""
        yield row_label(one.cell), one.cell.column.key, printed, ours + count, difference, within


def side_by_side(comparisons: Sequence[CellResult]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of one table in the shape of the paper; `SIDE_BY_SIDE_NOTE` explains the cells.

    >>> from fedtailor.papers.running import compare, select_cells
    >>> headings, rows = side_by_side(compare(select_cells("fedapa", "table-4"), {}))
    >>> headings[:3], rows[0][:3], rows[1][0]
    (['row', 'mu=0', 'mu=0.3'], ['FedAPA', '84.41 / –', '84.76 / –'], 'Local training †')
    """
    columns = list(dict.fromkeys(one.cell.column.key for one in comparisons))
    rows: dict[str, dict[str, str]] = {}
    for one in comparisons:
        rows.setdefault(row_label(one.cell), {})[one.cell.column.key] = _both(one)
    return ["row", *columns], [[label, *(cells.get(key, "") for key in columns)] for label, cells in rows.items()]


def row_label(cell: Cell) -> str:
    """Return the label of a row, marked if the paper does not have it."""
    return f"{cell.row.label}{OURS_MARK}" if cell.row.ours else cell.row.label


def cell_rows(comparisons: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Return one row per cell, also of those without results, for CSV and for the report."""
    return [
        {
            "table": one.cell.table.id, "row": row_label(one.cell), "column": one.cell.column.key,
            "paper": one.cell.printed, "paper_std": one.cell.printed_std, "ours": one.mean, "ours_std": one.std,
            "seeds": len(one.scores), "difference": one.difference, "within_spread": one.is_within,
            "why_not_run": one.error or ("" if one.scores else one.cell.why_not or "not run yet"),
        }
        for one in comparisons
    ]  # fmt: skip


def progress_lines(comparisons: Sequence[CellResult]) -> list[str]:
    """Return how many cells have been run, how many agree with the paper, and why others cannot be run."""
    done = [one for one in comparisons if one.scores]
    judged = [one for one in done if one.is_within is not None]
    within = sum(bool(one.is_within) for one in judged)
    lines = [f"{len(done)} of {len(comparisons)} cells have been run."]
    lines += [f"{within} of {len(judged)} printed values are within the spread of ours."] if judged else []
    return lines + missing_lines([one.cell for one in comparisons if not one.scores])


def by_table(comparisons: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """Return the cells of each table, by its name and title."""
    found: dict[str, list[CellResult]] = {}
    for one in comparisons:
        found.setdefault(f"{one.cell.paper.name}, {one.cell.table.id}: {one.cell.table.title}", []).append(one)
    return found


def note_lines(paper: Paper, tables: Sequence[PaperTable]) -> list[str]:
    """Return what a reader of our results must know: our choices, and printed numbers that seem inconsistent.

    >>> from fedtailor.papers.definition import load_paper
    >>> note_lines(load_paper("fedapa"), load_paper("fedapa").select("table-4"))[-1].partition(" gives")[0]
    'Suspect: table-4: mu = 1'
    """
    choices = [f"Our choice: {one.what}. {one.why}" for one in paper.choices]
    words = {one: one.where.replace(",", " ").replace(":", " ").split() for one in paper.suspects}
    ids = [table.id for table in tables]
    named = [
        one for one, found in words.items() if any(f"{id}-".startswith(f"{word}-") for word in found for id in ids)
    ]
    suspects = [
        f"Suspect: {one.where}: {one.why}." + (f" Answer: {one.answer}." if one.answer else "") for one in named
    ]
    return choices + suspects


def summarize(comparisons: Sequence[CellResult], done: Results) -> list[dict[str, Any]]:
    """Return the cells that have results as JSON objects: printed value, ours, and where they come from."""
    found = []
    for one in comparisons:
        if one.scores:
            setup = one.cell.setup
            runs = [result for (fingerprint, _), result in done.items() if fingerprint == setup.fingerprint]
            where = {"table": one.cell.table.id, "row": one.cell.row.label, "column": one.cell.column.key}
            values: dict[str, Any] = {
                "printed": one.cell.printed,
                "printed_std": one.cell.printed_std,
                "mean": one.mean,
            }
            values |= {"std": one.std, "scores": list(one.scores), "difference": one.difference}
            origin = {key: sorted({str(run[key]) for run in runs}) for key in ("date", "device")}
            found.append(where | values | origin | {"seeds": sorted(run["seed"] for run in runs)})
            found[-1] |= {"fingerprint": setup.fingerprint, "settings": setup.describe()}
    return found


def _both(one: CellResult) -> str:
    """Return the text of a cell: the paper's value and ours."""
    digits = one.cell.report.digits
    count = f" ({len(one.scores)})" if one.scores and len(one.scores) != len(SEEDS) else ""
    differs = " ≠" if one.is_within is False else ""
    ours = "failed" if one.error and not one.scores else f"{_with_std(one.mean, one.std, digits)}{count}{differs}"
    if one.cell.printed is None:
        return ours
    return f"{_with_std(one.cell.printed, one.cell.printed_std, digits)} / {ours}"


def _with_std(value: float | None, std: float | None, digits: int) -> str:
    if value is None:
        return NONE
    return f"{value:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")
