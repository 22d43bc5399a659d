"""`ComparisonResult`: what `ft.compare` returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from fedtailor.analysis.comparison_tables import (
    best_cells,
    client_table,
    cost_table,
    generalization_table,
    metric_table,
    score_table,
    train_and_global_table,
)
from fedtailor.analysis.formatting import ScoreFormat, count_of
from fedtailor.analysis.gain_sentences import gain_sentences
from fedtailor.analysis.rows import client_mean_rows, client_rows, method_rows, seed_rows
from fedtailor.analysis.run_summary import Comparison, compare_runs
from fedtailor.analysis.table_formats import to_csv, to_json, to_latex, to_markdown, to_text
from fedtailor.analysis.verdict import verdict_sentences
from fedtailor.errors import ConfigError, unknown_name
from fedtailor.runs.dataframes import to_frame
from fedtailor.runs.files import write_atomic, write_errors
from fedtailor.runs.run import Run

if TYPE_CHECKING:
    import pandas as pd

ROWS = {"method": method_rows, "seed": seed_rows, "client": client_rows, "client_mean": client_mean_rows}


@dataclass(frozen=True, eq=False, repr=False)
class ComparisonResult:
    """Runs of several methods on the same data, and what they say: tables, a verdict, figures, and a report.

    `ft.compare` returns it; `ft.ComparisonResult([run, other])` makes one from runs that differ only in method and
    seed. With a `target` score, tables and rows include what each method needs to reach it.

    >>> import fedtailor as ft
    >>> result = ft.compare(["fedavg"], "logistic", ft.load("digits", clients=4), rounds=2)
    >>> result.to_csv().splitlines()[0][:27]
    'method,is_reference,ranked_'
    """

    runs: Sequence[Run]
    failures: Mapping[str, str] = field(default_factory=dict)  # run -> error message
    target: float | None = None
    folder: Path | None = None  # with one folder per run

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("A comparison needs at least one run.")
        if self.target is not None:
            check_target(self.target, self.runs[0].info["score"])

    @cached_property
    def group(self) -> Comparison:
        """The runs by method, the best method first."""
        return compare_runs(self.runs)

    def tables(self) -> list[Table]:
        """Return the tables for a rich console: scores, costs, other metrics, and, if they were evaluated, scores on a
        common test set, of held-out clients, on training samples, and of the global model; with redrawn splits, also
        the clients with their intervals."""
        tables = [score_table(self.group), cost_table(self.group, self.target), metric_table(self.group)]
        others = [generalization_table(self.group), train_and_global_table(self.group), client_table(self.group)]
        return [*tables, *(table for table in others if table is not None)]

    def table(self, width: int = 100) -> str:
        """Return the tables as text, to print."""
        return "\n\n".join([*(to_text(table, width) for table in self.tables()), *self._failures()])

    def verdict(self) -> str:
        """Return in words which method is best, whether that is more than chance, and which clients gain: a paragraph
        each, with redrawn splits the clients first."""
        found = [verdict_sentences(self.group), gain_sentences(self.group)]
        paragraphs = [*(reversed(found) if self.group.is_repeated else found), self._failures()]
        return "\n\n".join(" ".join(sentences) for sentences in paragraphs if sentences)

    def _failures(self) -> list[str]:
        return [f"{name} is missing: {why}" for name, why in self.failures.items()]

    def rows(self, per: str = "method") -> list[dict[str, Any]]:
        """Return plain rows per "method", per "seed" (and method), per "client" (and method and seed), or per
        "client_mean" (client and method, with intervals over redrawn splits).

        Scores are fractions, sizes are bytes, and times are seconds.
        """
        if per not in ROWS:
            raise unknown_name("kind of rows", per, ROWS)
        return method_rows(self.group, self.target) if per == "method" else ROWS[per](self.group)

    def to_pandas(self, per: str = "method") -> "pd.DataFrame":
        """Return the `rows` as a pandas DataFrame."""
        return to_frame(self.rows(per))

    def to_csv(self, path: str | Path | None = None, per: str = "method") -> str:
        """Return the `rows` as CSV, and write them to a file if a path is given."""
        return _write(to_csv(self.rows(per)), path)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the rows per method, those per client with intervals if there are redrawn splits, and the verdict as
        JSON, and write them to a file if a path is given."""
        clients = {"clients": self.rows("client_mean")} if self.group.is_repeated else {}
        return _write(to_json(self.rows(), **clients, verdict=self.verdict(), failures=dict(self.failures)), path)

    def to_latex(self, path: str | Path | None = None) -> str:
        """Return the tables in LaTeX, and write them to a file if a path is given.

        The best score, and scores that are not significantly worse, are bold.
        """
        return _write("\n\n".join(to_latex(table, bold) for table, bold in self._marked_tables()), path)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """Return the tables and the verdict in Markdown, and write them to a file if a path is given."""
        tables = [to_markdown(table, bold) for table, bold in self._marked_tables()]
        return _write("\n\n".join([*tables, self.verdict()]), path)

    def plot(self, what: str = "curves", **choices: str) -> Any:
        """Return a figure of the report as a plotly figure, which notebooks show: by default, the learning curves.

        Other figures are "ranking", "gains", "bytes", and so on. Keywords select options of a figure's controls, such
        as `axis="bytes"`.
        """
        from fedtailor.reporting.plotting import plot_comparison

        return plot_comparison(self.group, what, **choices)

    def report(self, path: str | Path) -> str:
        """Write the HTML report and return its main finding."""
        from fedtailor.reporting.report import write_report

        return write_report(self.runs, Path(path))

    def _marked_tables(self) -> list[tuple[Table, set[tuple[int, int]]]]:
        first, *others = self.tables()
        note = " Bold: the best score, and scores that are not significantly worse."
        first.caption = f"{first.caption}{note}"
        return [(first, best_cells(self.group)), *((table, set()) for table in others)]

    def __repr__(self) -> str:
        counts = [count_of(len(self.group.ranked), "method"), count_of(len(self.group.seeds), self.group.unit)]
        best = [f"best: {self.group.ranking.best}"] if self.group.ranking is not None else []
        missing = [f"{count_of(len(self.failures), 'run')} missing"] if self.failures else []
        return f"ComparisonResult({', '.join([*counts, *best, *missing])})"

    def _repr_html_(self) -> str:
        from fedtailor.reporting.notebook.comparison import comparison_html

        return comparison_html(self)


def check_target(target: float, score: str) -> None:
    """Raise an error if a score can never reach the target.

    >>> check_target(90, "accuracy")
    Traceback (most recent call last):
    fedtailor.errors.ConfigError: target must be a fraction such as 0.9 (90 %), got 90.
    """
    if ScoreFormat(score).unit and not 0 < target <= 1:
        raise ConfigError(f"target must be a fraction such as 0.9 (90 %), got {target}.")


def _write(text: str, path: str | Path | None) -> str:
    """Return the text; write it to a file if a path is given."""
    if path is not None:
        with write_errors(f"'{path}' cannot be written"):
            write_atomic(Path(path), f"{text.rstrip()}\n".encode())
    return text
