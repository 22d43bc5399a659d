"""The report in a real browser: it loads in silence, shows the record's numbers, and obeys a keyboard."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys

import fedtailor as ft
from browsing import (
    CLIENTS,
    METHODS,
    PHONE,
    REACHABLE,
    ROUNDS,
    SEEDS,
    WIDE,
    Browser,
    drawn_curves,
    near,
    over_samples,
    tabbed,
    what_is_missing,
)

MISSING = what_is_missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
pytest_plugins = ["browsed"]


@pytest.fixture
def report(browser: Browser, compared: Path) -> Browser:
    """The report in a wide window, light, without a network, as it is when it is opened."""
    browser.resize(WIDE)
    browser.prefer("light")
    browser.open((compared / "report.html").as_uri(), network=False)
    browser.script("localStorage.clear()")
    return browser


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_report_draws_all_without_a_word_or_a_network(
    browser: Browser, compared: Path, size: tuple[int, int], theme: str
) -> None:
    address = (compared / "report.html").as_uri()
    browser.resize(size)
    browser.prefer(theme)
    browser.open(address, network=False)
    browser.script("localStorage.clear()")
    found = browser.figures()
    assert {"ranking", "against-best", "curves", "gainers", "clients", "neighbours-fedapa"} <= set(found)
    assert sorted(browser.script("return window.drawn")) == sorted(found)
    assert browser.overflow() <= 0
    empty = "return [...document.querySelectorAll('.plot')].filter((plot) => !plot.querySelector('svg')).length"
    assert browser.script(empty) == 0
    browser.keep(f"report-{size[0]}-{theme}")
    assert browser.complaints() == [] and browser.requests() == [address]


def test_the_report_shows_the_numbers_of_the_record(report: Browser, runs: dict[tuple[str, int], ft.Run]) -> None:
    report.figures()
    for moment in ("trained", "received"):
        wanted = {m: np.mean([over_samples(runs[m, s], runs[m, s].scores(moment)) for s in SEEDS]) for m in METHODS}
        [trace] = [trace for trace in report.traces("ranking") if trace["name"] == moment]
        assert dict(zip(trace["y"], trace["x"], strict=True)) == near(wanted)
    dots = [t for t in report.traces("clients") if t["type"] == "scatter"]
    everyone = {m: sorted(100 * v for s in SEEDS for v in runs[m, s].scores("trained").values()) for m in METHODS}
    [ranked] = [trace["y"] for trace in report.traces("ranking") if trace["name"] == "trained"]
    for method, trace in zip(ranked, dots, strict=True):  # the best first, everywhere
        assert sorted(trace["x"]) == near(everyone[method])


def recorded(runs: dict[tuple[str, int], ft.Run], of: Any) -> dict[str, Any]:
    """Method -> round by round, the mean over seeds."""
    found = {m: np.mean([of(runs[m, s]) for s in SEEDS], axis=0) for m in METHODS}
    return {m: near(values.tolist()) for m, values in found.items()}


def test_choices_change_what_is_drawn(report: Browser, runs: dict[tuple[str, int], ft.Run]) -> None:
    report.figures()

    def scores(moment: str) -> Any:
        return recorded(
            runs, lambda run: [over_samples(run, r["per_client"][f"accuracy_{moment}"]) for r in run.records]
        )

    def spent(*names: str, factor: float = 1.0) -> Any:
        return recorded(runs, lambda run: np.cumsum([factor * sum(r[n] for n in names) for r in run.records]))

    def choose(words: str) -> None:
        path = f".//label[.//span[starts-with(., '{words}')]]"
        report.figure("curves").find_element("xpath", path).click()

    assert drawn_curves(report, "y") == scores("trained")
    assert drawn_curves(report, "x") == {m: list(range(1, ROUNDS + 1)) for m in METHODS}
    choose("bytes")
    assert drawn_curves(report, "x") == spent("bytes_up", "bytes_down", factor=1e-6)
    assert drawn_curves(report, "y") == scores("trained")
    choose("received")
    assert drawn_curves(report, "y") == scores("received")
    choose("seconds")
    assert drawn_curves(report, "x") == spent("seconds")
    title = "return document.querySelector('figure[data-figure=curves] .plot')._fullLayout.xaxis.title.text"
    assert "seconds" in report.script(title)
    assert report.complaints() == []


def test_the_slider_shows_the_weights_of_its_round(report: Browser, runs: dict[tuple[str, int], ft.Run]) -> None:
    report.figures()
    slider = report.figure("neighbours-fedapa").find_element("css selector", "input[type=range]")
    weights = runs["fedapa", SEEDS[0]].monitor("weights")
    names = [client["name"] for client in runs["fedapa", SEEDS[0]].info["clients"]]
    for number in range(ROUNDS, 0, -1):
        assert slider.get_attribute("aria-valuetext") == f"round {number}"
        whole = np.asarray(weights[number], dtype=float)
        shares = whole / whole.sum(1, keepdims=True)
        [trace] = report.traces("neighbours-fedapa")
        order = [next(k for k, name in enumerate(names) if label.split()[-1] == name) for label in trace["x"]]
        assert sorted(order) == list(range(CLIENTS)) and trace["x"] == trace["y"]
        for (i, row), (j, column) in product(enumerate(order), enumerate(order)):
            cell = trace["z"][i][j]
            assert cell is None if row == column else cell == pytest.approx(shares[row, column], rel=1e-2)
        slider.send_keys(Keys.ARROW_LEFT)
    assert report.complaints() == []


def test_every_figure_has_a_name_and_a_table(report: Browser) -> None:
    for key in report.figures():
        figure = report.figure(key)
        title = figure.find_element("css selector", "h3").text
        plot = figure.find_element("css selector", ".plot")
        assert figure.accessible_name == title and title
        assert plot.aria_role in ("image", "img") and plot.accessible_name.startswith(title)
        assert len(plot.accessible_name) > len(title) + 20  # the sentence
        figure.find_element("css selector", "summary").click()
        table = figure.find_element("css selector", "details table")
        assert table.is_displayed()
        heads = table.find_elements("css selector", "thead th[scope=col]")
        assert len(heads) > 1 and table.find_elements("css selector", "tbody th[scope=row]")
    assert report.overflow() <= 0
    report.resize(PHONE)
    report.until(lambda: report.overflow() <= 0, "tables make the page wider than a phone")


def test_the_theme_is_the_systems_until_it_is_chosen(report: Browser, compared: Path) -> None:
    def ground() -> str:
        return str(report.script("return getComputedStyle(document.body).backgroundColor"))

    def letters() -> str:
        plot = "document.querySelector('figure[data-figure=ranking] .plot')"
        return str(report.script(f"return {plot}._fullLayout.font.color"))

    report.figures()
    light = ground(), letters()
    report.prefer("dark")
    report.until(lambda: letters() != light[1], "figures keep their colours")
    dark = ground(), letters()
    assert dark[0] != light[0]
    report.prefer("light")
    report.until(lambda: (ground(), letters()) == light, "the page stays dark")
    report.one("#theme").click()
    report.until(lambda: (ground(), letters()) == dark, "the button does not darken the page")
    assert report.one("#theme").accessible_name == "Light colours"
    report.driver.refresh()
    assert ground() == dark[0]  # it is remembered
    report.script("localStorage.clear()")


def test_what_was_chosen_stays_when_the_theme_changes(report: Browser) -> None:
    report.figures()
    whole = report.traces("neighbours-fedapa")
    report.figure("curves").find_element("xpath", ".//label[.//span[.='bytes']]").click()
    report.figure("neighbours-fedapa").find_element("css selector", "input[type=range]").send_keys(Keys.HOME)
    chosen = drawn_curves(report, "x"), report.traces("neighbours-fedapa")
    assert chosen[1] != whole
    report.one("#theme").click()
    assert (drawn_curves(report, "x"), report.traces("neighbours-fedapa")) == chosen
    report.script("localStorage.clear()")
    assert report.complaints() == []


def test_a_keyboard_alone_is_enough_for_the_report(report: Browser) -> None:
    report.figures()
    wanted = report.script(REACHABLE)
    found = tabbed(report)
    missed = [element.get_attribute("outerHTML")[:200] for element in wanted if element not in found]
    assert missed == []
    places = [wanted.index(element) for element in found if element in wanted]
    assert places == sorted(places)  # in the order in which they are read
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
        report.script("arguments[0].focus()", report.one("#theme"))
        theme = report.script("return document.documentElement.dataset.theme")
        report.press(key)
        assert report.script("return document.documentElement.dataset.theme") != theme
    report.script("localStorage.clear()")
