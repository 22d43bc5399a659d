"""Entries of an untrusted folder; nothing outside of the folder is read."""

from collections.abc import Callable
from pathlib import Path

from fedtailor.core.untrusted_input import is_printable
from fedtailor.errors import DataError


def list_entries(folder: Path, pattern: str, kind: Callable[[Path], bool], root: Path) -> list[Path]:
    """Return the sorted entries of a folder that match a pattern and for which `kind` returns true.

    Hidden entries are skipped (.ipynb_checkpoints/, ._x.png). A link that leaves the root and a name that cannot be
    printed raise `DataError`.

    >>> list_entries(Path("nowhere"), "*.npz", Path.is_file, root=Path("nowhere"))
    []
    """
    found = sorted(folder.glob(pattern))
    visible = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    chosen = [path for path in visible if kind(path)]
    for path in chosen:
        check_entry(path, root)
    return chosen


def check_entry(path: Path, root: Path) -> None:
    """Raise `DataError` for an entry that is a link out of the root, or whose name cannot be printed."""
    # glob follows no links to folders, so an entry that is not a link is inside the root
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{path.name!r} is a link that leads out of '{root}'; replace it with the data.")
    if not is_printable(path.name):
        raise DataError(f"The name {path.name!r} in '{root}' has unprintable characters; rename it.")
