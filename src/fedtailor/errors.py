"""The one way in which FedTailor says no."""

from collections.abc import Iterable
from difflib import get_close_matches


class Refused(ValueError):
    """A request that cannot be served; its text is one sentence that says what to do instead."""


def unknown(kind: str, name: str, known: Iterable[str]) -> Refused:
    """A refusal of a name that does not exist, with the nearest one that does.

    >>> str(unknown("method", "fedavgg", ["fedavg", "ditto"]))
    "There is no method 'fedavgg'; did you mean 'fedavg'?"
    """
    names = list(known)
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names) or 'none'}."
    return Refused(f"There is no {kind} '{name}'; {hint}")
