"""The report: valid and safe HTML, correct findings, and commands that reproduce its runs."""

import json
import re
import shlex
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtailor as ft
from conftest import error_message
from fedtailor.analysis.run_summary import compare_runs
from fedtailor.cli.compare import method_settings
from fedtailor.experiments.experiment import make_experiment
from fedtailor.experiments.overrides import parse_overrides
from fedtailor.experiments.sweep import open_sweep_folder, parse_sweep
from fedtailor.reporting import reproduce
from fedtailor.reporting.figures import cost
from fedtailor.reporting.figures.figure import Choice, Figure, Option, Table
from fedtailor.reporting.page import Chapter, Page, Section, render_page
from fedtailor.reporting.report import build_page, report, write_report
from support.example_runs import run_with_scores, runs_with_clear_winner

# ---- the page


class Outline(HTMLParser):
    """Collects unclosed tags, ids, links, and all start tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self.ids += [str(found["id"])] if "id" in found else []
        self.links += [str(found["href"])] if tag == "a" else []
        if tag not in ("meta", "input", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


MARKUP_NAMES = [
    '<script>alert("1")</script>',
    "</script><img src=x onerror=alert(2)>",
    "a & b \"c\" 'd'",
    "client\n%{x} {y}",
]


def test_report_with_markup_in_names_is_escaped() -> None:
    """Markup in the names of clients and methods and in error messages is shown as text."""
    runs = [
        run_with_scores(m, dict.fromkeys(range(4), b), names=MARKUP_NAMES, failed={1: MARKUP_NAMES[0]})
        for m, b in (("local", 0.5), (MARKUP_NAMES[1], 0.6))
    ]
    page = Outline(report(runs))
    assert page.open == [] and sum(tag == "img" for tag, _ in page.tags) == 0
    assert sum(tag == "script" and "type" not in found for tag, found in page.tags) == 2
    assert not any(name.startswith("on") for _, found in page.tags for name in found)
    shown = " ".join(re.findall(r'<script type="application/json">(.*?)</script>', report(runs)))
    tags = {tag.split()[0] for tag in re.findall(r"\\u003c/?(.*?)\\u003e", shown)}  # the tags that plotly interprets
    assert {"extra"} <= tags <= {"extra", "br", "b", "span"}


def test_report_is_valid_html_without_network_requests() -> None:
    text = report(runs_with_clear_winner(seeds=2))
    page = Outline(text)
    assert page.open == [] and len(page.ids) == len(set(page.ids)) and text.startswith("<!DOCTYPE html>")
    assert all(link[1:] in page.ids for link in page.links) and len(page.links) >= 6
    policy = next(str(found["content"]) for tag, found in page.tags if found.get("http-equiv"))
    assert "default-src 'none'" in policy and "http" not in policy and "unsafe-eval" not in policy
    assert not [found for tag, found in page.tags if tag in ("link", "iframe") or "src" in found]
    figures = [found for tag, found in page.tags if tag == "figure"]
    plots = [found for tag, found in page.tags if found.get("role") == "img"]
    assert len(figures) == len(plots) > 5 and all(found["data-figure"] for found in figures)
    assert all(found["aria-label"] for found in plots)
    order = [found["id"] for tag, found in page.tags if tag == "section"]
    assert order[:4] == ["best", "clients", "mixing", "cost"] and order[-1] == "settings"


def test_report_on_natural_clients_calls_them_so() -> None:
    fed = ft.load("heart")
    run = ft.simulate(ft.methods.Local(), ft.network("logistic", fed), fed, rounds=1)
    assert build_page([run]).subtitle.startswith("4 natural clients · 1 round · ")


def test_render_page_escapes_every_text() -> None:
    text = "\"'></script><img src=x onerror=alert(1)>"
    table, choices = Table([text, text], [[text, float("inf")]]), [Choice(text, [Option(text, {})] * n) for n in (2, 5)]
    frames = [{"name": text, "data": []}] * 2  # a slider
    figure = Figure(text, text, text, [{"y": [1.0, float("nan")], "text": text}], {}, table, frames, choices)
    section = Section(text, text, [text, text], [figure], [(text, table)], [text])
    html = render_page(Page(text, text, [Chapter(text, [section])], [text]))
    page = Outline(html)
    assert page.open == [] and "select" in {tag for tag, _ in page.tags}
    assert not [tag for tag, found in page.tags if tag == "img" or any(name.startswith("on") for name in found)]
    (content,) = re.findall(r'<script type="application/json">(.*?)</script>', html)
    assert json.loads(content)["data"] == [{"y": [1.0, None], "text": text}]


# ---- from folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small `fedtailor compare local fedapa`."""
    out = tmp_path_factory.mktemp("compared")
    settings = {
        "rounds": 2,
        "data": {"name": "digits", "clients": 4, "alpha": 0.5},
        "network": {"name": "mlp", "hidden": [8]},
    }
    for method, seed in product(("local", "fedapa"), (0, 1)):
        fields = {"name": method, "lr": 0.05} if method == "fedapa" else {"name": method}
        make_experiment(settings | {"method": fields, "seed": seed}).run(folder=out / f"{method}-seed{seed}")
    return out


def test_write_report_replaces_only_reports(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "report.html"
    finding = write_report([folder], out)
    assert finding in out.read_text() and write_report([folder], out) == finding
    (tmp_path / "mine.html").write_text("<p>my page")
    assert "is not a FedTailor report. Choose another file." in error_message(
        lambda: write_report([folder], tmp_path / "mine.html")
    )
    assert "no run in" in error_message(lambda: write_report([tmp_path / "nowhere"], out))


def test_write_report_lists_unfinished_runs(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "experiment.toml").write_text((folder / "local-seed0" / "experiment.toml").read_text())
    write_report([folder, tmp_path / "half"], tmp_path / "report.html")
    assert "Unfinished runs are not included: half." in (tmp_path / "report.html").read_text()


def test_run_commands_of_comparison_reproduce_all_runs(folder: Path) -> None:
    """Parsing the command gives the experiment of each run, including its split."""
    runs = [ft.resume(path) for path in sorted(folder.iterdir())]
    (command,) = reproduce.run_commands(runs)
    assert command in unescape(re.sub("</?span>", "", report(runs)))
    words = shlex.split(command)
    assert words[:2] == ["fedtailor", "compare"]
    flags = parse_overrides(words[2:])
    assert flags.pop_list("seeds", int, []) == [0, 1]
    for run in runs:
        found = replace(
            make_experiment(method_settings(run.method, flags.positional, flags)), seed=run.experiment["seed"]
        )
        assert found.describe(found.load()) == run.experiment


@pytest.mark.parametrize(
    "settings",
    [
        {"method": {"name": "lag", "inner": {"name": "scaffold", "lr": 0.05}}, "data": {"name": "digits", "seed": 3}},
        {"method": {"name": "fedapm"}, "participation": [0.5, 1.0], "channel": {"clip": 1.0, "quantize": "int8"}},
        {"method": {"name": "fedavg"}, "rounds": 2, "schedule": [[0, 1], [2]], "dtype": "float64", "validation": 0.2},
        {"method": {"name": "ditto", "lam": 1e-05}, "unreliable": {"dropout": 0.3}, "evaluate": 3, "seed": 5},
        {"data": {"name": "heart", "repeat": 7, "folds": 5}, "seed": 2},
    ],
    ids=["wrapped", "channel", "schedule", "unreliable", "repeat"],
)  # fmt: skip
def test_run_commands_of_single_run_reproduce_it(settings: dict[str, Any]) -> None:
    experiment = make_experiment(settings)
    fed = experiment.load()
    run = ft.Run(experiment.describe(fed), {}, [], {}, lambda client: {}, lambda client, moment: {})
    (command,) = reproduce.run_commands([run])
    again = make_experiment(parse_overrides(shlex.split(command)[2:]).apply_to({}))
    assert again.describe(again.load()) == run.experiment


def test_run_commands_of_run_from_python_or_with_invalid_settings_are_empty(tmp_path: Path) -> None:
    assert reproduce.run_commands(runs_with_clear_winner()) == []
    assert "No command reproduces these runs" in report(runs_with_clear_winner())
    run = sweep_runs(tmp_path, SWEEP)[0]
    assert reproduce.run_commands([run])
    assert reproduce.run_commands([replace(run, experiment=run.experiment | {"evaluate_every": {"name": 5}})]) == []


def test_report_on_many_clients_and_methods_has_bounded_size() -> None:
    """Thirteen methods with a thousand clients add less than the size of plotly."""
    random = np.random.default_rng(0)
    runs = [run_with_scores(f"m{k}", dict(enumerate(random.random(1000).tolist()))) for k in range(12)]
    runs.append(run_with_scores("local", dict(enumerate(random.random(1000).tolist()))))
    assert len(report(runs)) < len(report(runs_with_clear_winner())) + 4_000_000


# ---- sweeps


def sweep_runs(folder: Path, words: str) -> list[ft.Run]:
    """Return generated runs in the folder of this sweep; later points score higher."""
    sweep = parse_sweep(words.split())
    with open_sweep_folder(folder, sweep.plan):
        pass
    runs = []
    for position, point in enumerate(sweep.points):
        run = run_with_scores(point.method, {c: position / 100 + c / 1000 for c in range(3)}, point.experiment.seed)
        settings = point.experiment.describe(point.experiment.load())
        runs.append(replace(run, experiment=settings, folder=folder / point.label))
    return runs


def sweep_section(runs: list[ft.Run]) -> Section:
    """Return the section about a sweep, which is the first one."""
    return build_page(runs).chapters[0].sections[0]


def page_commands(page: Page) -> list[str]:
    return [line for chapter in page.chapters for section in chapter.sections for line in section.commands]


@pytest.mark.parametrize(
    "words",
    [
        "--method fedprox --method.mu 0.1,1 --seed 0,1 --rounds 2 --validation 0.2",
        "--method fedprox,fedavg --method.mu 0.1,1 --fedavg.lr [0.5] --seed 3 --moment received",
        "--network mlp --network.hidden 8,4 --network.hidden [16] --method lag --method.inner fedavg,scaffold",
        "--data.partition iid,dirichlet --participation 0.5,1.0 --participation 0.25,0.5 --unreliable.dropout 0.1,0.2",
    ],
    ids=["fields", "methods", "lists", "conditions"],
)
def test_sweep_command_reproduces_sweep(words: str) -> None:
    plan = parse_sweep(words.split()).plan
    line = reproduce.sweep_command(plan)
    assert line is not None
    again = parse_sweep(shlex.split(line)[2:])
    assert (again.plan.axes, again.plan.moment, again.plan.runs) == (plan.axes, plan.moment, plan.runs)
    wanted = {point.label: point.experiment for point in parse_sweep(words.split()).points}
    assert {point.label: point.experiment for point in again.points} == wanted


def test_sweep_of_one_method_is_not_ranked_again(tmp_path: Path) -> None:
    runs = sweep_runs(tmp_path, "--method fedprox --method.mu 0.1,1 --seed 0,1 --data.clients 3")
    page = build_page(runs)
    (chapter,) = page.chapters
    assert [section.key for section in chapter.sections][:2] == ["sweep", "best"]
    titles = [section.title for section in chapter.sections]
    assert "Which method is best?" not in titles and "How do the settings develop during training?" in titles
    (line,) = page_commands(page)
    assert line.startswith("fedtailor sweep ") and len(parse_sweep(shlex.split(line)[2:]).points) == 4
    local = replace(run_with_scores("local", dict.fromkeys(range(3), 0.5)), experiment=runs[0].experiment | {
        "method": {"name": "local", "lr": 0.1}})  # fmt: skip
    both = build_page([*runs, local])
    assert "Which method is best?" in [section.title for section in both.chapters[0].sections]
    assert [line.split()[1] for line in page_commands(both)] == ["sweep", "run"]


def test_sweep_over_many_conditions_shows_settings_and_command(tmp_path: Path) -> None:
    alphas = ",".join(str(alpha / 10) for alpha in range(1, 11))
    page = build_page(sweep_runs(tmp_path, f"--data.alpha {alphas} --method.lr 0.1,0.2 --data.clients 3"))
    assert [chapter.sections[-1].key for chapter in page.chapters] == ["sweep", "settings"]
    (line,) = page_commands(page)
    assert line.startswith("fedtailor sweep ") and f"--data.alpha {alphas}" in line
    tables = dict(page.chapters[-1].sections[-1].tables)
    assert len(tables["Runs"].rows) == 20
    assert ["data.clients", "3"] in tables["Settings of all runs"].rows


def test_settings_name_the_git_commit_of_each_run() -> None:
    run = run_with_scores("local", dict.fromkeys(range(3), 0.5))
    run.info["environment"] = {"git": {"commit": "0123456789abcdef", "modified": True}}
    table = dict(build_page([run]).chapters[0].sections[-1].tables)["Runs"]
    (row,) = table.rows
    assert dict(zip(table.columns, row, strict=True))["git commit"] == "0123456789, modified"


SWEEP = "--method fedprox --method.mu 0.1,1 --seed 0,1 --data.clients 3"


def test_sweep_answer_includes_significance_and_caveats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sentence is the verdict, caveats follow, and `write_report` returns all of it."""
    runs = sweep_runs(tmp_path, SWEEP)
    found = sweep_section(runs).answer
    lead = "its 1.0-point lead over FedProx mu=0.1 is more than chance."
    assert found[0].startswith("FedProx mu=1 scores highest (") and found[0].endswith(lead)
    text = " ".join(found)
    assert "also try mu above 1." in text and "chosen on test data and its score is optimistic" in text
    assert all(sentence.endswith(".") for sentence in found)
    monkeypatch.setattr("fedtailor.reporting.report.load_runs", lambda paths: (runs, []))
    assert write_report([tmp_path], tmp_path / "report.html") == text
    page = (tmp_path / "report.html").read_text()
    assert all(sentence in page for sentence in found)


def test_sweep_answer_has_one_verdict_per_condition(tmp_path: Path) -> None:
    answers = sweep_section(sweep_runs(tmp_path, f"{SWEEP} --data.alpha 0.1,1")).answer
    found = [sentence.partition(": ")[0] for sentence in answers if "not enough seeds to tell" in sentence]
    assert found == ["With alpha = 0.1", "With alpha = 1"]
    assert sum("optimistic" in sentence for sentence in answers) == 1


def test_report_on_several_sweeps_names_each_sweep(tmp_path: Path) -> None:
    places = [tmp_path / "here" / "mu", tmp_path / "lr"]
    words = [SWEEP, SWEEP.replace("mu 0.1,1", "lr 0.2,2")]
    sweep = sweep_section([run for each in zip(places, words, strict=True) for run in sweep_runs(*each)])
    assert sweep.answer[0].startswith("Sweep 'mu': FedProx mu=1 scores highest")
    assert any(sentence.startswith("Sweep 'lr': FedProx lr=2 scores highest") for sentence in sweep.answer)
    assert [figure.title.partition(":")[0] for figure in sweep.figures] == ["mu", "lr"]
    places = [tmp_path / part / "mu" for part in ("one", "other")]
    words = [SWEEP, SWEEP.replace("0.1,1", "0.2,2")]
    sweep = sweep_section([run for each in zip(places, words, strict=True) for run in sweep_runs(*each)])
    assert sweep.answer[0].startswith(f"Sweep '{places[0]}': ")


def test_sweep_with_missing_runs_counts_them(tmp_path: Path) -> None:
    runs = sweep_runs(tmp_path / "fields", SWEEP)
    assert sweep_section(runs[:2]).answer[-1] == "2 of the sweep's 4 runs are missing."
    seeds = sweep_runs(tmp_path / "seeds", "--method fedprox --seed 0,1 --data.clients 3")
    assert build_page(seeds[:1]).notes == ["1 of the sweep's 2 runs is missing."] and not build_page(seeds).notes
    assert sweep_section(seeds).answer[0].startswith("FedProx scores ")


def test_sections_below_sweep_describe_its_selected_setting(tmp_path: Path) -> None:
    """mu = 1 scores higher on test data, but mu = 0.1 on validation data, by which the sweep selects."""
    runs = sweep_runs(tmp_path, f"{SWEEP} --validation 0.2")
    for run in runs:
        score = 0.9 if run.experiment["method"]["mu"] == 0.1 else 0.8
        run.records[-1]["per_client"] |= {f"validation_{m}": {0: score} for m in ("received", "trained")}
        run.info["clients"][0]["validation"] = 10
    assert next(iter(compare_runs(runs).methods)) == "FedProx mu=1"
    sweep, *others = build_page(runs).chapters[0].sections
    assert sweep.answer[0].startswith("FedProx mu=0.1 scores highest (90.0 % on validation data), but there are not")
    texts = {section.key: [*section.answer, *(figure.summary for figure in section.figures)] for section in others}
    assert any("FedProx mu=0.1 stays within" in text or "of FedProx mu=0.1 was" in text for text in texts["best"])
    assert any(text.startswith("With FedProx mu=0.1, the median client") for text in texts["clients"])
    assert texts["cost"][0].startswith("FedProx mu=0.1 transfers") and any(
        "mu=0.1 ranks first" in t for t in texts["cost"]
    )


def test_bytes_summary_when_cheapest_method_scores_higher() -> None:
    runs = [run_with_scores("fedper", {0: 0.6, 1: 0.6}), run_with_scores("fedavg", {0: 0.5, 1: 0.5})]
    runs[1].records[0]["bytes_up"] *= 2
    group = compare_runs(runs)
    figure = cost.score_by_bytes(replace(group, methods=dict(reversed(list(group.methods.items())))))
    assert figure is not None and "FedAvg ranks first" in figure.summary
    assert "the cheapest, FedPer, transfers 86 % of that and is 10.0 points better on test data" in figure.summary
