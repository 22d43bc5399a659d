"""Catalog of all methods, generated from the registry: paper, communication, client state, and late-joining clients."""

import sys
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from fedtailor.core.method import Method
from fedtailor.methods import FAMILIES

_INTRODUCTION = """# All methods

This page is generated from the registry with `python -m fedtailor.methods.catalog > docs/methods/index.md`.
The columns:

- *name*: the name of the method on the command line and in experiment files. `fedtailor list methods NAME` shows its
  fields and the choices made where its paper is unclear.
- *download* and *upload*: what a client receives and sends in each round.
- *client state*: what a client stores between rounds.
- *late-joining clients start with*: what a client that joins late receives and starts with. The initial model is the
  one with which all clients start.
- *personalized*: whether clients end with different models.
- *global model*: whether all clients also receive one whole model, which `evaluate_global` evaluates.

"""

_COLUMNS = [
    "method", "name", "paper", "download", "upload", "client state", "late-joining clients start with",
    "personalized", "global model",
]  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """Catalog entry of one method."""

    display_name: str  # proper name for tables and text, such as "Self-FL"
    family: str
    paper: str  # citation; for a method without a paper, its description
    download: str  # what the server sends to a client in a round
    upload: str  # what the client sends to the server
    client_state: str  # what the client stores between rounds
    newcomer_start: str  # what a client that joins late receives and starts with
    personal: bool
    has_global_model: bool


def make_entry(method: type[Method], family: str) -> Entry:
    """Create the entry of a method."""
    texts = {name: getattr(method, name) for name in ("download", "upload", "client_state", "newcomer_start")}
    has_global_model = method.sends_global_model or not method.personal
    described = method.class_title(), family, method.citation()
    return Entry(*described, **texts, personal=method.personal, has_global_model=has_global_model)


def as_markdown(pages: Container[str]) -> str:
    """Return the page of all methods as Markdown: one table, grouped by family. Methods in `pages` are links."""
    rows, family = [_COLUMNS, ["---"] * len(_COLUMNS)], ""
    for name, entry in catalog().items():
        if entry.family != family:
            family = entry.family
            rows.append([f"**{family}**", *[""] * (len(_COLUMNS) - 1)])
        method = f"[{entry.display_name}]({name}.md)" if name in pages else entry.display_name
        columns = [entry.paper, entry.download, entry.upload, entry.client_state, entry.newcomer_start]
        rows.append(
            [
                method,
                f"`{name}`",
                *columns,
                *("yes" if has else "no" for has in (entry.personal, entry.has_global_model)),
            ]
        )
    return _INTRODUCTION + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def catalog() -> dict[str, Entry]:
    """Return the entries of all methods by name, grouped by family.

    >>> catalog()["fedprox"].paper
    'Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020'
    """
    return {
        method.__name__.lower(): make_entry(method, family)
        for family, methods in FAMILIES.items()
        for method in methods
    }


if __name__ == "__main__":
    sys.stdout.write(as_markdown({path.stem for path in Path("docs/methods").glob("*.md")}))
