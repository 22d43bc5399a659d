"""What there is to say of every method, made from the registry: whose it is, what crosses, what stays, how to join."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from fedtailor.method import Method
from fedtailor.methods import FAMILIES

_CITATION = re.compile(
    r'(?P<authors>[^"]+), "(?P<title>[^"]+)", (?P<venue>[^\d.;:,]*[^\d.;:, ])(?: (?P<year>\d{4}))?[.;:,]'
)

_INTRODUCTION = """# All methods

Made from the registry: `python -m fedtailor.catalogue > docs/methods/index.md`. *down* and *up* are what crosses to a
client and from it in a round, *stays* is what it keeps from round to round. *newcomer gets* is what a client that joins
late is sent and begins with; the start is everyone's model before round 1. `fedtailor list methods NAME` shows a
method's fields and what was decided where its paper is silent.

| method | paper | venue | year | down | up | stays | newcomer gets | personal |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Entry:
    """One method."""

    family: str
    authors: str
    title: str
    venue: str
    year: str
    down: str  # what crosses to a client in a round
    up: str  # what crosses from it
    keeps: str  # what stays with it
    newcomer: str  # what a client that joins late gets and begins with
    personal: bool

    @property
    def paper(self) -> str:
        """The citation in one line; a method without a paper has its own sentence here."""
        where = f"{self.venue} {self.year}".strip()
        return f'{self.authors}, "{self.title}", {where}' if self.authors else self.title


def entry_of(method: type[Method], family: str) -> Entry:
    """A method's entry; its citation is the beginning of its docstring: Authors, "Title", Venue Year."""
    text = " ".join((method.__doc__ or "").split("\n\n")[0].split())
    found = _CITATION.match(text)
    cited = found.groupdict("") if found else {"authors": "", "title": text, "venue": "", "year": ""}
    told = {name: getattr(method, name) for name in ("down", "up", "keeps", "newcomer")}
    return Entry(family=family, **cited, **told, personal=method.personal)


def as_markdown() -> str:
    """The page of all methods: one table, grouped by what is shared."""
    rows, family = [], ""
    for name, entry in catalogue().items():
        if entry.family != family:
            family = entry.family
            rows.append([f"**{family}**", *[""] * 8])
        page = Path("docs/methods") / f"{name}.md"
        shown, paper = f"[{name}]({page.name})" if page.is_file() else name, f"{entry.authors}: {entry.title}"
        told = [entry.venue, entry.year, entry.down, entry.up, entry.keeps, entry.newcomer]
        rows.append([shown, paper.removeprefix(": "), *told, "yes" if entry.personal else "no"])
    return _INTRODUCTION + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def catalogue() -> dict[str, Entry]:
    """Every method by name, family by family.

    >>> catalogue()["fedavg"].venue, catalogue()["fedavg"].year
    ('AISTATS', '2017')
    """
    return {
        method.__name__.lower(): entry_of(method, family) for family, methods in FAMILIES.items() for method in methods
    }


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
