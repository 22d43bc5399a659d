"""The one way in which FedTailor says no."""

from collections.abc import Iterable
from difflib import get_close_matches
from unicodedata import category


class Refused(ValueError):
    """A request that cannot be served; its text is one sentence that says what to do instead.

    It may repeat a name from a file of whoever's hands, so codes that a terminal would obey are spelled out.

    >>> str(Refused(f"There is no field '{chr(27)}[2J'.")) == "There is no field '" + chr(92) + "x1b[2J'."
    True
    """

    def __init__(self, sentence: str = "") -> None:
        super().__init__("".join(c if category(c) not in ("Cc", "Cs") else repr(c)[1:-1] for c in sentence))


def unknown(kind: str, name: str, known: Iterable[str]) -> Refused:
    """A refusal of a name that does not exist, with the nearest one that does.

    >>> str(unknown("method", "fedavgg", ["fedavg", "ditto"]))
    "There is no method 'fedavgg'; did you mean 'fedavg'?"
    """
    names = list(known)
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names) or 'none'}."
    return Refused(f"There is no {kind} '{name}'; {hint}")
