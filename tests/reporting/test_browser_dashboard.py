"""The dashboard in a browser: starting and resuming experiments, comparisons, clients, small screens, keyboard."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import fedtailor as ft
from fedtailor.experiments.experiment import make_experiment
from fedtailor.reporting.dashboard.launcher import LAUNCHER_FOLDER
from fedtailor.runs.files import folder_lock
from fedtailor.runs.reader import load_run
from support.browser import (
    FOCUSABLE,
    PHONE,
    ROUNDS,
    SCROLLED_TABLES,
    TABLET,
    WIDE,
    Browser,
    approx,
    drawn_curves,
    missing_programs,
    tab_order,
    weighted_score,
)
from support.dashboard_client import dashboard, kill_all, make_run

MISSING = missing_programs()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
pytest_plugins = ["support.screenshots"]
SMALL = {"data.clients": "3", "network": "logistic", "engine": "sequential"}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder for runs; experiments that are still running are killed after the test."""
    yield tmp_path
    kill_all(tmp_path)


@contextmanager
def opened(browser: Browser, folder: Path) -> Iterator[None]:
    """Open the dashboard of a folder, which must load nothing from elsewhere and log no errors."""
    with dashboard(folder) as server:
        open_dashboard(browser, server.url)
        yield
        assert browser.console_errors() == []
        origin = server.url.partition("?")[0]
        assert [url for url in browser.requests() if not url.startswith(origin)] == []


def open_dashboard(browser: Browser, address: str) -> None:
    browser.resize(WIDE)
    browser.set_color_scheme("light")
    browser.open(address)
    browser.wait_until(lambda: browser.text("#folder") not in ("", "…"), "the page does not load")


def state(browser: Browser) -> str:
    return browser.text("#run-buttons .state")


def fill_in(browser: Browser, values: dict[str, str]) -> None:
    """Enter values into the form, by field name."""
    for name, value in values.items():
        selector = f'[data-field="{name}"]'
        field = browser.wait_for(selector)
        if field.tag_name == "select":
            Select(field).select_by_value(value)
        else:
            field.clear()
            field.send_keys(value)


def start_experiment(browser: Browser, values: dict[str, str]) -> str:
    """Start an experiment from the form and return its name."""
    browser.click("#new-link")
    fill_in(browser, values)
    browser.click("#start")
    browser.wait_until(lambda: browser.find("#run").is_displayed() and state(browser), "no experiment was started")
    return browser.text("#run-title")


def test_run_started_from_form_finishes_and_shows_records(browser: Browser, root: Path) -> None:
    with opened(browser, root):
        assert "token" not in browser.driver.current_url  # the browser's history would save it
        browser.wait_until(
            lambda: browser.find("#empty").is_displayed(), "the message about an empty folder is missing"
        )
        browser.click("#new-link")
        browser.wait_until(lambda: browser.text("#command").startswith("fedtailor run"), "the form shows no command")
        browser.save_screenshot("live-form")
        browser.click("#home")
        name = start_experiment(browser, SMALL | {"method": "fedprox", "method.mu": "0.25", "rounds": "3"})
        browser.wait_until(lambda: state(browser) == "finished", "the run does not finish")
        browser.wait_for("[data-figure=progress][data-drawn]")
        browser.wait_until(lambda: len(browser.traces("progress")[0]["y"]) == 3, "the curve is not complete")
        run = load_run(root / name)
        assert run.experiment["method"]["name"] == "fedprox" and run.experiment["method"]["mu"] == 0.25
        for trace in browser.traces("progress"):
            expected = [weighted_score(run, r["per_client"][f"accuracy_{trace['name']}"]) for r in run.records]
            assert trace["x"] == [1, 2, 3] and trace["y"] == approx(expected)
        browser.save_screenshot("live-run")
        browser.click("#home")
        browser.wait_until(lambda: browser.find("#list").is_displayed(), "the list is not shown")
        row = browser.find(f'#runs tr[data-run="{name}"]').text
        assert f"{weighted_score(run, run.scores('trained')):.1f} %" in row
        assert f"{weighted_score(run, run.scores('received')):.1f} %" in row
        browser.save_screenshot("live-list")


def test_invalid_value_shows_error_and_marks_field(browser: Browser, root: Path) -> None:
    with opened(browser, root):
        browser.script("location.hash = '#new'; location.hash = ''; location.hash = '#new'")
        browser.wait_until(lambda: browser.text("#command").startswith("fedtailor run"), "the form is not shown")
        assert len(browser.find_all('[data-field="rounds"]')) == 1  # although it was opened twice while loading
        for values in ({"method": "fedprox", "method.mu": "-1"}, {"method": "fedavg", "rounds": "many"}):
            settings = {"method": {"name": values["method"]}}
            name, value = [*values.items()][-1]
            fill_in(browser, values)
            browser.click("#start")
            field = browser.wait_for(f'[data-field="{name}"][aria-invalid=true]')
            browser.wait_until(lambda: browser.find("#start").is_enabled(), "the form stays disabled")
            table = settings["method"] if name.startswith("method.") else settings
            table[name.rpartition(".")[2]] = float(value) if name == "method.mu" else value  # type: ignore[assignment]
            with pytest.raises(ft.FedTailorError) as caught:
                make_experiment(settings)
            assert browser.text("#form-error") == str(caught.value)
            assert browser.focused() == field and browser.find("#new").is_displayed()
            browser.save_screenshot(f"live-form-error-{values['method']}")
            field.clear()
        assert not [path for path in root.iterdir() if not path.name.startswith(".")]
        assert all("422" in error for error in browser.console_errors())


def test_run_is_stopped_and_resumed(browser: Browser, root: Path) -> None:
    with opened(browser, root):
        name = start_experiment(browser, SMALL | {"method": "fedavg", "rounds": "3000", "evaluate_every": "1000"})
        progress = "#run-progress [role=progressbar]"

        def rounds() -> int:
            return int(browser.script("return document.querySelector(arguments[0])?.ariaValueNow ?? 0", progress))

        browser.wait_until(lambda: state(browser) == "running" and rounds() > 2, "the run does not start")
        browser.save_screenshot("live-running")
        browser.click("#do-stop")
        browser.wait_until(
            lambda: state(browser) == "stopped" and browser.find_all("#do-resume"), "the run does not stop"
        )
        done = int(str(browser.script("return document.title")).partition("/")[0])
        assert 2 < done < 3000 and "resume" in browser.text("#run-message")
        browser.click("#do-resume")
        browser.wait_until(lambda: state(browser) == "running" and rounds() > done, "the run does not continue")
        browser.click("#home")
        browser.wait_until(lambda: name in browser.text("#running"), "the run is not listed as running")
        browser.save_screenshot("live-list-running")
        browser.click("#running a")
        browser.wait_until(
            lambda: browser.find("#run").is_displayed() and browser.find_all("#do-stop"), "the stop button is missing"
        )
        browser.click("#do-stop")
        browser.wait_until(lambda: state(browser) == "stopped", "the resumed run does not stop")


def test_updates_of_running_experiment_keep_clicks_and_focus(browser: Browser, root: Path) -> None:
    with opened(browser, root):
        name = start_experiment(browser, SMALL | {"method": "fedavg", "rounds": "100000", "evaluate_every": "50000"})

        def rounds() -> int:
            return int(browser.text(f'#runs tr[data-run="{name}"] td.number').partition("/")[0] or 0)

        def wait_for_round() -> None:
            done = rounds()
            browser.wait_until(lambda: rounds() > done > 0, "the run does not continue")

        link, box = f'#runs tr[data-run="{name}"] a', f'#runs tr[data-run="{name}"] input'
        for selector in (f'#running li[data-run="{name}"] a', link):
            browser.click("#home")
            browser.wait_until(lambda: rounds() > 0, "the run does not start")
            with browser.mouse_down_on(selector):
                wait_for_round()
            browser.wait_until(lambda: browser.find("#run").is_displayed(), f"the click on {selector} is lost")
        browser.click("#home")
        with browser.mouse_down_on(box):
            wait_for_round()
        assert browser.find(box).is_selected() and browser.text("#compare") == "Compare 1 selected run"
        focused = browser.focused()
        wait_for_round()
        assert browser.focused() == focused == browser.find(box) and focused.is_selected()
        browser.press(" ")
        browser.wait_until(lambda: browser.text("#compare") == "Compare selected runs", "the run stays selected")


def test_running_experiments_keep_their_order(browser: Browser, root: Path) -> None:
    for number, name in enumerate(("finished", "a", "b")):
        make_run(root / name, 1)
        os.utime(root / name / "rounds.jsonl", (1e9 + number, 1e9 + number))
        if name != "finished":
            shutil.rmtree(root / name / "personal")
    with opened(browser, root), folder_lock(root / "a"), folder_lock(root / "b"):
        browser.wait_until(
            lambda: "reading" not in browser.text("#runs") and len(browser.find_all("#running li")) == 2,
            "the runs are not shown as running",
        )
        names = "return [...document.querySelectorAll('#runs tbody tr')].map((row) => row.dataset.run)"
        assert browser.script(names) == ["a", "b", "finished"]  # although b finished its round last


def test_buttons_act_on_the_shown_run(browser: Browser, root: Path) -> None:
    (root / LAUNCHER_FOLDER).mkdir()
    for name in ("first", "second"):  # both failed before their first round
        for suffix, text in ((".toml", "rounds = 1"), (".pid", "1"), (".end", "1")):
            (root / LAUNCHER_FOLDER / f"{name}{suffix}").write_text(text)
    with opened(browser, root):
        for name in ("first", "second"):
            browser.click("#home")
            browser.click(f'#runs tr[data-run="{name}"] a')
            browser.wait_until(
                lambda: browser.text("#run-summary") and browser.find_all("#do-remove"), "the run is not shown"
            )
        browser.click("#do-remove")
        browser.wait_until(lambda: len(browser.find_all("#runs tbody tr")) == 1, "no run is removed from the list")
        assert browser.find_all('#runs tr[data-run="first"]')


def test_selected_runs_are_compared(browser: Browser, compared: Path, runs: dict[tuple[str, int], ft.Run]) -> None:
    with opened(browser, compared / "runs"):
        browser.wait_until(lambda: len(browser.find_all("#runs tbody tr")) == len(runs), "not all runs are listed")
        browser.wait_until(lambda: "reading" not in browser.text("#runs"), "runs are not read")
        selected = [("fedavg", 0), ("local", 0)]
        for method, seed in selected:
            browser.click(f'#runs input[aria-label="Select {method}-seed{seed}"]')
        assert browser.text("#compare") == "Compare 2 selected runs"
        browser.click("#compare")
        browser.wait_until(
            lambda: {"ranking", "curves"} <= set(browser.script("return window.drawn")), "the comparison is not drawn"
        )
        compared_runs = [runs[key] for key in selected]
        expected = {run.method_title: weighted_score(run, run.scores("trained")) for run in compared_runs}
        [trace] = [trace for trace in browser.traces("ranking") if trace["name"] == "trained"]
        assert dict(zip(trace["y"], trace["x"], strict=True)) == approx(expected)
        assert len(browser.text("#comparison-summary")) > 40
        before = drawn_curves(browser, "x")
        browser.figure("curves").find_element("xpath", ".//label[.//span[.='bytes']]").click()
        browser.wait_until(lambda: drawn_curves(browser, "x") != before, "the choice does not change the figure")
        browser.save_screenshot("live-comparison")


def test_client_view_matches_records(browser: Browser, compared: Path, runs: dict[tuple[str, int], ft.Run]) -> None:
    run, number = runs["fedapa", 0], 2
    client = run.info["clients"][number]
    with opened(browser, compared / "runs"):
        browser.wait_until(lambda: browser.find_all('#runs tr[data-run="fedapa-seed0"] a'), "the run is not listed")
        browser.click('#runs tr[data-run="fedapa-seed0"] a')
        browser.wait_until(
            lambda: browser.find_all(f'#clients tr[data-client="{number}"] a'), "the client is not listed"
        )
        browser.click(f'#clients tr[data-client="{number}"] a')
        browser.wait_until(
            lambda: {"history", "classes"} <= set(browser.script("return window.drawn")), "the client is not shown"
        )
        lines = {trace["name"]: trace["y"] for trace in browser.traces("history")}
        for moment in ("trained", "received"):
            expected = [100 * r["per_client"][f"accuracy_{moment}"][number] for r in run.records]
            assert lines[moment] == approx(expected)
        assert browser.traces("classes")[0]["y"] == client["classes"]
        samples = f"{client['train']:,} training samples, {client['test']:,} test samples"
        assert browser.text("#client-summary").startswith(samples)
        weights = np.asarray(run.metric("weights")[ROUNDS], dtype=float)[number]
        weights[number] = -1
        assert browser.text("#neighbors tbody tr a") == run.info["clients"][int(weights.argmax())]["name"]
        browser.save_screenshot("live-client")


VIEWS = {
    "list": "#",
    "new": "#new",
    "run": "#run=fedapa-seed0",
    "client": "#run=fedapa-seed0&client=2",
    "comparison": "#compare=fedavg-seed0&compare=local-seed0",
}


def test_views_fit_small_screens_and_are_reachable_by_keyboard(browser: Browser, compared: Path) -> None:
    with opened(browser, compared / "runs"):
        ready = {"list": "#runs tbody tr", "new": "#sections fieldset", "run": "#clients tbody tr",
                 "client": "#neighbors tbody tr", "comparison": "[data-figure=curves][data-drawn]"}  # fmt: skip
        for view, fragment in VIEWS.items():
            browser.resize(WIDE)
            browser.script("location.hash = arguments[0]", fragment)
            browser.wait_for(f"#{view}:not([hidden]) {ready[view]}")
            browser.wait_until(lambda: "reading" not in browser.text("#runs"), "runs are not read")
            for size in (TABLET, PHONE):
                browser.resize(size)
                too_wide = f"{view} is wider than {size[0]} pixels"
                browser.wait_until(lambda: browser.overflow() <= 0 and not browser.script(SCROLLED_TABLES), too_wide)
                browser.save_screenshot(f"live-{view}-{size[0]}")
            browser.resize(WIDE)
            expected, found = browser.script(FOCUSABLE), tab_order(browser)
            assert [e.get_attribute("outerHTML")[:200] for e in expected if e not in found] == [], view
            assert [e.get_attribute("outerHTML")[:200] for e in expected if not e.accessible_name] == [], view
            browser.set_color_scheme("dark")
            browser.save_screenshot(f"live-{view}-dark")
            browser.set_color_scheme("light")


def test_first_tab_on_a_run_folder_reaches_the_first_element(browser: Browser, compared: Path) -> None:
    """`fedtailor live RUN_FOLDER` shows the run without moving the focus."""
    with opened(browser, compared / "runs" / "fedapa-seed0"):
        browser.wait_for("#run:not([hidden]) #clients tbody tr")
        assert browser.text("#run-title") == "fedapa-seed0" and browser.driver.current_url.endswith("#run=fedapa-seed0")
        assert browser.focused().tag_name == "body"
        browser.press(Keys.TAB)
        assert browser.focused() == browser.script(FOCUSABLE)[0] == browser.find("#skip")
        browser.driver.back()
        browser.wait_until(lambda: browser.find("#list").is_displayed(), "the list is not shown")


def test_page_without_token_shows_error(browser: Browser, root: Path) -> None:
    with dashboard(root) as server:
        bare = server.url.partition("?")[0]
        for guess in (bare, f"{bare}?token=guessed"):
            browser.open(guess)
            assert browser.find("body").text.startswith("Open the URL that fedtailor live printed")
            assert not browser.find_all("#new-link")
        browser.save_screenshot("live-without-token")
        open_dashboard(browser, server.url)
        browser.open(bare)  # the cookie is sufficient now
        browser.wait_until(lambda: browser.find_all("#new-link"), "the cookie is not accepted")
