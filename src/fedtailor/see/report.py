"""The report: which questions are answered in which order, in one file."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.errors import Refused
from fedtailor.files import write, writing
from fedtailor.reading import find, firsts
from fedtailor.run import Run
from fedtailor.scale import counted
from fedtailor.see import clients, cost, curves, gains, ranking, split, verdict
from fedtailor.see.digest import Group, groups
from fedtailor.see.figure import Figure, Table
from fedtailor.see.monitors import monitors
from fedtailor.see.neighbours import neighbours, shares
from fedtailor.see.page import MARK, Chapter, Page, Section, html
from fedtailor.see.repeat import commands, sweep_command
from fedtailor.see.surface import surface
from fedtailor.see.swept import Swept, names, sweeps
from fedtailor.toml import flat

_MOST_GROUPS = 8  # experiments that get a chapter each
_LONGEST = 2_000  # letters of a setting; schedules can be long


def report(runs: Sequence[Run], unfinished: Sequence[Path] = ()) -> str:
    """One self-contained HTML file on these runs; those that cannot be compared get chapters of their own."""
    return html(compose(runs, unfinished))


def write_report(paths: Sequence[Path], out: Path) -> str:
    """Write the report on the runs in these folders, and say what it found: in a sentence; of a sweep, with all that
    must be known of its best. A report of before is replaced; any other file is not."""
    if out.is_dir() or (out.exists() and MARK.encode() not in out.read_bytes()[:4000]):
        raise Refused(f"'{out}' is there and no report of FedTailor; name another file.")
    page = compose(*find(paths))
    with writing(f"The report cannot be written to '{out}'"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write(out, html(page).encode())
    first = page.chapters[0].sections[0]
    return " ".join(first.answer if first.key == "sweep" else first.answer[:1])


def compose(runs: Sequence[Run], unfinished: Sequence[Path] = ()) -> Page:
    """What is on the page, before it is HTML."""
    if not runs:
        raise Refused("There is no finished run to report on.")
    found, swept = groups(runs), sweeps(runs)
    surfaces = surface(swept)
    several, shown = len(found) > 1, found if len(found) <= _MOST_GROUPS else []
    if not shown and not surfaces:
        raise Refused(f"These runs are of {len(found)} experiments that cannot be compared; report on them one by one.")
    tuned = surfaces and len(swept) == 1 and len(swept[0].runs) == len(runs) and len({run.method for run in runs}) == 1
    shown = [swept[0].ranked(group) for group in shown] if tuned else shown
    chapters = [Chapter(group.apart if several else "", _sections(group, ranked=not tuned)) for group in shown]
    if surfaces and several:
        end = Chapter("How it was run", [_settings(found, swept)])
        chapters = [Chapter("All runs", [_sweep(swept, surfaces)]), *chapters, end]
    else:  # a sweep chooses with more care than a ranking
        begins = [_sweep(swept, surfaces)] if surfaces else []
        chapters = [
            replace(chapter, sections=[*begins, *chapter.sections, _settings([group], swept)])
            for chapter, group in zip(chapters, shown, strict=True)
        ]
    notes = [] if surfaces else [note for one in swept for note in one.missing()]
    if unfinished:
        notes.append(f"Not finished, so not in this report: {', '.join(path.name for path in unfinished)}.")
    if several:
        notes.append(
            f"These runs are of {len(found)} experiments, which differ in more than method and seed and are not "
            "compared with each other" + (": each has a chapter." if shown else "; only the surface is shown.")
        )
    return Page(_title(found), _about(found), chapters, notes)


def _title(found: Sequence[Group]) -> str:
    methods = dict.fromkeys(digest.run.method for group in found for digest in group.digests)
    names = [name for name in methods if name != "local"]
    data = list(dict.fromkeys(str(group.first.experiment["data"].get("name", "own data")) for group in found))
    who = names[0] if len(names) == 1 else f"{len(names)} federated methods" if names else "Training alone"
    alone = " and training alone" if names and any(group.alone for group in found) else ""
    return f"{who}{alone} on {' and '.join(data)}"


def _about(found: Sequence[Group]) -> str:
    if len(found) > 1:
        return f"{sum(len(group.digests) for group in found)} runs of {len(found)} experiments"
    run, group = found[0].first, found[0]
    partition = run.experiment["data"].get("partition")
    alpha = f" {run.experiment['data'].get('alpha')}" if partition == "dirichlet" else ""
    seeds = f"seeds {', '.join(map(str, group.seeds))}" if len(group.seeds) > 1 else f"seed {group.seeds[0]}"
    parts = [
        counted(run.num_clients, "client"),
        f"{partition}{alpha} split" if partition else "",
        counted(len(run.records), "round"),
    ]
    return " · ".join([part for part in parts if part] + [f"network {run.experiment['network'].get('name')}", seeds])


def _sections(group: Group, ranked: bool) -> list[Section]:
    """The answers; a sweep of one method is not ranked a second time, by test data."""
    taught, lessons, own = _of_methods(group)
    each = [gains.shares(group), gains.gain_by_size(group), clients.distribution(group), clients.absent(group)]
    spending = [cost.score_by_bytes(group), cost.seconds(group)]
    sections = [
        _best(group) if ranked else _on_the_way(group),
        Section("clients", "Who gains over training alone, who loses?", gains.who_gains(group), _there(each)),
        Section("neighbours", "Who learns from whom?", taught, lessons),
        Section("cost", "What did it cost?", cost.what_it_cost(group), _there(spending)),
    ]
    if own:
        words = [_of_first_seeds(group)]
        sections.append(Section("monitors", "What the methods say of themselves", words, own, quiet=True))
    if (data := split.split(group)) is not None:
        sections.append(Section("data", "How the data are split", [split.how_split(group)], [data]))
    return sections


def _best(group: Group) -> Section:
    leads = verdict.leads(group)
    figures = _there([ranking.ranking(group), ranking.against_best(group, leads), curves.curves(group)])
    return Section("best", "Which method is best here?", verdict.which_is_best(group, leads), figures)


def _on_the_way(group: Group) -> Section:
    words = "All settings round by round, on test data."
    return Section("best", "How do the settings develop?", [words], _there([curves.curves(group)]), quiet=True)


def _there(figures: Sequence[Figure | None]) -> list[Figure]:
    return [figure for figure in figures if figure is not None]


def _of_methods(group: Group) -> tuple[list[str], list[Figure], list[Figure]]:
    """What methods recorded of themselves: who learns from whom, in words and drawn, and all else."""
    taught: list[str] = []
    lessons: list[Figure] = []
    own: list[Figure] = []
    chosen = firsts([digest.run for digest in group.digests])
    alone = [digest.run for digest in group.digests if digest.run.method == "local"]
    for run in chosen:  # one after the other: all records at once would take gigabytes
        opened = _opened(run)
        taught += _who_teaches(opened)
        lessons += neighbours([opened])
        own += monitors([opened], alone)
    nobody = [
        "None of these methods keeps weights between clients: each client learns from all, or from nobody.",
        "FedAPA learns whom to learn from: fedtailor compare fedapa.",
    ]
    return taught or nobody, lessons, own


def _opened(run: Run) -> Run:
    """The run with its lines unpacked, to be thrown away after use."""
    return replace(run, records=[run.records[position] for position in range(len(run.records))])


def _who_teaches(run: Run) -> list[str]:
    """How much of what clients get is their own, and over how many others the rest is spread."""
    if not (over_rounds := shares(run)):
        return []
    weights = over_rounds[max(over_rounds)]
    own = weights.diagonal()
    others = weights - np.diag(own)
    rest = others.sum(1)
    parts = others[rest > 0] / rest[rest > 0, None]
    as_many = float(np.mean(1 / (parts**2).sum(1))) if len(parts) else 0.0
    whom = f"others, as if from {as_many:.0f} of the {len(others) - 1} in equal parts"
    if round(as_many) >= len(others) - 1:
        whom = "the other" if len(others) == 2 else f"all {len(others) - 1} others nearly alike"
    share = f"{100 * float(own.mean()):.0f} % of what a client gets is its own"
    return [
        f"With {run.method}, {share}; the rest comes from {whom}." if len(parts) else f"With {run.method}, {share}."
    ]


def _of_first_seeds(group: Group) -> str:
    first = f"with seed {group.seeds[0]}" if group.shares_seeds else "of every method's first seed"
    return f"These are numbers that methods record while they train{f', here {first}' if len(group.seeds) > 1 else ''}."


def _sweep(swept: Sequence[Swept], surfaces: Sequence[Figure]) -> Section:
    answer: list[str] = []
    for one, name in zip(swept, names(swept), strict=True):
        first, *others = one.answer()
        answer += [f"In the sweep '{name}': {first}" if name else first, *others]
    return Section("sweep", "Which settings are best?", answer, surfaces)


def _settings(found: Sequence[Group], swept: Sequence[Swept]) -> Section:
    """Settings, versions, seeds, machine, and the commands that repeat it all."""
    ran = [digest for group in found for digest in [*group.digests, *group.left_out]]
    repeating = _repeating([digest.run for digest in ran], swept)
    answer = "This repeats it:" if repeating else "No command repeats it: a method, a network or data came from Python."
    answer = "These commands repeat it:" if len(repeating) > 1 else answer
    named = [flat(digest.run.experiment) for digest in ran]
    common = [
        [name, _words(value)] for name, value in named[0].items()
        if not name.startswith("method.") and all(other.get(name) == value for other in named)
    ]  # fmt: skip
    methods = {(digest.label, digest.run.method, _fields(digest.run)): None for digest in ran}
    keys = ("fedtailor", "torch", "engine", "device", "threads", "parameters")
    places = [
        [one.label, one.seed, *(str(one.run.info.get(key, "–")) for key in keys), _folder(one.run)] for one in ran
    ]
    heads = ["method", "seed", "FedTailor", "PyTorch", "engine", "device", "threads", "parameters", "folder"]
    tables = [
        ("Settings of all runs", Table(["field", "value"], common)),
        ("Settings of the methods", Table(["method", "name", "fields"], _some([list(row) for row in methods]))),
        ("Where they ran", Table(heads, _some(places))),
    ]
    return Section("settings", "Settings, and how to repeat it", [answer], (), tables, repeating, quiet=True)


def _repeating(runs: Sequence[Run], swept: Sequence[Swept]) -> list[str]:
    """A line for every sweep, and those of the other runs; none where one of them cannot be repeated so."""
    ids = {id(run) for run in runs}
    lines = {sweep_command(one.plan): one.runs for one in swept if all(id(run) in ids for run in one.runs)}
    told = {id(run) for line, own in lines.items() if line is not None for run in own}
    rest = [run for run in runs if id(run) not in told]
    others = commands(rest) if rest else []
    return [line for line in lines if line is not None] + others if others or not rest else []


def _some(rows: list[list[Any]]) -> list[list[Any]]:
    left = len(rows) - clients.MOST_ROWS
    return rows if left <= 0 else [*rows[: clients.MOST_ROWS], [f"and {left} more", *[""] * (len(rows[0]) - 1)]]


def _folder(run: Run) -> str:
    return run.folder.name if run.folder else "–"


def _words(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def _fields(run: Run) -> str:
    return _words(", ".join(f"{n} = {v}" for n, v in flat(run.experiment["method"]).items() if n != "name"))
