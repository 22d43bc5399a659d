"""A real browser for tests: Debian's chromium, told what to do by selenium. Makes docs/report.png and live.png too."""

import json
import os
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

import fedtailor as ft

WIDE, TABLET, PHONE = (1200, 900), (768, 1024), (390, 844)
METHODS, SEEDS = ("local", "fedavg", "fedapa", "fedapm", "fedlag", "selffl"), (0, 1)  # of the comparison that is shown
CLIENTS, ROUNDS = 5, 4
PATIENCE = 120  # seconds until what a page should show is missed: machines are busy
ARTEFACTS = Path(os.environ.get("FEDTAILOR_ARTEFACTS") or Path(__file__).parent.parent / "artefacts")
_BROWSERS, _DRIVERS = ("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)
# what a keyboard must reach: of radio buttons the chosen one, from which arrows lead to the others
REACHABLE = """
return [...document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]')].filter((element) =>
  element.tabIndex >= 0 && !element.disabled && element.checkVisibility({visibilityProperty: true})
  && !(element.type === 'radio' && !element.checked))
"""


def what_is_missing() -> str:
    """Why there are no tests in a browser here; nothing where there are."""
    missing = [names[0] for names in (_BROWSERS, _DRIVERS) if _find(names) is None]
    if not missing:
        return ""
    return f"There is no {' and no '.join(missing)} here: apt-get install chromium chromium-driver."


def _find(names: tuple[str, ...]) -> str | None:
    return next((found for name in names if (found := shutil.which(name))), None)


SCROLLED = """
return [...document.querySelectorAll('.table')].filter((table) =>
  table.checkVisibility() && table.scrollWidth > table.clientWidth + 1).length
"""


class Browser:
    """A page in a window, and what the page did."""

    def __init__(self, profile: Path) -> None:
        options = Options()
        options.binary_location = _find(_BROWSERS) or ""
        words = ["--headless=new", f"--user-data-dir={profile}", "--disable-dev-shm-usage", "--hide-scrollbars",
                 "--force-prefers-reduced-motion", "--no-first-run", "--disable-background-networking"]  # fmt: skip
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            words.append("--no-sandbox")  # which root cannot have
        for word in words:
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(_find(_DRIVERS)))
        self.driver.set_page_load_timeout(PATIENCE)
        self.driver.set_script_timeout(PATIENCE)
        self.resize(WIDE)

    def open(self, address: str, network: bool = True) -> None:
        """Open a page anew; nothing of the page before is left in the notes."""
        self.driver.get("about:blank")
        self.tell("Network.enable")
        limits = {"offline": not network, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.tell("Network.emulateNetworkConditions", **limits)
        self.complaints(), self.requests()
        self.driver.get(address)

    def tell(self, command: str, **given: Any) -> Any:
        """A word to the browser itself, in its own language."""
        return self.driver.execute_cdp_cmd(command, given)

    def resize(self, size: tuple[int, int], mobile: bool | None = None, sharp: float = 1) -> None:
        """A window narrower than a browser's own least is one that is pretended."""
        mobile = size == PHONE if mobile is None else mobile
        given = {"width": size[0], "height": size[1], "deviceScaleFactor": sharp, "mobile": mobile}
        self.tell("Emulation.setDeviceMetricsOverride", **given)

    def prefer(self, theme: str) -> None:
        """What the system of the reader is set to: light or dark."""
        self.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def complaints(self) -> list[str]:
        """What the console said since it was last asked: errors and warnings."""
        return [entry["message"] for entry in self._log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """The addresses that were asked for since this was last asked."""
        notes = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        asked = [note["params"]["request"]["url"] for note in notes if note["method"] == "Network.requestWillBeSent"]
        return [address for address in asked if not address.startswith(("data:", "blob:", "about:"))]

    def _log(self, name: str) -> list[dict[str, Any]]:
        return list(self.driver.get_log(name))  # type: ignore[no-untyped-call]

    def script(self, text: str, *given: Any) -> Any:
        return self.driver.execute_script(text, *given)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        """What a condition gives once it holds; `what` says what was waited for in vain."""
        waiting = WebDriverWait(self.driver, PATIENCE, 0.05, [StaleElementReferenceException])
        return waiting.until(lambda _: holds(), f"{what}; the page shows: {self.text('main')[:1500]}")

    def wait_for(self, selector: str) -> WebElement:
        """The element, once it is there."""
        return self.until(lambda: self.all(selector), f"there is no {selector}")[0]  # type: ignore[no-any-return]

    def click(self, selector: str) -> None:
        """Click on an element once it is there; should the page put another in its place meanwhile, on that."""

        def clicked() -> bool:
            self.one(selector).click()
            return True

        self.until(clicked, f"there is no {selector} to click on")

    @contextmanager
    def held_down(self, selector: str) -> Iterator[None]:
        """The mouse goes down on an element, and up when this ends."""
        ActionChains(self.driver, duration=0).click_and_hold(self.wait_for(selector)).perform()
        yield
        ActionChains(self.driver, duration=0).release().perform()

    def press(self, *keys: str) -> None:
        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def focused(self) -> WebElement:
        return self.driver.switch_to.active_element

    def figures(self) -> list[str]:
        """The keys of the figures on the page, each scrolled to and drawn."""
        found = self.script("return [...document.querySelectorAll('figure[data-figure]')].map(f => f.dataset.figure)")
        for key in found:
            self.script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", self.figure(key))
            self.wait_for(f'figure[data-figure="{key}"][data-drawn]')
        return list(found)

    def figure(self, key: str) -> WebElement:
        return self.one(f'figure[data-figure="{key}"]')

    def traces(self, key: str) -> list[dict[str, Any]]:
        """What plotly draws now, as numbers and texts. It keeps long lists packed, so they are unpacked here."""
        script = """
        return document.querySelector(`figure[data-figure="${arguments[0]}"] .plot`).data.map((trace) =>
          JSON.parse(JSON.stringify({name: trace.name ?? null, type: trace.type, x: trace.x ?? null, y: trace.y ?? null,
            z: trace.z ?? null, text: trace.text ?? null, visible: trace.visible ?? true})))"""
        return list(self.script(script, key))

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(self.script("const r = document.documentElement; return r.scrollWidth - r.clientWidth"))

    def picture(self, clip: dict[str, float] | None = None) -> bytes:
        """The whole page, or a part of it, as PNG."""
        size = self.script("const r = document.documentElement; return [r.clientWidth, r.scrollHeight]")
        whole = {"x": 0, "y": 0, "width": size[0], "height": min(size[1], 16_000)}
        given = {"format": "png", "captureBeyondViewport": True, "clip": (clip or whole) | {"scale": 1}}
        return b64decode(self.tell("Page.captureScreenshot", **given)["data"])

    def keep(self, name: str) -> None:
        """A picture of the page for people to look at, in a folder that is not committed."""
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        (ARTEFACTS / f"{name}.png").write_bytes(self.picture())

    def close(self) -> None:
        self.driver.quit()


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The live page of a folder, by the command itself; the address that it printed."""
    words = [sys.executable, "-m", "fedtailor.cli", "live", str(root), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        try:
            assert found is not None, "fedtailor live printed no address"
            yield found.group()
        finally:
            server.terminate()


def near(wanted: Any) -> Any:
    """Figures keep five digits."""
    return pytest.approx(wanted, rel=1e-4, abs=1e-4)


def over_samples(run: ft.Run, scores: dict[int, float]) -> float:
    """The mean over all test samples, in %, from what each client has."""
    tests = [run.info["clients"][client]["test"] for client in scores]
    return float(100 * np.average(list(scores.values()), weights=tests))


def drawn_curves(browser: Browser, axis: str) -> dict[str, list[float]]:
    return {trace["name"]: trace[axis] for trace in browser.traces("curves")}


def tabbed(browser: Browser) -> list[Any]:
    """All elements that Tab leads to, until it comes round."""
    found: list[Any] = []
    for _ in range(500):
        browser.press(Keys.TAB)
        now = browser.focused()
        if now in found:
            return found
        if now.tag_name != "body":  # between the end and the beginning
            found.append(now)
    raise AssertionError("Tab finds no end")
