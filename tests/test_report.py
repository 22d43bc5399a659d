"""The report says what the numbers say, whoever made the run and whatever clients are called."""

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
from conftest import refusal
from fedtailor.cli import _for_method
from fedtailor.experiment import make
from fedtailor.flags import read_flags
from fedtailor.see import cost, repeat
from fedtailor.see.figure import Figure, Table
from fedtailor.see.page import Chapter, Page, Section, html
from fedtailor.see.report import compose, report, write_report
from fedtailor.sweeps.sweep import begun, read_sweep
from seen import clear, made, one

# ---- the page


class Outline(HTMLParser):
    """Tags that do not close, ids, and links inside the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.seen.append((tag, found))
        self.ids += [str(found["id"])] if "id" in found else []
        self.links += [str(found["href"])] if tag == "a" else []
        if tag not in ("meta", "input", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


NASTY = ['<script>alert("1")</script>', "</script><img src=x onerror=alert(2)>", "a & b \"c\" 'd'", "client\n%{x} {y}"]


def test_names_from_files_stay_names() -> None:
    """Markup in names of clients, methods and reasons is text, everywhere on the page."""
    runs = [
        made(m, dict.fromkeys(range(4), b), names=NASTY, failed={1: NASTY[0]})
        for m, b in (("local", 0.5), (NASTY[1], 0.6))
    ]
    page = Outline(report(runs))
    assert page.open == [] and sum(tag == "img" for tag, _ in page.seen) == 0
    assert sum(tag == "script" and "type" not in found for tag, found in page.seen) == 2
    assert not any(name.startswith("on") for _, found in page.seen for name in found)
    shown = " ".join(re.findall(r'<script type="application/json">(.*?)</script>', report(runs)))
    tags = {tag.split()[0] for tag in re.findall(r"\\u003c/?([^>]*)>", shown)}  # those that plotly itself would read
    assert {"extra"} <= tags <= {"extra", "br", "b", "span"}


def test_the_page_is_whole_and_asks_for_nothing() -> None:
    text = report(clear(seeds=2))
    page = Outline(text)
    assert page.open == [] and len(page.ids) == len(set(page.ids)) and text.startswith("<!DOCTYPE html>")
    assert all(link[1:] in page.ids for link in page.links) and len(page.links) >= 6
    policy = next(str(found["content"]) for tag, found in page.seen if found.get("http-equiv"))
    assert "default-src 'none'" in policy and "http" not in policy and "unsafe-eval" not in policy
    assert not [found for tag, found in page.seen if tag in ("link", "iframe") or "src" in found]
    figures = [found for tag, found in page.seen if tag == "figure"]
    plots = [found for tag, found in page.seen if found.get("role") == "img"]
    assert len(figures) == len(plots) > 5 and all(found["data-figure"] for found in figures)
    assert all(found["aria-label"] for found in plots)
    order = [found["id"] for tag, found in page.seen if tag == "section"]
    assert order[:4] == ["best", "clients", "neighbours", "cost"] and order[-1] == "settings"


def test_figures_are_json_that_cannot_end_its_element() -> None:
    figure = Figure("odd", "Odd", "It is odd.", [{"y": [1.0, float("nan"), np.float64(2)], "text": "</script>"}], {},
                    Table(["x"], [[float("inf")]]))  # fmt: skip
    page = html(Page("t", "a", [Chapter("", [Section("s", "S", ["It is."], [figure])])]))
    found = re.findall(r'<script type="application/json">(.*?)</script>', page)
    assert json.loads(found[0])["data"] == [{"y": [1.0, None, 2.0], "text": "</script>"}]


# ---- from folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `fedtailor compare local fedapa` leaves, small."""
    out = tmp_path_factory.mktemp("compared")
    settings = {
        "rounds": 2,
        "data": {"name": "digits", "clients": 4, "alpha": 0.5},
        "network": {"name": "mlp", "hidden": [8]},
    }
    for method, seed in product(("local", "fedapa"), (0, 1)):
        fields = {"name": method, "lr": 0.05} if method == "fedapa" else {"name": method}
        make(settings | {"method": fields, "seed": seed}).run(folder=out / f"{method}-seed{seed}")
    return out


def test_a_report_is_written_once_more_but_over_nothing_else(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "report.html"
    said = write_report([folder], out)
    assert said in out.read_text() and write_report([folder], out) == said
    (tmp_path / "mine.html").write_text("<p>my page")
    assert "name another file" in refusal(lambda: write_report([folder], tmp_path / "mine.html"))
    assert "no run in" in refusal(lambda: write_report([tmp_path / "nowhere"], out))


def test_what_is_not_finished_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "experiment.toml").write_text((folder / "local-seed0" / "experiment.toml").read_text())
    write_report([folder, tmp_path / "half"], tmp_path / "report.html")
    assert "Not finished, so not in this report: half." in (tmp_path / "report.html").read_text()


def test_the_command_repeats_the_comparison(folder: Path) -> None:
    """Read as the command line reads it, it gives every run's experiment, split and all."""
    runs = [ft.resume(path) for path in sorted(folder.iterdir())]
    (command,) = repeat.commands(runs)
    assert command in unescape(re.sub("</?span>", "", report(runs)))
    words = shlex.split(command)
    assert words[:2] == ["fedtailor", "compare"]
    flags = read_flags(words[2:])
    assert flags.pop_list("seeds", int, []) == [0, 1]
    for run in runs:
        found = replace(make(_for_method(run.method, flags.words, flags)), seed=run.experiment["seed"])
        assert found.describe(found.load()) == run.experiment


@pytest.mark.parametrize(
    "settings",
    [
        {"method": {"name": "lag", "inner": {"name": "scaffold", "lr": 0.05}}, "data": {"name": "digits", "seed": 3}},
        {"method": {"name": "fedapm"}, "participation": [0.5, 1.0], "channel": {"clip": 1.0, "quantise": "int8"}},
        {"method": {"name": "fedavg"}, "rounds": 2, "schedule": [[0, 1], [2]], "dtype": "float64", "validation": 0.2},
        {"method": {"name": "ditto", "lam": 1e-05}, "unreliable": {"dropout": 0.3}, "evaluate": 3, "seed": 5},
    ],
    ids=["wrapped", "channel", "schedule", "unreliable"],
)  # fmt: skip
def test_the_command_of_a_single_run_repeats_it(settings: dict[str, Any]) -> None:
    experiment = make(settings)
    fed = experiment.load()
    run = ft.Run(experiment.describe(fed), {}, [], {}, lambda client: {}, lambda client, moment: {})
    (command,) = repeat.commands([run])
    again = make(read_flags(shlex.split(command)[2:]).over({}))
    assert again.describe(again.load()) == run.experiment


def test_what_came_from_python_has_no_command() -> None:
    assert repeat.commands(clear()) == []
    assert "No command repeats it" in report(clear())


def test_many_clients_and_methods_stay_small() -> None:
    """What is drawn is bounded: twelve methods of a thousand clients add less than plotly itself."""
    random = np.random.default_rng(0)
    runs = [made(f"m{k}", dict(enumerate(random.random(1000).tolist()))) for k in range(12)]
    runs.append(made("local", dict(enumerate(random.random(1000).tolist()))))
    assert len(report(runs)) < len(report(clear())) + 4_000_000


# ---- of sweeps


def swept(folder: Path, words: str) -> list[ft.Run]:
    """Made-up runs in a folder as such a sweep would leave them: the larger its values, the better."""
    asked = read_sweep(words.split())
    with begun(folder, asked.plan):
        pass
    runs = []
    for place, point in enumerate(asked.points):
        run = made(point.method, {c: place / 100 + c / 1000 for c in range(3)}, point.experiment.seed)
        settings = point.experiment.describe(point.experiment.load())
        runs.append(replace(run, experiment=settings, folder=folder / point.label))
    return runs


def command_in(page: Page) -> list[str]:
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
def test_one_line_repeats_a_sweep(words: str) -> None:
    plan = read_sweep(words.split()).plan
    line = repeat.sweep_command(plan)
    assert line is not None
    again = read_sweep(shlex.split(line)[2:])
    assert (again.plan.axes, again.plan.moment, again.plan.runs) == (plan.axes, plan.moment, plan.runs)
    wanted = {point.label: point.experiment for point in read_sweep(words.split()).points}
    assert {point.label: point.experiment for point in again.points} == wanted


def test_settings_that_nobody_could_ask_for_have_no_command(tmp_path: Path) -> None:
    run = swept(tmp_path, SWEEP)[0]
    assert repeat.commands([run])
    assert repeat.commands([replace(run, experiment=run.experiment | {"evaluate_every": {"name": 5}})]) == []


def test_a_sweep_of_one_method_is_ranked_once(tmp_path: Path) -> None:
    runs = swept(tmp_path, "--method fedprox --method.mu 0.1,1 --seed 0,1 --data.clients 3")
    page = compose(runs)
    (chapter,) = page.chapters
    assert [section.key for section in chapter.sections][:2] == ["sweep", "best"]
    assert "Which method is best" not in html(page) and "How do the settings develop?" in html(page)
    (line,) = command_in(page)
    assert line.startswith("fedtailor sweep ") and len(read_sweep(shlex.split(line)[2:]).points) == 4
    alone = replace(made("local", dict.fromkeys(range(3), 0.5)), experiment=runs[0].experiment | {
        "method": {"name": "local", "lr": 0.1}})  # fmt: skip
    both = compose([*runs, alone])
    assert "Which method is best" in html(both)
    assert [line.split()[1] for line in command_in(both)] == ["sweep", "run"]


def test_a_sweep_over_seeds_alone_has_its_answer(tmp_path: Path) -> None:
    page = compose(swept(tmp_path, "--method fedprox --seed 0,1 --data.clients 3"))
    assert page.chapters[0].sections[0].answer[0].startswith("fedprox gets ")


def test_many_conditions_keep_settings_and_the_command(tmp_path: Path) -> None:
    alphas = ",".join(str(alpha / 10) for alpha in range(1, 11))
    page = compose(swept(tmp_path, f"--data.alpha {alphas} --method.lr 0.1,0.2 --data.clients 3"))
    assert [chapter.sections[-1].key for chapter in page.chapters] == ["sweep", "settings"]
    (line,) = command_in(page)
    assert line.startswith("fedtailor sweep ") and f"--data.alpha {alphas}" in line
    tables = dict(page.chapters[-1].sections[-1].tables)
    assert len(tables["Where they ran"].rows) == 20
    assert ["data.clients", "3"] in tables["Settings of all runs"].rows


SWEEP = "--method fedprox --method.mu 0.1,1 --seed 0,1 --data.clients 3"


def test_the_answer_of_a_sweep_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chance is in its first sentence, what must be doubted follows; the command says all of it."""
    runs = swept(tmp_path, SWEEP)
    found = compose(runs).chapters[0].sections[0].answer
    assert found[0].startswith("The best is mu = 1: ") and "; over 2 seeds it is not ahead of mu = 0.1" in found[0]
    assert "try mu above 1 too" in found[1] and "chosen on the test set and its score flatters" in found[2]
    assert len(found) == 3 and all(sentence.endswith(".") for sentence in found)
    monkeypatch.setattr("fedtailor.see.report.find", lambda paths: (runs, []))
    assert write_report([tmp_path], tmp_path / "report.html") == " ".join(found)
    page = (tmp_path / "report.html").read_text()
    assert all(sentence in page for sentence in found)


def test_every_condition_has_its_chance(tmp_path: Path) -> None:
    answers = compose(swept(tmp_path, f"{SWEEP} --data.alpha 0.1,1")).chapters[0].sections[0].answer
    assert [sentence.count("over 2 seeds") for sentence in answers[:2]] == [1, 1]
    assert ["alpha = 0.1" in answers[0], "alpha = 1" in answers[1]] == [True, True] and "flatters" in answers[2]


def test_several_sweeps_are_told_apart(tmp_path: Path) -> None:
    places = [tmp_path / "here" / "mu", tmp_path / "lr"]
    words = [SWEEP, SWEEP.replace("mu 0.1,1", "lr 0.2,2")]
    sweep = compose([run for each in zip(places, words, strict=True) for run in swept(*each)]).chapters[0].sections[0]
    assert sweep.answer[0].startswith("In the sweep 'mu': The best is mu = 1: ")
    assert any(sentence.startswith("In the sweep 'lr': The best is lr = 2: ") for sentence in sweep.answer)
    assert [figure.title.partition(":")[0] for figure in sweep.figures] == ["mu", "lr"]
    places = [tmp_path / part / "mu" for part in ("one", "other")]
    words = [SWEEP, SWEEP.replace("0.1,1", "0.2,2")]
    sweep = compose([run for each in zip(places, words, strict=True) for run in swept(*each)]).chapters[0].sections[0]
    assert sweep.answer[0].startswith(f"In the sweep '{places[0]}': ")


def test_runs_of_a_sweep_that_are_missing_are_counted(tmp_path: Path) -> None:
    runs = swept(tmp_path / "fields", SWEEP)
    assert compose(runs[:2]).chapters[0].sections[0].answer[-1] == "2 of the sweep's 4 runs are missing here."
    seeds = swept(tmp_path / "seeds", "--method fedprox --seed 0,1 --data.clients 3")
    assert compose(seeds[:1]).notes == ["1 of the sweep's 2 runs is missing here."] and not compose(seeds).notes


def test_what_a_sweep_chose_is_spoken_of_below_it(tmp_path: Path) -> None:
    """mu = 1 is better in the only seed it has, so that test scores rank it first; the sweep cannot choose it."""
    runs = swept(tmp_path, SWEEP)[:3]
    assert next(iter(one(runs).methods)) == "fedprox mu=1.0"
    sweep, *others = compose(runs).chapters[0].sections
    assert sweep.answer[0].startswith("The best is mu = 0.1: ")
    said = {section.key: [*section.answer, *(figure.says for figure in section.figures)] for section in others}
    assert any(text.startswith("fedprox mu=0.1 has") or "on fedprox mu=0.1 stays" in text for text in said["best"])
    assert any(text.startswith("With fedprox mu=0.1 the median client") for text in said["clients"])
    assert said["cost"][0].startswith("fedprox mu=0.1 takes") and any("mu=0.1 is the best" in t for t in said["cost"])


def test_what_is_cheaper_may_be_ahead_of_what_a_sweep_chose() -> None:
    runs = [made("fedper", {0: 0.6, 1: 0.6}), made("fedavg", {0: 0.5, 1: 0.5})]
    runs[1].records[0]["bytes_up"] *= 2
    group = one(runs)
    figure = cost.score_by_bytes(replace(group, methods=dict(reversed(list(group.methods.items())))))
    assert (
        figure is not None and "fedavg is the best" in figure.says and "ends 10.0 points ahead on test" in figure.says
    )
