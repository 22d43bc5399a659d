"""Write the verdicts, tables, and pictures of docs/papers/*.md from the papers' definitions and results/papers:
`make papers`, or some of them by name: `python docs/paper_pages.py fedapa`. Text outside of the marks is kept."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fedtailor.analysis.table_formats import to_markdown
from fedtailor.cli.paper import claims_table, side_by_side_table
from fedtailor.papers.claims import failure_texts, judge
from fedtailor.papers.definition import PAPERS, Paper, load_paper
from fedtailor.papers.overview import SIDE_BY_SIDE_NOTE, by_table, progress_lines
from fedtailor.papers.running import CellResult, Results, compare, default_results, read_done, select_cells
from fedtailor.reporting.figure_files import save_figures
from fedtailor.reporting.figures.figure import Figure
from fedtailor.reporting.figures.paper_dots import paper_dots
from fedtailor.reporting.page import Chapter, Page, Section

ROOT = Path(__file__).parent.parent
START, END = "<!-- written by make papers -->", "<!-- end of what make papers writes -->"
MAX_BYTES = 200_000  # of a picture


def write_page(key: str) -> None:
    """Replace the marked part of a paper's page."""
    page = ROOT / "docs" / "papers" / f"{key}.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    paper = load_paper(key)
    done = read_done(ROOT / default_results(key))
    comparisons = compare(select_cells(key), done)
    figures = draw(key, comparisons)
    parts = [*claims_part(paper, done), *tables_part(key, comparisons, figures), *notes_part(paper)]
    page.write_text(before + "\n\n".join([START, *parts, END]) + after, encoding="utf-8")
    print(f"{page.relative_to(ROOT)}: {len(figures)} pictures")


def draw(key: str, comparisons: Sequence[CellResult]) -> dict[str, Figure]:
    """Save a picture of each table that has results, and return the figures by the tables' ids."""
    drawn = [paper_dots(cells) for cells in by_table(comparisons).values() if any(one.scores for one in cells)]
    figures = [figure for figure in drawn if figure is not None]
    if figures:
        page = Page("", "", [Chapter("", [Section("tables", "", [], figures)])])
        for path in save_figures(page, ROOT / "docs" / "papers" / key, ["svg"]):
            if path.stat().st_size > MAX_BYTES:
                print(f"{path.relative_to(ROOT)} has {path.stat().st_size} bytes, more than {MAX_BYTES}")
    return {figure.key: figure for figure in figures}


def claims_part(paper: Paper, done: Results) -> list[str]:
    """Return the claims with their verdicts, and who is ahead where a claim does not hold."""
    judged = judge(paper, done)
    failures = [f"- {text}" for one in judged for text in failure_texts(one)]
    failed = ["Comparisons that are not as claimed:", "\n".join(dict.fromkeys(failures))] if failures else []
    return ["## Verdicts", to_markdown(claims_table(judged)), *failed]


def tables_part(key: str, comparisons: Sequence[CellResult], figures: dict[str, Figure]) -> list[str]:
    """Return all tables side by side."""
    parts = ["## Tables", f"Cells: {SIDE_BY_SIDE_NOTE}."]
    for title, cells in by_table(comparisons).items():
        table = cells[0].cell.table
        shown = side_by_side_table("", cells)
        shown.caption = None
        parts += [f"### {title.partition(', ')[2]}", f"{table.metric}. {' '.join(progress_lines(cells))}"]
        if table.id in figures:
            parts.append(f"![{figures[table.id].summary}]({key}/{table.id}.svg)")
        parts += [to_markdown(shown)]
    return parts


def notes_part(paper: Paper) -> list[str]:
    """Return our choices, and printed numbers that look inconsistent."""
    choices = "\n".join(f"- {one.what}: {one.why}" for one in paper.choices)
    suspects = "\n".join(
        f"- {one.where}: {one.why}" + (f". **Answer:** {one.answer}" if one.answer else "") for one in paper.suspects
    )
    return ["## Our choices where the paper is silent", choices, "## Printed numbers that look inconsistent", suspects]


def main(names: list[str]) -> None:
    os.environ["FEDTAILOR_CACHE"] = os.devnull  # pages must not depend on what is cached here
    for key in names or PAPERS:
        write_page(key)


if __name__ == "__main__":
    main(sys.argv[1:])
