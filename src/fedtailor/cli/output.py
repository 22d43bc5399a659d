"""The terminal: standard output, standard error, and lines of plain text."""

from rich.console import Console

out, err = Console(), Console(stderr=True)


def print_line(text: str) -> None:
    """Print text without markup, colors, or line breaks, so that paths can be copied."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)
