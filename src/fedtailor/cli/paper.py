"""The command `fedtailor paper`: the tables of papers, repeated."""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Annotated

import typer
from click import Context
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from fedtailor.analysis.table_formats import to_csv, to_json, to_latex, to_markdown
from fedtailor.analysis.tables import new_table
from fedtailor.cli.console import print_on_interrupt
from fedtailor.cli.output import err, out, print_line
from fedtailor.errors import ConfigError, unknown_name
from fedtailor.papers.cells import parse_words
from fedtailor.papers.claims import CLAIM_HEADINGS, JudgedClaim, claim_lines, judge
from fedtailor.papers.definition import PAPERS, load_paper
from fedtailor.papers.overview import (
    SHOW_HEADINGS,
    SIDE_BY_SIDE_NOTE,
    by_table,
    cell_rows,
    failure_lines,
    list_lines,
    missing_lines,
    note_lines,
    show_rows,
    side_by_side,
    summarize,
)
from fedtailor.papers.running import CellResult, compare, default_results, read_done, select_cells
from fedtailor.papers.running import run as run_cells
from fedtailor.tasks.choice import choose_runner, fill_ray_address

paper = typer.Typer(help="Repeat the tables of papers.", no_args_is_help=True)
_Paper = Annotated[str, typer.Argument(help=f"one of {', '.join(PAPERS)}")]
_Table = Annotated[str | None, typer.Argument(help="such as table-1; default: all tables of the paper")]
_Only = Annotated[str, typer.Option(help="words in a column, row, method, or data set: WORD,WORD")]
_Results = Annotated[Path | None, typer.Option(help="file of results; default: results/papers/PAPER.jsonl")]
_FORMATS = ("table", "latex", "markdown", "csv", "json")
_Override = Annotated[list[str] | None, typer.Option(help="a setting of all runs, such as rounds=2")]


@paper.command("list")
def list_tables() -> None:
    """List the tables, and what of each can be run with the data at hand."""
    for one in map(load_paper, PAPERS):
        print_line("\n".join(list_lines(one)))


class _RunCommand(TyperCommand):
    """A command whose flag --ray may have no value."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, fill_ray_address(args))


@paper.command(cls=_RunCommand)
def run(
    name: _Paper,
    table: _Table = None,
    only: _Only = "",
    seeds: Annotated[str, typer.Option(help="seeds, separated by commas")] = "0,1,2",
    device: Annotated[str, typer.Option(help="auto, cpu, or cuda")] = "auto",
    parallel: Annotated[int | None, typer.Option(help="processes at once, also on one GPU")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="[ADDRESS]", help="run on a Ray cluster; default: a local one")
    ] = None,
    cpus_per_run: Annotated[float | None, typer.Option(help="cores of each run at the same time")] = None,
    gpus_per_run: Annotated[float | None, typer.Option(help="GPUs of each run at the same time, such as 0.5")] = None,
    seconds: Annotated[float, typer.Option(help="start no run after this time")] = inf,
    results: _Results = None,
    override: _Override = None,
) -> None:
    """Run what is missing of a table; each finished run is one line of the file of results.

    fedtailor paper run fedapa table-1 --only cifar10 --device cuda --parallel 8
    """
    path, words = results or default_results(name), parse_words(only)
    for line in missing_lines(select_cells(name, table, words, override or [])):
        err.print(line, markup=False, soft_wrap=True)
    runner = choose_runner(parallel, ray, cpus_per_run, gpus_per_run)
    with print_on_interrupt("To continue, run the same command again."):
        count = run_cells(
            name, table, only=words, seeds=_numbers(seeds), device=device, runner=runner, seconds=seconds,
            results=path, override=override or [],
        )  # fmt: skip
    for line in failure_lines(path):
        err.print(line, markup=False, soft_wrap=True)
    print_line(f"{count} runs were added to {path}")


@paper.command()
def show(
    name: _Paper,
    table: _Table = None,
    only: _Only = "",
    results: _Results = None,
    override: _Override = None,
    format: Annotated[str, typer.Option(help="table, latex, markdown, csv, or json")] = "table",
) -> None:
    """Print the paper's value, ours (mean ± standard deviation), their difference, and which claims hold.

    It is within the spread if it is at most twice the standard deviation of a difference of single runs.
    LaTeX and Markdown have the shape of the paper's tables; the other formats have one row per cell.
    """
    if format not in _FORMATS:
        raise unknown_name("format", format, _FORMATS)
    found, done = load_paper(name), read_done(results or default_results(name))
    comparisons = compare(select_cells(name, table, parse_words(only), override or []), done)
    judged = judge(found, done, None if table is None else found.select(table), override or [])
    if format == "csv":
        print_line(to_csv(cell_rows(comparisons)).rstrip())
    elif format == "json":
        claims = [dict(zip(CLAIM_HEADINGS, one.row(), strict=True)) for one in judged]
        print_line(to_json(summarize(comparisons, done), claims=claims))
    elif format == "table":
        out.print(*(_cells_table(title, cells) for title, cells in by_table(comparisons).items()), sep="\n")
        print_line("\n".join([*claim_lines(judged), *note_lines(found, found.select(table))]))
    else:
        tables = [side_by_side_table(title, cells) for title, cells in by_table(comparisons).items()]
        tables += [claims_table(judged)] if judged else []
        print_line("\n\n".join(map(to_latex if format == "latex" else to_markdown, tables)))


def side_by_side_table(title: str, cells: Sequence[CellResult]) -> Table:
    """Return a table in the shape of the paper's, with the paper's values and ours."""
    headings, rows = side_by_side(cells)
    shown = new_table(title, headings, left=1)
    for row in rows:
        shown.add_row(*row)
    shown.caption = f"{SIDE_BY_SIDE_NOTE}."
    return shown


def claims_table(judged: Sequence[JudgedClaim]) -> Table:
    """Return the claims and their verdicts as a table."""
    shown = new_table("", CLAIM_HEADINGS, left=len(CLAIM_HEADINGS))
    for one in judged:
        shown.add_row(*one.row())
    return shown


def _cells_table(title: str, cells: Sequence[CellResult]) -> Table:
    shown = new_table(title, SHOW_HEADINGS, left=2)
    for row in show_rows(cells):
        shown.add_row(*map(escape, row))
    return shown


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError as error:
        raise ConfigError(f"--seeds must be integers such as 0,1,2, got '{text}'.") from error
