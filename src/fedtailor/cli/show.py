"""The command show: results as tables, and in formats to paste."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedtailor.analysis.comparison_result import ROWS, ComparisonResult
from fedtailor.analysis.rows import Row, run_rows
from fedtailor.analysis.table_formats import to_csv, to_json, to_latex, to_markdown
from fedtailor.analysis.tables import run_table
from fedtailor.cli.output import err, out, print_line
from fedtailor.errors import ConfigError, unknown_name
from fedtailor.experiments.compare import load_comparison
from fedtailor.experiments.sweep import Plan, read_plan
from fedtailor.experiments.tuning import Outcome, compare_settings, make_outcome, sweep_rows, sweep_table, sweep_verdict
from fedtailor.runs.reader import is_finished, is_run_folder, load_run

_FORMATS = ("table", "latex", "markdown", "csv", "json")


def show(
    folder: Annotated[Path, typer.Argument(help="a run folder, or a folder of runs")],
    format: Annotated[str, typer.Option(help="table, latex, markdown, csv, or json")] = "table",
    target: Annotated[float | None, typer.Option(help="a score such as 0.9: show what it takes to reach it")] = None,
    per: Annotated[str, typer.Option(help=f"rows of csv: {', '.join(ROWS)}")] = "method",
) -> None:
    """Print the results of a run, a comparison, or a sweep, as a table or in a format to paste."""
    if format not in _FORMATS:
        raise unknown_name("format", format, _FORMATS)
    plan = None if is_run_folder(folder) else read_plan(folder)
    if per not in ROWS:
        raise unknown_name("kind of rows", per, ROWS)
    if per != "method" and format != "csv":
        raise ConfigError("--per applies only to --format csv.")
    for flag, is_given in (("target", target is not None), ("per", per != "method")):
        if is_given and (plan is not None or is_run_folder(folder)):
            raise ConfigError(f"--{flag} applies only to a comparison, a folder of runs.")
    if is_run_folder(folder):
        run = load_run(folder)
        _print(format, run_table(run), run_rows(run))
        return
    paths = sorted(path.parent for path in folder.glob("*/experiment.toml"))
    if plan is not None and any(is_finished(path) for path in paths):
        planned = [path for path in paths if path.name in plan.runs and is_finished(path)]
        show_sweep(plan, [make_outcome(load_run(path), plan.runs[path.name]) for path in planned], format)
    else:
        print_comparison(load_comparison(folder, target), format, per=per)
    unfinished = [path.name for path in paths if not is_finished(path)]
    if unfinished and plan is not None:
        err.print(f"Unfinished runs are not shown: {', '.join(unfinished)}.", markup=False, highlight=False)


def print_comparison(result: ComparisonResult, format: str = "table", brief: bool = False, per: str = "method") -> None:
    """Print a comparison; a `brief` one only with scores and costs. `per` selects the rows of CSV."""
    if format != "table":
        texts = {"latex": result.to_latex, "markdown": result.to_markdown, "json": result.to_json}
        print_line((result.to_csv(per=per) if format == "csv" else texts[format]()).rstrip())
        return
    for table in result.tables()[: 2 if brief else None]:
        out.print(table)
    out.print(f"\n{result.verdict()}\n", markup=False, highlight=False)


def show_sweep(plan: Plan, outcomes: list[Outcome], format: str = "table") -> None:
    """Print the results of a sweep."""
    found = compare_settings(plan.axes, outcomes, plan.moment)
    _print(format, sweep_table(found), sweep_rows(found), sweep_verdict(found))


def _print(format: str, table: Table, rows: list[Row], verdict: str = "") -> None:
    if format == "table":
        out.print(table)
        if verdict:
            out.print(verdict, markup=False, highlight=False)
    elif format in ("csv", "json"):
        more = {"verdict": verdict} if verdict else {}
        print_line((to_csv(rows) if format == "csv" else to_json(rows, **more)).rstrip())
    else:
        print_line(to_latex(table) if format == "latex" else to_markdown(table) + (f"\n\n{verdict}" if verdict else ""))
