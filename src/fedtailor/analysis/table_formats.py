"""Write tables as text, Markdown, and LaTeX, and rows as CSV and JSON."""

import csv
import io
import json
from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fedtailor.runs.records import nan_to_none

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", ">": "$>$", "<": "$<$", "–": "--",
    "×": r"$\times$", "ε": r"$\varepsilon$", "μ": r"$\mu$", "†": r"$\dagger$", "≠": r"$\neq$",
}  # fmt: skip
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def to_text(table: Table, width: int = 100) -> str:
    """Return a table as plain text.

    >>> table = Table("method", "score")
    >>> table.add_row("FedAvg", "90.0")
    >>> "FedAvg" in to_text(table)
    True
    """
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False, force_jupyter=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def to_markdown(table: Table, bold: Collection[tuple[int, int]] = ()) -> str:
    """Return a table in Markdown, with its title and caption; `bold` lists (row, column) pairs.

    >>> table = Table("method", "score")
    >>> table.add_row("FedAvg", "90.0")
    >>> print(to_markdown(table, bold=[(0, 1)]))
    | method | score |
    |---|---|
    | FedAvg | **90.0** |
    """
    headings, rows = _cells(table)
    marked = [
        [f"**{_markdown(cell)}**" if (r, c) in bold and cell else _markdown(cell) for c, cell in enumerate(row)]
        for r, row in enumerate(rows)
    ]
    rule = ["---:" if column.justify == "right" else "---" for column in table.columns]
    lines = [f"| {' | '.join(map(_markdown, headings))} |", f"|{'|'.join(rule)}|"]
    lines += [f"| {' | '.join(row)} |" for row in marked]
    before, after = ([_markdown(_text(text))] if text else [] for text in (table.title, table.caption))
    return "\n\n".join([*before, "\n".join(lines), *after])


def to_latex(table: Table, bold: Collection[tuple[int, int]] = ()) -> str:
    """Return a table as a LaTeX tabular with booktabs rules; title and caption are comments.

    >>> table = Table("method", "score, %")
    >>> table.add_row("FedAvg", "90.0 ± 0.1")
    >>> print(to_latex(table))
    % requires \\usepackage{booktabs}
    \\begin{tabular}{ll}
    \\toprule
    method & score, \\% \\\\
    \\midrule
    FedAvg & 90.0 $\\pm$ 0.1 \\\\
    \\bottomrule
    \\end{tabular}
    """
    headings, rows = _cells(table)
    marked = [
        [rf"\textbf{{{_latex(cell)}}}" if (r, c) in bold and cell else _latex(cell) for c, cell in enumerate(row)]
        for r, row in enumerate(rows)
    ]
    kinds = "".join("r" if column.justify == "right" else "l" for column in table.columns)
    notes = [f"% {line}" for text in (table.title, table.caption) for line in _text(text).splitlines()]
    lines = [*notes, r"% requires \usepackage{booktabs}", rf"\begin{{tabular}}{{{kinds}}}", r"\toprule"]
    lines += [rf"{' & '.join(map(_latex, headings))} \\", r"\midrule"]
    for row, cells in enumerate(marked):
        lines.append(rf"{' & '.join(cells)} \\")
        lines += [r"\midrule"] if table.rows[row].end_section and row < len(rows) - 1 else []
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as CSV; a row may lack columns. Text that a spreadsheet would execute is escaped.

    >>> to_csv([{"method": "=1+1", "score": 0.5}, {"method": "b", "loss": 2.0}])
    "method,score,loss\\n'=1+1,0.5,\\nb,,2.0\\n"
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: escape_formula(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def to_json(rows: Sequence[dict[str, Any]], **more: Any) -> str:
    """Return rows, and more entries, as a JSON object; values that are not finite become null.

    >>> to_json([{"score": float("nan")}], verdict="None.")
    '{\\n "rows": [\\n  {\\n   "score": null\\n  }\\n ],\\n "verdict": "None."\\n}'
    """
    return json.dumps(nan_to_none({"rows": list(rows)} | more), indent=1, ensure_ascii=False, allow_nan=False)


def escape_formula(value: Any) -> Any:
    """Escape text that a spreadsheet would execute as a formula; names of clients, images, and classes are untrusted.

    >>> escape_formula("=1+1"), escape_formula(-1)
    ("'=1+1", -1)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


def _cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of a table as text on one line each."""
    headings = [" ".join(_text(column.header).split()) for column in table.columns]
    columns = [[" ".join(_text(cell).split()) for cell in column.cells] for column in table.columns]
    return headings, [list(row) for row in zip(*columns, strict=True)]


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def _latex(text: str) -> str:
    return "".join(_LATEX.get(char, char) for char in text)
