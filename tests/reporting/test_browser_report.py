"""The report in a real browser: it loads without errors, shows the recorded values, and works with a keyboard."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys

import fedtailor as ft
from fedtailor.papers.definition import load_paper
from fedtailor.papers.running import select_cells
from fedtailor.reporting.paper_report import build_paper_page
from fedtailor.reporting.plotting import THEME
from fedtailor.reporting.report import save_report
from support.browser import (
    CLIENTS,
    FOCUSABLE,
    METHODS,
    PHONE,
    ROUNDS,
    SEEDS,
    WIDE,
    Browser,
    approx,
    drawn_curves,
    missing_programs,
    tab_order,
    weighted_score,
)
from support.paper_results import write_results

MISSING = missing_programs()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
pytest_plugins = ["support.screenshots"]


@pytest.fixture
def report(browser: Browser, compared: Path) -> Browser:
    """A newly opened report in a wide window, in light mode, without network."""
    browser.resize(WIDE)
    browser.set_color_scheme("light")
    browser.open((compared / "report.html").as_uri(), network=False)
    browser.script("localStorage.clear()")
    return browser


@pytest.mark.parametrize(("size", "theme"), [(WIDE, "light"), (PHONE, "dark")], ids=["wide", "phone"])
def test_report_offline_draws_all_figures_without_errors(
    browser: Browser, compared: Path, size: tuple[int, int], theme: str
) -> None:
    address = (compared / "report.html").as_uri()
    browser.resize(size)
    browser.set_color_scheme(theme)
    browser.open(address, network=False)
    browser.script("localStorage.clear()")
    found = browser.figures()
    assert {"ranking", "against-best", "curves", "gainers", "clients", "mixing-fedapa"} <= set(found)
    assert sorted(browser.script("return window.drawn")) == sorted(found)
    assert browser.overflow() <= 0
    empty = "return [...document.querySelectorAll('.plot')].filter((plot) => !plot.querySelector('svg')).length"
    assert browser.script(empty) == 0
    browser.save_screenshot(f"report-{size[0]}-{theme}")
    assert browser.console_errors() == [] and browser.requests() == [address]


def test_report_figures_match_records(report: Browser, runs: dict[tuple[str, int], ft.Run]) -> None:
    report.figures("ranking", "clients")
    for moment in ("trained", "received"):
        wanted = {
            runs[m, SEEDS[0]].method_title: np.mean(
                [weighted_score(runs[m, s], runs[m, s].scores(moment)) for s in SEEDS]
            )
            for m in METHODS
        }
        [trace] = [trace for trace in report.traces("ranking") if trace["name"] == moment]
        assert dict(zip(trace["y"], trace["x"], strict=True)) == approx(wanted)
    dots = [t for t in report.traces("clients") if t["type"] == "scatter"]
    scores = {
        runs[m, SEEDS[0]].method_title: sorted(100 * v for s in SEEDS for v in ranked_scores(runs[m, s]).values())
        for m in METHODS
    }
    [ranked] = [trace["y"] for trace in report.traces("ranking") if trace["name"] == "trained"]
    for method, trace in zip(ranked, dots, strict=True):  # the best method is first in both figures
        assert sorted(trace["x"]) == approx(scores[method])


def test_plots_have_the_theme_of_the_page_in_light_mode(report: Browser) -> None:
    """Only the background, the title, and the labels on hover differ."""
    report.figures("ranking")
    page = report.script("return document.querySelector('figure[data-figure=ranking] .plot').layout.template.layout")
    own = {name for name in THEME if name.endswith("bgcolor") or name in ("title", "hoverlabel")}
    assert {name: value for name, value in THEME.items() if name not in own} == {
        name: value for name, value in page.items() if name not in own
    }


def ranked_scores(run: ft.Run) -> dict[int, float]:
    return run.scores(run.info["ranked_by"])


def mean_over_seeds(runs: dict[tuple[str, int], ft.Run], value: Callable[[ft.Run], Any]) -> dict[str, Any]:
    """Return the method's title -> values per round, averaged over seeds."""
    means = {runs[m, SEEDS[0]].method_title: np.mean([value(runs[m, s]) for s in SEEDS], axis=0) for m in METHODS}
    return {title: approx(values.tolist()) for title, values in means.items()}


def test_choices_of_curves_change_axis_and_moment(report: Browser, runs: dict[tuple[str, int], ft.Run]) -> None:
    report.figures("curves")

    def scores(moment: str | None = None) -> Any:
        def curve(run: ft.Run) -> list[float]:
            name = f"accuracy_{moment or run.info['ranked_by']}"
            return [weighted_score(run, r["per_client"][name]) for r in run.records]

        return mean_over_seeds(runs, curve)

    def spent(*names: str, factor: float = 1.0) -> Any:
        return mean_over_seeds(runs, lambda run: np.cumsum([factor * sum(r[n] for n in names) for r in run.records]))

    def choose(words: str) -> None:
        path = f".//label[.//span[starts-with(., '{words}')]]"
        report.figure("curves").find_element("xpath", path).click()

    assert drawn_curves(report, "y") == scores()  # FedAvg as received, the others as trained
    assert drawn_curves(report, "x") == {runs[m, SEEDS[0]].method_title: list(range(1, ROUNDS + 1)) for m in METHODS}
    choose("bytes")
    assert drawn_curves(report, "x") == spent("bytes_up", "bytes_down", factor=1e-6)
    assert drawn_curves(report, "y") == scores()
    choose("trained")
    assert drawn_curves(report, "y") == scores("trained")
    choose("received")
    assert drawn_curves(report, "y") == scores("received")
    choose("seconds")
    assert drawn_curves(report, "x") == spent("seconds")
    title = "return document.querySelector('figure[data-figure=curves] .plot')._fullLayout.xaxis.title.text"
    assert "seconds" in report.script(title)
    assert report.console_errors() == []


def test_slider_shows_weights_of_selected_round(report: Browser, runs: dict[tuple[str, int], ft.Run]) -> None:
    report.figures("mixing-fedapa")
    slider = report.figure("mixing-fedapa").find_element("css selector", "input[type=range]")
    weights = runs["fedapa", SEEDS[0]].metric("weights")
    names = [client["name"] for client in runs["fedapa", SEEDS[0]].info["clients"]]
    for number in range(ROUNDS, 0, -1):
        assert slider.get_attribute("aria-valuetext") == f"round {number}"
        whole = np.asarray(weights[number], dtype=float)
        fractions = whole / whole.sum(1, keepdims=True)
        [trace] = report.traces("mixing-fedapa")
        order = [next(k for k, name in enumerate(names) if label.split()[-1] == name) for label in trace["x"]]
        assert sorted(order) == list(range(CLIENTS)) and trace["x"] == trace["y"]
        for (i, row), (j, column) in product(enumerate(order), enumerate(order)):
            cell = trace["z"][i][j]
            assert cell is None if row == column else cell == pytest.approx(fractions[row, column], rel=1e-2)
        slider.send_keys(Keys.ARROW_LEFT)
    assert report.console_errors() == []


def test_figures_have_accessible_names_and_tables(report: Browser) -> None:
    for key in report.figures():
        figure = report.figure(key)
        title = figure.find_element("css selector", "h3").text
        plot = figure.find_element("css selector", ".plot")
        assert figure.accessible_name == title and title
        assert plot.aria_role in ("image", "img") and plot.accessible_name.startswith(title)
        assert len(plot.accessible_name) > len(title) + 20  # includes the summary
        figure.find_element("css selector", "summary").click()
        table = figure.find_element("css selector", "details table")
        assert table.is_displayed()
        columns = table.find_elements("css selector", "thead th[scope=col]")
        assert len(columns) > 1 and table.find_elements("css selector", "tbody th[scope=row]")
    assert report.overflow() <= 0
    report.resize(PHONE)
    report.wait_until(lambda: report.overflow() <= 0, "tables make the page wider than a phone")


def test_theme_follows_system_until_button_is_clicked(report: Browser, compared: Path) -> None:
    def background() -> str:
        return str(report.script("return getComputedStyle(document.body).backgroundColor"))

    def font_color() -> str:
        plot = "document.querySelector('figure[data-figure=ranking] .plot')"
        return str(report.script(f"return {plot}._fullLayout.font.color"))

    report.figures("ranking")
    light = background(), font_color()
    report.set_color_scheme("dark")
    report.wait_until(lambda: font_color() != light[1], "figures keep their colors")
    dark = background(), font_color()
    assert dark[0] != light[0]
    report.set_color_scheme("light")
    report.wait_until(lambda: (background(), font_color()) == light, "the page stays dark")
    report.find("#theme").click()
    report.wait_until(lambda: (background(), font_color()) == dark, "the button does not darken the page")
    assert report.find("#theme").accessible_name == "Light theme"
    report.driver.refresh()
    assert background() == dark[0]  # the choice is stored
    report.script("localStorage.clear()")


def test_changing_theme_keeps_selected_options(report: Browser) -> None:
    report.figures("curves", "mixing-fedapa")
    whole = report.traces("mixing-fedapa")
    report.figure("curves").find_element("xpath", ".//label[.//span[.='bytes']]").click()
    report.figure("mixing-fedapa").find_element("css selector", "input[type=range]").send_keys(Keys.HOME)
    chosen = drawn_curves(report, "x"), report.traces("mixing-fedapa")
    assert chosen[1] != whole
    report.find("#theme").click()
    assert (drawn_curves(report, "x"), report.traces("mixing-fedapa")) == chosen
    report.script("localStorage.clear()")
    assert report.console_errors() == []


def test_report_is_usable_by_keyboard(report: Browser) -> None:
    report.press(Keys.TAB)  # the first key press on a newly opened page
    assert report.focused() == report.script(FOCUSABLE)[0]
    report.figures()
    wanted = report.script(FOCUSABLE)
    found = tab_order(report)
    missed = [element.get_attribute("outerHTML")[:200] for element in wanted if element not in found]
    assert missed == []
    positions = [wanted.index(element) for element in found if element in wanted]
    assert positions == sorted(positions)  # in reading order
    assert [element.get_attribute("outerHTML")[:200] for element in wanted if not element.accessible_name] == []
    assert "skip" in found[0].get_attribute("class")
    figure = report.figure("curves")
    before = drawn_curves(report, "x")
    report.script("arguments[0].focus()", figure.find_element("css selector", "input[type=radio]"))
    report.press(Keys.ARROW_RIGHT)
    assert drawn_curves(report, "x") != before
    for key in (Keys.ENTER, Keys.SPACE):
        report.script("arguments[0].focus()", figure.find_element("css selector", "summary"))
        opened = figure.find_element("css selector", "details").get_attribute("open")
        report.press(key)
        assert figure.find_element("css selector", "details").get_attribute("open") != opened
        report.script("arguments[0].focus()", report.find("#theme"))
        theme = report.script("return document.documentElement.dataset.theme")
        report.press(key)
        assert report.script("return document.documentElement.dataset.theme") != theme
    report.script("localStorage.clear()")


@pytest.mark.parametrize(("size", "theme"), [(WIDE, "light"), (PHONE, "dark")], ids=["wide", "phone"])
def test_report_on_a_paper_draws_all_tables_and_stacks_panels_on_a_phone(
    browser: Browser, tmp_path: Path, size: tuple[int, int], theme: str
) -> None:
    cells = select_cells("fedapa", "table-1-20-clients", ["cifar10"])
    results = write_results(tmp_path / "fedapa.jsonl", cells, lambda cell, seed: 80.0 + seed)
    save_report(build_paper_page([results]), tmp_path / "fedapa.html")
    browser.resize(size)
    browser.set_color_scheme(theme)
    browser.open((tmp_path / "fedapa.html").as_uri(), network=False)
    browser.script("localStorage.clear()")
    assert browser.figures() == [table.id for table in load_paper("fedapa").tables if not table.missing]
    assert browser.console_errors() == [] and browser.overflow() <= 0
    plot = "document.querySelector('#figure-table-1-20-clients .plot')"
    left, width = browser.script(f"const axis = {plot}._fullLayout.xaxis2; return [axis.domain[0], axis._length]")
    assert (left == 0) == (size == PHONE) and width > 100
    browser.save_screenshot(f"paper-{size[0]}-{theme}")
