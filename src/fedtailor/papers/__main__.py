"""`python -m fedtailor.papers`: the same as `fedtailor paper`, on machines that have only torch and numpy."""

import argparse
import json
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

from fedtailor.errors import FedTailorError
from fedtailor.papers.cells import parse_words
from fedtailor.papers.claims import CLAIM_HEADINGS, claim_lines, judge
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
from fedtailor.papers.running import SEEDS, compare, default_results, read_done, run, select_cells
from fedtailor.tasks.choice import RUNNER_SETTINGS, choose_runner, fill_ray_address
from fedtailor.tasks.task import Runner
from fedtailor.training.signals import Interrupted


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = _parser().parse_args(fill_ray_address(sys.argv[1:] if words is None else words))
    try:
        if options.command == "list":
            _print_lines([line for paper in map(load_paper, PAPERS) for line in list_lines(paper)])
            return
        cells = select_cells(options.paper, options.table, options.only, options.override)
        path = options.results or default_results(options.paper)
        if options.command == "run":
            _print_lines(missing_lines(cells))
            count = run(
                options.paper, options.table, only=options.only, seeds=options.seeds, device=options.device,
                runner=_runner(options), seconds=options.seconds, results=path, override=options.override,
            )  # fmt: skip
            _print_lines([*failure_lines(path), f"{count} runs were added to {path}"])
            return
        done = read_done(path)
        comparisons, paper = compare(cells, done), load_paper(options.paper)
        tables = paper.select(options.table)
        judged = judge(paper, done, tables if options.table else None, options.override)
        if options.json:
            claims = [dict(zip(CLAIM_HEADINGS, one.row(), strict=True)) for one in judged]
            print(json.dumps({"rows": summarize(comparisons, done), "claims": claims}, indent=1, ensure_ascii=False))
        else:
            for title, own in by_table(comparisons).items():
                print(title)
                _print_rows([SHOW_HEADINGS, *show_rows(own)])
            _print_lines([*claim_lines(judged), *note_lines(paper, tables)])
    except FedTailorError as error:
        sys.exit(f"fedtailor: {error}")
    except KeyboardInterrupt as stop:
        print(f"{stop} To continue, run the same command again.".strip(), file=sys.stderr)
        sys.exit(stop.code if isinstance(stop, Interrupted) else 130)


def _runner(options: argparse.Namespace) -> Runner:
    return choose_runner(**{name: getattr(options, name) for name in RUNNER_SETTINGS})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fedtailor.papers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name all tables and what can be run")
    for name, text in (("run", "run what is missing of a table"), ("show", "print our results beside the paper's")):
        one = commands.add_parser(name, help=text)
        one.add_argument("paper", help=", ".join(PAPERS))
        one.add_argument("table", nargs="?", help="such as table-1; default: all")
        one.add_argument("--only", type=parse_words, default=(), help="words in a column, row, method, or data set")
        one.add_argument("--results", type=Path, help="file of results; default: results/papers/PAPER.jsonl")
        one.add_argument("--override", action="append", default=[], help="a setting such as rounds=2")
        if name == "show":
            one.add_argument("--json", action="store_true", help="print a JSON object per cell")
            continue
        one.add_argument("--seeds", type=lambda text: [*map(int, text.split(","))], default=SEEDS)
        one.add_argument("--device", default="auto")
        one.add_argument("--parallel", type=int, help="processes at once, also on one GPU")
        one.add_argument("--ray", metavar="[ADDRESS]", help="run on a Ray cluster; default: a local one")
        one.add_argument("--cpus-per-run", type=float, help="cores of each run at the same time")
        one.add_argument("--gpus-per-run", type=float, help="GPUs of each run at the same time, such as 0.5")
        one.add_argument("--seconds", type=float, default=inf, help="start no run after this time")
    return parser


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        print(line)


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
