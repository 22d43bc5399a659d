"""A comparison as HTML: its tables, as in the terminal, and its verdict."""

from fedtailor.analysis.comparison_result import ComparisonResult
from fedtailor.reporting.notebook.markup import block
from fedtailor.reporting.notebook.run import rich_table_html


def comparison_html(result: ComparisonResult) -> str:
    """Return the tables, the verdict, and what failed."""
    tables = [block(str(t.title or ""), rich_table_html(t), note=str(t.caption or "")) for t in result.tables()]
    return "".join([*tables, block("Verdict", note=result.verdict())])
