"""The HTML report on a paper: its claims, and its tables beside our results."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedtailor.errors import ConfigError, RunError
from fedtailor.papers.claims import CLAIM_HEADINGS, JudgedClaim, failure_texts, judge
from fedtailor.papers.definition import PAPERS, Paper, load_paper
from fedtailor.papers.overview import SIDE_BY_SIDE_NOTE, by_table, failure_lines, progress_lines, side_by_side
from fedtailor.papers.running import CellResult, Results, compare, read_done, select_cells
from fedtailor.reporting.figures.figure import Table
from fedtailor.reporting.figures.paper_dots import paper_dots
from fedtailor.reporting.page import Chapter, Page, Section


def is_results_file(path: Path) -> bool:
    """Return whether a path is a file of results of `fedtailor paper run`.

    >>> is_results_file(Path("results/papers/fedapa.jsonl")), is_results_file(Path("runs/digits"))
    (True, False)
    """
    return path.suffix == ".jsonl"


def build_paper_page(files: Sequence[Path]) -> Page:
    """Return the content of a report on files of results, whose names begin with that of a paper."""
    if foreign := [path for path in files if not is_results_file(path)]:
        raise ConfigError(
            f"'{foreign[0]}' is not a file of a paper's results; report on runs and on papers separately."
        )
    for path in files:
        if not path.is_file():
            raise RunError(f"There is no file '{path}'; write it with 'fedtailor paper run {paper_of(path)}'.")
    papers = [(load_paper(paper_of(path)), path) for path in files]
    chapters = [Chapter(paper.name if len(papers) > 1 else "", _sections(paper, path)) for paper, path in papers]
    names = " and ".join(f"{paper.name} ({paper.venue})" for paper, _ in papers)
    return Page(f"{names}: the tables, repeated", _subtitle([read_done(path) for path in files]), chapters)


def paper_of(path: Path) -> str:
    """Return the paper whose results are in a file.

    >>> paper_of(Path("results/papers/fedapa.jsonl")), paper_of(Path("fedlag-20-clients.jsonl"))
    ('fedapa', 'fedlag')
    """
    name = re.split(r"[^a-z]", path.name, maxsplit=1)[0]
    if name not in PAPERS:
        raise ConfigError(f"The name of '{path}' must begin with that of a paper: {', '.join(PAPERS)}.")
    return name


def _subtitle(results: Sequence[Results]) -> str:
    runs = [run for done in results for run in done.values()]
    dates, devices = sorted({run["date"] for run in runs}), sorted({run["device"] for run in runs})
    return " · ".join([f"{len(runs)} runs", *dict.fromkeys(dates[:1] + dates[-1:]), *devices])


def _sections(paper: Paper, path: Path) -> list[Section]:
    done = read_done(path)
    comparisons = compare(select_cells(paper.key), done)
    tables = [_table_section(paper, cells, title) for title, cells in by_table(comparisons).items()]
    return [_claims_section(judge(paper, done)), *tables, _reading_section(paper, done, path)]


_STATES = {
    True: "confirmed by our runs", False: "contradicted by our runs", None: "open until more is run",
    "in words": "answered in words", "unknown": "not checked",
}  # fmt: skip


def _claims_section(judged: Sequence[JudgedClaim]) -> Section:
    found = Counter(map(_state, judged))
    counts = ", ".join(f"{found[state]} {text}" for state, text in _STATES.items() if found[state])
    answer = [
        f"Of {len(judged)} claims: {counts}.",
        "Means over seeds are compared. 'In every seed' counts the comparisons that are as claimed in each seed alone; "
        "a given one of two equal methods is ahead in all of three seeds in one of eight cases. A verdict on one seed "
        "may change with the next one.",
    ]
    failures = [[str(number), text] for number, one in enumerate(judged, 1) for text in failure_texts(one)]
    tables = [("Claims", _numbered(CLAIM_HEADINGS, [one.row() for one in judged]))]
    tables += [("Comparisons that are not as claimed", Table(["claim", "who is ahead"], failures))] if failures else []
    return Section("claims", "Which claims of the paper hold?", answer, (), tables)


def _state(one: JudgedClaim) -> bool | str | None:
    if one.ours is not None and one.ours.contests:
        return one.ours.holds
    return "in words" if one.claim.found else "unknown"


def _table_section(paper: Paper, cells: Sequence[CellResult], title: str) -> Section:
    table = cells[0].cell.table
    figure = paper_dots(cells)
    headings, rows = side_by_side(cells)
    command = [] if table.missing else [f"fedtailor paper run {paper.key} {table.id}"]
    return Section(
        table.id, title.partition(", ")[2], [*progress_lines(cells), f"Cells of the table: {SIDE_BY_SIDE_NOTE}."],
        [figure] if figure else [], [("Side by side", Table(headings, rows))], command,
    )  # fmt: skip


def _reading_section(paper: Paper, done: Results, path: Path) -> Section:
    """Return what a reader must know: our choices, printed numbers that look inconsistent, and how runs were made."""
    runs = Counter((run["device"], run["torch"], run["fedtailor"], run["date"]) for run in done.values())
    choices, suspects = [(c.what, c.why) for c in paper.choices], [(s.where, s.why, s.answer) for s in paper.suspects]
    tables = [
        ("Our choices where the paper is silent", _numbered(["choice", "why"], choices)),
        ("Printed numbers that look inconsistent", _numbered(["where", "why", "answer"], suspects)),
        ("Runs", Table(["device", "PyTorch", "FedTailor", "date", "runs"], [[*key, n] for key, n in runs.items()])),
    ]  # fmt: skip
    answer = [
        "No method was tuned here, also not the baselines that the paper leaves out: all have the settings that the "
        "paper or its code states, and default fields otherwise. The authors chose these settings for their method.",
        *failure_lines(path),
    ]
    return Section("reading", "What to know about these numbers", answer, (), tables, is_reference=True)


def _numbered(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of sentences; its first column is a number, because the page does not wrap the first column."""
    return Table(["", *columns], [[str(number), *row] for number, row in enumerate(rows, 1)])
