"""What lies in a folder, from whoever's hands: nothing outside it is read."""

from collections.abc import Callable
from pathlib import Path

from fedtailor.errors import Refused
from fedtailor.untrusted import is_printable


def inside(folder: Path, pattern: str, kind: Callable[[Path], bool], root: Path) -> list[Path]:
    """What matches a pattern in a folder and is of a kind, in order, without what editors and systems leave behind
    (.ipynb_checkpoints/, ._x.png). A link that leads out of the root is refused, as is a name that disturbs a screen.

    >>> inside(Path("nowhere"), "*.npz", Path.is_file, root=Path("nowhere"))
    []
    """
    found = sorted(folder.glob(pattern))
    seen = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    chosen = [path for path in seen if kind(path)]
    for path in chosen:
        check_entry(path, root)
    return chosen


def check_entry(path: Path, root: Path) -> None:
    """Refuse an entry of a folder that leads out of the root, or cannot be printed."""
    # no pattern follows a link to a folder, so what is no link itself lies where it was found
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        raise Refused(f"{path.name!r} is a link that leads out of '{root}'; put the data itself there.")
    if not is_printable(path.name):
        raise Refused(f"The name {path.name!r} in '{root}' has letters that cannot be printed; rename it.")
