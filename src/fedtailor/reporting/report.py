"""The HTML report: the questions it answers, in order, and the settings of the runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.analysis.formatting import count_of
from fedtailor.analysis.run_length import rounds_in_words
from fedtailor.analysis.run_summary import Comparison, make_comparisons
from fedtailor.analysis.verdict import verdict_sentences
from fedtailor.data.dataset import BY_OWNER
from fedtailor.errors import ConfigError, RunError
from fedtailor.reporting.figures import cost, data_split, gains
from fedtailor.reporting.figures.catalog import draw, local_runs, runs_with_records
from fedtailor.reporting.figures.figure import Figure, Table, limit_rows
from fedtailor.reporting.figures.method_metric_figures import draw_method_metrics
from fedtailor.reporting.figures.similarity import mixing_figures, mixing_weights
from fedtailor.reporting.figures.sweep_figures import sweep_figures
from fedtailor.reporting.figures.sweep_result import SweepResult, find_sweeps, sweep_names
from fedtailor.reporting.generalization import generalization_section, train_and_global_section
from fedtailor.reporting.page import GENERATOR_TAG, Chapter, Page, Section, render_page
from fedtailor.reporting.reproduce import run_commands, sweep_command
from fedtailor.runs.environment import commit_text
from fedtailor.runs.files import write_atomic, write_errors
from fedtailor.runs.reader import load_runs
from fedtailor.runs.run import Run
from fedtailor.runs.toml import flatten_settings

_MAX_CHAPTERS = 8  # experiments; more than that cannot be reported in one file
_MAX_TEXT = 2_000  # characters of a setting; schedules can be long


def report(runs: Sequence[Run], unfinished: Sequence[Path] = ()) -> str:
    """Return a self-contained HTML report on these runs; runs that cannot be compared get separate chapters."""
    return render_page(build_page(runs, unfinished))


def write_report(runs: Sequence[Run | Path], out: Path) -> str:
    """Write the report on these runs, or on the runs in these folders, and return its main finding.

    An existing report is replaced; any other existing file is kept and raises `RunError`.
    """
    check_report_file(out)
    given = [run for run in runs if isinstance(run, Run)]
    loaded, unfinished = load_runs([path for path in runs if isinstance(path, Path)])
    page = build_page([*given, *loaded], unfinished)
    save_report(page, out)
    return main_finding(page)


def check_report_file(out: Path) -> None:
    """Raise an error if a report must not be written to this file."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"The report is an HTML page, so its file must end in .html, got '{out}'.")
    if out.is_dir() or (out.exists() and GENERATOR_TAG.encode() not in out.read_bytes()[:4000]):
        raise RunError(f"'{out}' exists and is not a FedTailor report. Choose another file.")


def save_report(page: Page, out: Path) -> None:
    """Write the report to a file."""
    with write_errors(f"The report cannot be written to '{out}'"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, render_page(page).encode())


def main_finding(page: Page) -> str:
    """Return the main finding of a report: one sentence; for a sweep, with all caveats."""
    first = page.chapters[0].sections[0]
    return " ".join(first.answer if first.key == "sweep" else first.answer[:1])


def build_page(runs: Sequence[Run], unfinished: Sequence[Path] = ()) -> Page:
    """Return the content of the report."""
    if not runs:
        raise RunError("There is no finished run to report on.")
    groups, sweeps = make_comparisons(runs), find_sweeps(runs)
    figures = sweep_figures(sweeps)
    several, shown = len(groups) > 1, groups if len(groups) <= _MAX_CHAPTERS else []
    if not shown and not figures:
        raise RunError(
            f"These runs belong to {len(groups)} experiments that cannot be compared. Create one report per experiment."
        )
    one_method = len({run.method for run in runs}) == 1
    tuned = figures and len(sweeps) == 1 and len(sweeps[0].runs) == len(runs) and one_method
    shown = [sweeps[0].ranked(group) for group in shown] if tuned else shown
    chapters = [Chapter(group.differs_in if several else "", _sections(group, ranked=not tuned)) for group in shown]
    if figures and several:
        end = Chapter("All settings", [_settings_section(groups, sweeps)])
        chapters = [Chapter("All runs", [_sweep_section(sweeps, figures)]), *chapters, end]
    else:  # the sweep comes first, because its comparison is more careful than a ranking by test data
        first = [_sweep_section(sweeps, figures)] if figures else []
        chapters = [
            replace(chapter, sections=[*first, *chapter.sections, _settings_section([group], sweeps)])
            for chapter, group in zip(chapters, shown, strict=True)
        ]
    notes = [] if figures else [note for sweep in sweeps for note in sweep.missing()]
    if unfinished:
        notes.append(f"Unfinished runs are not included: {', '.join(path.name for path in unfinished)}.")
    if several:
        notes.append(
            f"These runs belong to {len(groups)} experiments that differ in more than method and seed. They are not "
            "compared with each other; "
            + ("each experiment has its own chapter." if shown else "only the sweep is shown.")
        )
    return Page(_title(groups), _subtitle(groups), chapters, notes)


def _title(groups: Sequence[Comparison]) -> str:
    runs = [run_summary.run for group in groups for label in group.ranked for run_summary in group.methods[label]]
    names = list({run.method: run.method_title for run in runs if run.method != "local"}.values())
    data = list(dict.fromkeys(str(group.first.experiment["data"].get("name", "custom data")) for group in groups))
    what = names[0] if len(names) == 1 else f"{len(names)} federated methods" if names else "Local training"
    local = " and local training" if names and any(group.baseline for group in groups) else ""
    return f"{what}{local} on {' and '.join(data)}"


def _subtitle(groups: Sequence[Comparison]) -> str:
    if len(groups) > 1:
        return f"{sum(len(group.summaries) for group in groups)} runs of {len(groups)} experiments"
    run, group = groups[0].first, groups[0]
    held_out = len(run.held_out_clients)
    partition = run.experiment["data"].get("partition")
    kind = "natural " if partition == BY_OWNER else ""
    alpha = f" (α = {run.experiment['data'].get('alpha')})" if partition == "dirichlet" else ""
    seeds = f"seeds {', '.join(map(str, group.seeds))}" if len(group.seeds) > 1 else f"seed {group.seeds[0]}"
    seeds = f"{len(group.seeds)} redrawn splits of each client's samples" if group.is_repeated else seeds
    parts = [
        count_of(run.num_clients, f"{kind}client") + (f" and {held_out} held out" if held_out else ""),
        f"{partition} split{alpha}" if partition and not kind else "",
        rounds_in_words([run_summary.run for run_summary in group.summaries]),
    ]
    return " · ".join([part for part in parts if part] + [f"network {run.experiment['network'].get('name')}", seeds])


def _sections(group: Comparison, ranked: bool) -> list[Section]:
    """Return the sections on one experiment; settings that a sweep has already ranked are not ranked again."""
    mixing, mixing_drawn, metrics_drawn = _method_metric_content(group)
    client_figures = draw(group, "gainers", "gains", "clients", "failures")
    gain_title = "Which clients gain over local training, and which lose?"
    methods = _method_section(group, ranked)
    clients = Section("clients", gain_title, gains.gain_answer(group), client_figures)
    sections = [
        *((clients, methods) if group.is_repeated else (methods, clients)),
        Section("mixing", "Which clients learn from which?", mixing, mixing_drawn),
        Section("cost", "What did it cost?", cost.cost_sentences(group), draw(group, "bytes", "seconds")),
    ]
    beyond = [generalization_section(group), train_and_global_section(group)]
    sections[2:2] = [section for section in beyond if section is not None]
    if metrics_drawn:
        note = [_method_metrics_note(group)]
        sections.append(Section("method-metrics", "Method metrics", note, metrics_drawn, is_reference=True))
    split = draw(group, "split")
    return [*sections, Section("data", "How are the data split?", [data_split.split_sentence(group)], split)]


def _method_section(group: Comparison, ranked: bool) -> Section:
    if ranked:
        figures = draw(group, "ranking", "against-best", "curves")
        return Section("best", "Which method is best?", verdict_sentences(group), figures)
    title, text = "How do the settings develop during training?", "All settings during training, on test data."
    return Section("best", title, [text], draw(group, "curves"), is_reference=True)


def _method_metric_content(group: Comparison) -> tuple[list[str], list[Figure], list[Figure]]:
    """Return sentences on and figures of the mixing weights, and figures of all other method metrics."""
    mixing: list[str] = []
    mixing_drawn: list[Figure] = []
    metrics_drawn: list[Figure] = []
    for run in runs_with_records(group):
        mixing += _mixing_sentences(run)
        mixing_drawn += mixing_figures([run])
        metrics_drawn += draw_method_metrics([run], local_runs(group))
    no_weights = [
        "None of these methods records weights between clients.",
        "FedAPA learns such weights; add it with 'fedtailor compare fedapa'.",
    ]
    return mixing or no_weights, mixing_drawn, metrics_drawn


def _mixing_sentences(run: Run) -> list[str]:
    """Return the fraction of their own models that clients receive, and the effective number of other clients."""
    if not (by_round := mixing_weights(run)):
        return []
    weights = by_round[max(by_round)]
    diagonal = weights.diagonal()
    others = weights - np.diag(diagonal)
    totals, count = others.sum(1), len(others) - 1
    fractions = others[totals > 0] / totals[totals > 0, None]
    effective = float(np.mean(1 / (fractions**2).sum(1))) if len(fractions) else 0.0
    sources = f"other clients, as if {effective:.0f} of the {count} contributed equally"
    if round(effective) >= count:
        sources = "the other client" if count == 1 else f"all {count} other clients in nearly equal parts"
    rest = f"; the rest comes from {sources}" if len(fractions) else ""
    return [f"With {run.method_title}, {100 * float(diagonal.mean()):.0f} % of a client's model is its own{rest}."]


def _method_metrics_note(group: Comparison) -> str:
    seed = f"seed {group.seeds[0]}" if group.shares_seeds else "the first seed of each method"
    which = f"; the figures show {seed}" if len(group.seeds) > 1 else ""
    return f"Methods record these metrics during training{which}."


def _sweep_section(sweeps: Sequence[SweepResult], figures: Sequence[Figure]) -> Section:
    answer: list[str] = []
    for sweep, name in zip(sweeps, sweep_names(sweeps), strict=True):
        first, *others = sweep.answer()
        answer += [f"Sweep '{name}': {first}" if name else first, *others]
    return Section("sweep", "Which settings are best?", answer, figures)


def _settings_section(groups: Sequence[Comparison], sweeps: Sequence[SweepResult]) -> Section:
    """Return settings, versions, and engines of all runs, and the commands that reproduce them."""
    run_summaries = [run_summary for group in groups for run_summary in [*group.summaries, *group.excluded]]
    commands = _reproduce_commands([run_summary.run for run_summary in run_summaries], sweeps)
    answer = "These commands reproduce the runs:" if len(commands) > 1 else "This command reproduces the runs:"
    if not commands:
        answer = "No command reproduces these runs, because a method, a network, or the data were defined in Python."
    settings = [flatten_settings(run_summary.run.experiment) for run_summary in run_summaries]
    common = [
        [name, _shorten_value(value)] for name, value in settings[0].items()
        if not name.startswith("method.") and all(other.get(name) == value for other in settings)
    ]  # fmt: skip
    methods = {
        (run_summary.label, run_summary.run.method, _method_fields(run_summary.run)): None
        for run_summary in run_summaries
    }
    keys = ("fedtailor", "torch", "engine", "device", "threads", "parameters")
    runs = [
        [one.label, one.seed, *(str(one.run.info.get(key, "–")) for key in keys), commit_text(one.run.info),
         getattr(one.run.folder, "name", "–")]
        for one in run_summaries
    ]  # fmt: skip
    columns = [
        "method", "seed", "FedTailor", "PyTorch", "engine", "device", "threads", "parameters", "git commit", "folder",
    ]  # fmt: skip
    tables = [
        ("Settings of all runs", Table(["setting", "value"], common)),
        ("Settings of the methods", Table(["method", "name", "settings"], limit_rows([list(row) for row in methods]))),
        ("Runs", Table(columns, limit_rows(runs))),
    ]
    return Section("settings", "Settings and reproduction", [answer], (), tables, commands, is_reference=True)


def _reproduce_commands(runs: Sequence[Run], sweeps: Sequence[SweepResult]) -> list[str]:
    """Return one command per sweep plus those of the other runs; [] if some run cannot be reproduced by a command."""
    ids = {id(run) for run in runs}
    commands = {sweep_command(sweep.plan): sweep.runs for sweep in sweeps if all(id(run) in ids for run in sweep.runs)}
    covered = {id(run) for command, swept in commands.items() if command is not None for run in swept}
    rest = [run for run in runs if id(run) not in covered]
    others = run_commands(rest) if rest else []
    return [command for command in commands if command is not None] + others if others or not rest else []


def _shorten_value(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} …"


def _method_fields(run: Run) -> str:
    fields = flatten_settings(run.experiment["method"])
    return _shorten_value(", ".join(f"{name} = {value}" for name, value in fields.items() if name != "name"))
