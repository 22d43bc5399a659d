"""The command `fedtailor paper`: the tables of papers, repeated."""

import json
from math import inf
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedtailor.analysis.table_formats import to_markdown
from fedtailor.analysis.tables import new_table
from fedtailor.cli.console import err, out, print_line
from fedtailor.errors import ConfigError, unknown_name
from fedtailor.papers.definition import PAPERS, load_paper
from fedtailor.papers.overview import (
    SHOW_HEADINGS,
    by_table,
    failure_lines,
    list_lines,
    missing_lines,
    note_lines,
    show_rows,
    summarize,
)
from fedtailor.papers.running import compare, default_results, read_done, select_cells
from fedtailor.papers.running import run as run_cells

paper = typer.Typer(help="Repeat the tables of papers.", no_args_is_help=True)
_Paper = Annotated[str, typer.Argument(help=f"one of {', '.join(PAPERS)}")]
_Table = Annotated[str | None, typer.Argument(help="such as table-1; default: all tables of the paper")]
_Only = Annotated[str, typer.Option(help="words in a column, row, method, or data set, separated by commas")]
_Results = Annotated[Path | None, typer.Option(help="file of results; default: results/papers/PAPER.jsonl")]
_Override = Annotated[list[str] | None, typer.Option(help="a setting of all runs, such as rounds=2")]


@paper.command("list")
def list_tables() -> None:
    """List the tables, and what of each can be run with the data at hand."""
    for one in map(load_paper, PAPERS):
        print_line("\n".join(list_lines(one)))


@paper.command()
def run(
    name: _Paper,
    table: _Table = None,
    only: _Only = "",
    seeds: Annotated[str, typer.Option(help="seeds, separated by commas")] = "0,1,2",
    device: Annotated[str, typer.Option(help="auto, cpu, or cuda")] = "auto",
    workers: Annotated[int, typer.Option(min=1, help="processes, also on one GPU")] = 1,
    seconds: Annotated[float, typer.Option(help="start no run after this time")] = inf,
    results: _Results = None,
    override: _Override = None,
) -> None:
    """Run what is missing of a table; each finished run is one line of the file of results.

    fedtailor paper run fedapa table-1 --only cifar10 --device cuda --workers 8
    """
    path, words = results or default_results(name), _words(only)
    for line in missing_lines(select_cells(name, table, words, override or [])):
        err.print(line, markup=False, soft_wrap=True)
    count = run_cells(
        name, table, only=words, seeds=_numbers(seeds), device=device, workers=workers, seconds=seconds,
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
    format: Annotated[str, typer.Option(help="table, markdown, or json")] = "table",
) -> None:
    """Print the paper's value, ours (mean ± standard deviation), and their difference.

    It is within the spread if it is at most twice the standard deviation of a difference of single runs.
    """
    if format not in (formats := ("table", "markdown", "json")):
        raise unknown_name("format", format, formats)
    done = read_done(results or default_results(name))
    comparisons = compare(select_cells(name, table, _words(only), override or []), done)
    if format == "json":
        typer.echo(json.dumps(summarize(comparisons, done), indent=1))
        return
    found, shown = load_paper(name), []
    for title, own in by_table(comparisons).items():
        shown.append(new_table(title, list(SHOW_HEADINGS), left=2))
        for row in show_rows(own):
            shown[-1].add_row(*map(escape, row))
    if format == "markdown":
        typer.echo("\n\n".join(map(to_markdown, shown)))
    else:
        out.print(*shown, sep="\n")
        print_line("\n".join(note_lines(found, found.select(table))))


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError as error:
        raise ConfigError(f"--seeds must be integers such as 0,1,2, got '{text}'.") from error
