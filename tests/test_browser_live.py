"""The live page in a real browser: experiments from the form to their curves, comparisons, clients, phones."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from selenium.webdriver.support.ui import Select

import fedtailor as ft
from browsing import (
    PHONE,
    REACHABLE,
    ROUNDS,
    SCROLLED,
    TABLET,
    WIDE,
    Browser,
    drawn_curves,
    near,
    over_samples,
    served,
    tabbed,
    what_is_missing,
)
from fedtailor.experiment import make
from fedtailor.files import locked
from fedtailor.record import open_run
from fedtailor.see.starting import NOTES
from live_page import end_all, made

MISSING = what_is_missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
pytest_plugins = ["browsed"]
SMALL = {"data.clients": "3", "network": "logistic", "engine": "sequential"}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder for runs; what was started there and still goes on ends with the test."""
    yield tmp_path
    end_all(tmp_path)


def opened(browser: Browser, address: str) -> Browser:
    browser.resize(WIDE)
    browser.prefer("light")
    browser.open(address)
    browser.until(lambda: browser.text("#folder") not in ("", "…"), "the page does not load")
    return browser


def state(browser: Browser) -> str:
    return browser.text("#run-buttons .state")


def fill_in(browser: Browser, values: dict[str, str]) -> None:
    """Write into the form as somebody would who looks for a field by its name."""
    for name, value in values.items():
        selector = f'[data-field="{name}"]'
        field = browser.wait_for(selector)
        if field.tag_name == "select":
            Select(field).select_by_value(value)
        else:
            field.clear()
            field.send_keys(value)


def started(browser: Browser, values: dict[str, str]) -> str:
    """Start an experiment from the form; its name."""
    browser.click("#new-link")
    fill_in(browser, values)
    browser.click("#start")
    browser.until(lambda: browser.one("#run").is_displayed() and state(browser), "nothing was started")
    return browser.text("#run-title")


def quiet(browser: Browser, address: str) -> None:
    """No complaint, and nobody was asked but the page's own server."""
    origin = address.partition("/?")[0] + "/"
    assert browser.complaints() == []
    assert [asked for asked in browser.requests() if not asked.startswith(origin)] == []


def test_a_run_started_from_the_form_finishes_and_shows_its_record(browser: Browser, root: Path) -> None:
    with served(root) as address:
        live = opened(browser, address)
        assert "token" not in live.driver.current_url  # it would stay in the history
        live.until(lambda: live.one("#none").is_displayed(), "an empty folder is not said to be empty")
        live.click("#new-link")
        live.until(lambda: live.text("#command").startswith("fedtailor run"), "the form shows no command")
        live.keep("live-form")
        live.click("#home")
        name = started(live, SMALL | {"method": "fedprox", "method.mu": "0.25", "rounds": "3"})
        live.until(lambda: state(live) == "finished", "the run does not finish")
        live.until(lambda: len(live.traces("progress")[0]["y"] or []) == 3 if live.all("[data-figure=progress]") else 0,
                   "its curve is not drawn")  # fmt: skip
        run = open_run(root / name)
        assert run.experiment["method"]["name"] == "fedprox" and run.experiment["method"]["mu"] == 0.25
        for trace in live.traces("progress"):
            wanted = [over_samples(run, r["per_client"][f"accuracy_{trace['name']}"]) for r in run.records]
            assert trace["x"] == [1, 2, 3] and trace["y"] == near(wanted)
        live.keep("live-run")
        live.click("#home")
        live.until(lambda: live.one("#list").is_displayed(), "the list does not come")
        row = live.one(f'#runs tr[data-run="{name}"]').text
        assert f"{over_samples(run, run.scores('trained')):.1f} %" in row
        assert f"{over_samples(run, run.scores('received')):.1f} %" in row
        live.keep("live-list")
        quiet(live, address)


def test_a_form_that_is_left_before_it_came_comes_once(browser: Browser, root: Path) -> None:
    with served(root) as address:
        live = opened(browser, address)
        live.script("location.hash = '#new'; location.hash = ''; location.hash = '#new'")
        live.until(lambda: live.text("#command").startswith("fedtailor run"), "the form does not come")
        assert len(live.all('[data-field="rounds"]')) == 1


def test_a_refusal_is_shown_in_the_librarys_words_beside_its_field(browser: Browser, root: Path) -> None:
    with served(root) as address:
        live = opened(browser, address)
        live.click("#new-link")
        for values in ({"method": "fedprox", "method.mu": "-1"}, {"method": "fedavg", "rounds": "many"}):
            settings = {"method": {"name": values["method"]}}
            name, value = [*values.items()][-1]
            fill_in(live, values)
            live.click("#start")
            field = live.wait_for(f'[data-field="{name}"][aria-invalid=true]')
            live.until(lambda: live.one("#start").is_enabled(), "the form stays closed")
            table = settings["method"] if name.startswith("method.") else settings
            table[name.rpartition(".")[2]] = float(value) if name == "method.mu" else value  # type: ignore[assignment]
            with pytest.raises(ft.Refused) as caught:
                make(settings)
            assert live.text("#refusal") == str(caught.value)
            assert live.focused() == field and live.one("#new").is_displayed()
            live.keep(f"live-refusal-{values['method']}")
            field.clear()
        assert not [path for path in root.iterdir() if not path.name.startswith(".")]


def test_a_run_is_stopped_and_goes_on(browser: Browser, root: Path) -> None:
    with served(root) as address:
        live = opened(browser, address)
        name = started(live, SMALL | {"method": "fedavg", "rounds": "3000", "evaluate_every": "1000"})
        progress = "#run-progress [role=progressbar]"

        def rounds() -> int:
            return int(live.script("return document.querySelector(arguments[0])?.ariaValueNow ?? 0", progress))

        live.until(lambda: state(live) == "running" and rounds() > 2, "it does not run")
        live.keep("live-running")
        live.click("#do-stop")
        live.until(lambda: state(live) == "stopped" and live.all("#do-resume"), "it does not stop")
        done = int(str(live.script("return document.title")).partition("/")[0])
        assert 2 < done < 3000 and "resume" in live.text("#run-words")
        live.click("#do-resume")
        live.until(lambda: state(live) == "running" and rounds() > done, "it does not go on")
        live.click("#home")
        live.until(lambda: name in live.text("#running"), "it is not among those that run")
        live.keep("live-list-running")
        live.click("#running a")
        live.until(lambda: live.one("#run").is_displayed() and live.all("#do-stop"), "it cannot be stopped again")
        live.click("#do-stop")
        live.until(lambda: state(live) == "stopped", "it does not stop again")
        quiet(live, address)


def test_clicks_and_focus_outlive_the_rounds_of_a_run(browser: Browser, root: Path) -> None:
    with served(root) as address:
        live = opened(browser, address)
        name = started(live, SMALL | {"method": "fedavg", "rounds": "100000", "evaluate_every": "50000"})

        def rounds() -> int:
            return int(live.text(f'#runs tr[data-run="{name}"] td.number').partition("/")[0] or 0)

        def a_round_passes() -> None:
            done = rounds()
            live.until(lambda: rounds() > done > 0, "it does not go on")

        link, box = f'#runs tr[data-run="{name}"] a', f'#runs tr[data-run="{name}"] input'
        for selector in (f'#running li[data-run="{name}"] a', link):
            live.click("#home")
            live.until(lambda: rounds() > 0, "it does not run")
            with live.held_down(selector):
                a_round_passes()
            live.until(lambda: live.one("#run").is_displayed(), f"the click on {selector} is lost")
        live.click("#home")
        with live.held_down(box):
            a_round_passes()
        assert live.one(box).is_selected() and live.text("#compare") == "Compare 1 ticked run"
        ticked = live.focused()
        a_round_passes()
        assert live.focused() == ticked == live.one(box) and ticked.is_selected()
        live.press(" ")
        live.until(lambda: live.text("#compare") == "Compare ticked runs", "it stays ticked")
        quiet(live, address)


def test_runs_that_go_on_do_not_change_places_with_every_round(browser: Browser, root: Path) -> None:
    for place, name in enumerate(("finished", "a", "b")):
        made(root / name, 1)
        os.utime(root / name / "rounds.jsonl", (1e9 + place, 1e9 + place))
        if name != "finished":
            shutil.rmtree(root / name / "personal")
    with served(root) as address, locked(root / "a"), locked(root / "b"):
        live = opened(browser, address)
        live.until(lambda: "reading" not in live.text("#runs") and len(live.all("#running li")) == 2, "they do not run")
        names = "return [...document.querySelectorAll('#runs tbody tr')].map((row) => row.dataset.run)"
        assert live.script(names) == ["a", "b", "finished"]  # though b was the last to finish a round


def test_the_buttons_of_a_run_are_for_that_run_alone(browser: Browser, root: Path) -> None:
    (root / NOTES).mkdir()
    for name in ("first", "second"):  # both failed before their first round
        for ending, words in ((".toml", "rounds = 1"), (".pid", "1"), (".end", "1")):
            (root / NOTES / f"{name}{ending}").write_text(words)
    with served(root) as address:
        live = opened(browser, address)
        for name in ("first", "second"):
            live.click("#home")
            live.click(f'#runs tr[data-run="{name}"] a')
            live.until(lambda: live.text("#run-says") and live.all("#do-forget"), "the run is not shown")
        live.click("#do-forget")
        live.until(lambda: len(live.all("#runs tbody tr")) == 1, "nothing is taken from the list")
        assert live.all('#runs tr[data-run="first"]')


def test_ticked_runs_are_compared(browser: Browser, compared: Path, runs: dict[tuple[str, int], ft.Run]) -> None:
    with served(compared / "runs") as address:
        live = opened(browser, address)
        live.until(lambda: len(live.all("#runs tbody tr")) == len(runs), "not all runs are listed")
        live.until(lambda: "reading" not in live.text("#runs"), "runs are not read")
        ticked = [("fedavg", 0), ("local", 0)]
        for method, seed in ticked:
            live.click(f'#runs input[aria-label="tick {method}-seed{seed}"]')
        assert live.text("#compare") == "Compare 2 ticked runs"
        live.click("#compare")
        live.until(lambda: {"ranking", "curves"} <= set(live.script("return window.drawn")), "nothing is compared")
        wanted = {m: over_samples(runs[m, s], runs[m, s].scores("trained")) for m, s in ticked}
        [trace] = [trace for trace in live.traces("ranking") if trace["name"] == "trained"]
        assert dict(zip(trace["y"], trace["x"], strict=True)) == near(wanted)
        assert len(live.text("#comparison-says")) > 40
        before = drawn_curves(live, "x")
        live.figure("curves").find_element("xpath", ".//label[.//span[.='bytes']]").click()
        live.until(lambda: drawn_curves(live, "x") != before, "the choice changes nothing")
        live.keep("live-comparison")
        quiet(live, address)


def test_a_client_is_opened(browser: Browser, compared: Path, runs: dict[tuple[str, int], ft.Run]) -> None:
    run, number = runs["fedapa", 0], 2
    own = run.info["clients"][number]
    with served(compared / "runs") as address:
        live = opened(browser, address)
        live.until(lambda: live.all('#runs tr[data-run="fedapa-seed0"] a'), "the run is not listed")
        live.click('#runs tr[data-run="fedapa-seed0"] a')
        live.until(lambda: live.all(f'#clients tr[data-client="{number}"] a'), "the client is not listed")
        live.click(f'#clients tr[data-client="{number}"] a')
        live.until(lambda: {"history", "classes"} <= set(live.script("return window.drawn")), "nothing is shown of it")
        lines = {trace["name"]: trace["y"] for trace in live.traces("history")}
        for moment in ("trained", "received"):
            wanted = [100 * r["per_client"][f"accuracy_{moment}"][number] for r in run.records]
            assert lines[moment] == near(wanted)
        assert live.traces("classes")[0]["y"] == own["classes"]
        assert f"{own['train']:,} training samples, {own['test']:,} to be tested on" in live.text("#client-about")
        weights = np.asarray(run.monitor("weights")[ROUNDS], dtype=float)[number]
        weights[number] = -1
        assert live.text("#neighbours tbody tr a") == run.info["clients"][int(weights.argmax())]["name"]
        live.keep("live-client")
        quiet(live, address)


VIEWS = {
    "list": "#",
    "new": "#new",
    "run": "#run=fedapa-seed0",
    "client": "#run=fedapa-seed0&client=2",
    "comparison": "#compare=fedavg-seed0&compare=local-seed0",
}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_fits_phones_tablets_and_a_keyboard(browser: Browser, compared: Path, theme: str) -> None:
    with served(compared / "runs") as address:
        live = opened(browser, address)
        live.prefer(theme)
        ready = {"list": "#runs tbody tr", "new": "#parts fieldset", "run": "#clients tbody tr",
                 "client": "#neighbours tbody tr", "comparison": "[data-figure=curves][data-drawn]"}  # fmt: skip
        for view, where in VIEWS.items():
            live.resize(WIDE)
            live.script("location.hash = arguments[0]", where)
            live.wait_for(f"#{view}:not([hidden]) {ready[view]}")
            live.until(lambda: "reading" not in live.text("#runs"), "runs are not read")
            for size in (TABLET, PHONE):
                live.resize(size)
                fits = f"{view} is wider than {size[0]} pixels"
                live.until(lambda: live.overflow() <= 0 and not live.script(SCROLLED), fits)
                live.keep(f"live-{view}-{size[0]}-{theme}")
            live.resize(WIDE)
            wanted, found = live.script(REACHABLE), tabbed(live)
            assert [e.get_attribute("outerHTML")[:200] for e in wanted if e not in found] == [], view
            assert [e.get_attribute("outerHTML")[:200] for e in wanted if not e.accessible_name] == [], view
        quiet(live, address)


def test_without_the_token_the_page_says_where_to_find_it(browser: Browser, root: Path) -> None:
    with served(root) as address:
        bare = address.partition("?")[0]
        for guess in (bare, f"{bare}?token=guessed"):
            browser.open(guess)
            words = browser.one("body").text
            assert words.startswith("Open the address that fedtailor live printed") and not browser.all("#new-link")
        browser.keep("live-without-token")
        opened(browser, address)
        browser.open(bare)  # who was let in once stays in
        browser.until(lambda: browser.all("#new-link"), "the cookie is not kept")
