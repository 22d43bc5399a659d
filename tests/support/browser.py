"""A headless Chromium for tests, controlled by selenium; docs/screens.py uses it too."""

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
METHODS, SEEDS = ("local", "fedavg", "fedapa", "fedapm", "fedlag", "selffl"), (0, 1)  # of the example comparison
CLIENTS, ROUNDS = 5, 4
TIMEOUT = 120  # seconds; generous, because test machines can be busy
ARTIFACTS = Path(os.environ.get("FEDTAILOR_ARTIFACTS") or Path(__file__).parents[2] / "artifacts")
_BROWSERS, _DRIVERS = ("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)
# Elements that Tab must reach. In a group of radio buttons, only the selected one is: arrow keys reach the others.
FOCUSABLE = """
return [...document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]')].filter((element) =>
  element.tabIndex >= 0 && !element.disabled && element.checkVisibility({visibilityProperty: true})
  && !(element.type === 'radio' && !element.checked))
"""


def missing_programs() -> str:
    """Return which programs are missing for browser tests, or an empty string."""
    missing = [names[0] for names in (_BROWSERS, _DRIVERS) if _find(names) is None]
    if not missing:
        return ""
    return f"Missing programs: {', '.join(missing)}. Install them with apt-get install chromium chromium-driver."


def _find(names: tuple[str, ...]) -> str | None:
    return next((found for name in names if (found := shutil.which(name))), None)


SCROLLED_TABLES = """
return [...document.querySelectorAll('.table')].filter((table) =>
  table.checkVisibility() && table.scrollWidth > table.clientWidth + 1).length
"""


class Browser:
    """A browser window with one page, its console log, and its network requests."""

    def __init__(self, profile: Path) -> None:
        options = Options()
        options.binary_location = _find(_BROWSERS) or ""
        arguments = ["--headless=new", f"--user-data-dir={profile}", "--disable-dev-shm-usage", "--hide-scrollbars",
                 "--force-prefers-reduced-motion", "--no-first-run", "--disable-background-networking"]  # fmt: skip
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            arguments.append("--no-sandbox")  # the sandbox does not work for root
        for argument in arguments:
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(_find(_DRIVERS)))
        self.driver.set_page_load_timeout(TIMEOUT)
        self.driver.set_script_timeout(TIMEOUT)
        self.resize(WIDE)

    def open(self, address: str, network: bool = True) -> None:
        """Open a page and clear the logs of the previous page."""
        self.driver.get("about:blank")
        self.send_cdp("Network.enable")
        limits = {"offline": not network, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.send_cdp("Network.emulateNetworkConditions", **limits)
        self.console_errors(), self.requests()
        self.driver.get(address)

    def send_cdp(self, command: str, **given: Any) -> Any:
        """Send a command of the Chrome DevTools Protocol."""
        return self.driver.execute_cdp_cmd(command, given)

    def resize(self, size: tuple[int, int], mobile: bool | None = None, device_scale: float = 1) -> None:
        """Emulate a window size, which can be narrower than the minimum of a real window."""
        mobile = size == PHONE if mobile is None else mobile
        given = {"width": size[0], "height": size[1], "deviceScaleFactor": device_scale, "mobile": mobile}
        self.send_cdp("Emulation.setDeviceMetricsOverride", **given)

    def set_color_scheme(self, theme: str) -> None:
        """Set the color scheme of the system, 'light' or 'dark'."""
        self.send_cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def console_errors(self) -> list[str]:
        """Return the errors and warnings in the console since the last call."""
        return [entry["message"] for entry in self._log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Return the addresses requested since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [address for address in urls if not address.startswith(("data:", "blob:", "about:"))]

    def _log(self, name: str) -> list[dict[str, Any]]:
        return list(self.driver.get_log(name))  # type: ignore[no-untyped-call]

    def script(self, text: str, *given: Any) -> Any:
        return self.driver.execute_script(text, *given)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def wait_until(self, condition: Callable[[], Any], what: str) -> Any:
        """Return the value of a condition once it is true; `what` is the error message if it never is."""
        wait = WebDriverWait(self.driver, TIMEOUT, 0.05, [StaleElementReferenceException])
        return wait.until(lambda _: condition(), f"{what}; the page shows: {self.text('main')[:1500]}")

    def wait_for(self, selector: str) -> WebElement:
        """Return the element once it exists."""
        return self.wait_until(lambda: self.find_all(selector), f"{selector} does not exist")[0]  # type: ignore[no-any-return]

    def click(self, selector: str) -> None:
        """Click an element once it exists; retry if the page replaces it meanwhile."""

        def clicked() -> bool:
            self.find(selector).click()
            return True

        self.wait_until(clicked, f"{selector} cannot be clicked")

    @contextmanager
    def mouse_down_on(self, selector: str) -> Iterator[None]:
        """Hold the mouse button down on an element until the context ends."""
        ActionChains(self.driver, duration=0).click_and_hold(self.wait_for(selector)).perform()
        yield
        ActionChains(self.driver, duration=0).release().perform()

    def press(self, *keys: str) -> None:
        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def focused(self) -> WebElement:
        return self.driver.switch_to.active_element

    def scroll_to_top(self) -> None:
        """Scroll to the top with nothing focused, so that Tab starts at the first element.

        Tab continues from the element that was last focused, clicked, or scrolled to by a script. Scrolling does not
        reset this position, but focusing the root element does.
        """
        self.script("""
        const root = document.documentElement;
        root.tabIndex = -1;
        root.focus({preventScroll: true});
        root.blur();
        root.removeAttribute('tabindex');
        scrollTo({top: 0, behavior: 'instant'})""")

    def figures(self, *keys: str) -> list[str]:
        """Scroll to the figures with these keys, or to all, until they are drawn; return the keys."""
        all_keys = "return [...document.querySelectorAll('figure[data-figure]')].map(f => f.dataset.figure)"
        found = keys or self.script(all_keys)
        for key in found:
            self.script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", self.figure(key))
            self.wait_for(f'figure[data-figure="{key}"][data-drawn]')
        return list(found)

    def figure(self, key: str) -> WebElement:
        return self.find(f'figure[data-figure="{key}"]')

    def traces(self, key: str) -> list[dict[str, Any]]:
        """Return the traces that plotly draws now, with typed arrays converted to lists."""
        script = """
        return document.querySelector(`figure[data-figure="${arguments[0]}"] .plot`).data.map((trace) =>
          JSON.parse(JSON.stringify({name: trace.name ?? null, type: trace.type, x: trace.x ?? null, y: trace.y ?? null,
            z: trace.z ?? null, text: trace.text ?? null, visible: trace.visible ?? true})))"""
        return list(self.script(script, key))

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than the window."""
        return int(self.script("const r = document.documentElement; return r.scrollWidth - r.clientWidth"))

    def screenshot(self, clip: dict[str, float] | None = None) -> bytes:
        """Return the page, or a part of it, as PNG."""
        size = self.script("const r = document.documentElement; return [r.clientWidth, r.scrollHeight]")
        whole = {"x": 0, "y": 0, "width": size[0], "height": min(size[1], 16_000)}
        given = {"format": "png", "captureBeyondViewport": True, "clip": (clip or whole) | {"scale": 1}}
        return b64decode(self.send_cdp("Page.captureScreenshot", **given)["data"])

    def save_screenshot(self, name: str) -> None:
        """Save a screenshot for people to inspect, in a folder that is not committed."""
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        (ARTIFACTS / f"{name}.png").write_bytes(self.screenshot())

    def close(self) -> None:
        self.driver.quit()


@contextmanager
def serve_dashboard(root: Path) -> Iterator[str]:
    """Run `fedtailor live` on a folder and yield the address that it prints."""
    command = [sys.executable, "-m", "fedtailor.cli.main", "live", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        try:
            assert found is not None, "fedtailor live printed no address"
            yield found.group()
        finally:
            server.terminate()


def approx(wanted: Any) -> Any:
    """Compare with the precision of figures, which is five digits."""
    return pytest.approx(wanted, rel=1e-4, abs=1e-4)


def weighted_score(run: ft.Run, scores: dict[int, float]) -> float:
    """Return the mean over all test samples in %, from the clients' scores."""
    tests = [run.info["clients"][client]["test"] for client in scores]
    return float(100 * np.average(list(scores.values()), weights=tests))


def drawn_curves(browser: Browser, axis: str) -> dict[str, list[float]]:
    """Return method -> coordinates of its line, without the bands over seeds."""
    return {trace["name"]: trace[axis] for trace in browser.traces("curves") if not trace["name"].endswith("all seeds")}


def tab_order(browser: Browser) -> list[Any]:
    """Return the elements that Tab reaches from the top of the page, until it starts over."""
    browser.scroll_to_top()
    browser.script("""
    if (!window.focusOrder) document.addEventListener('focusin', (event) => window.focusOrder.push(event.target));
    window.focusOrder = []""")
    for _ in range(25):
        browser.press(*[Keys.TAB] * 20)
        found = browser.script("return window.focusOrder")
        if found[0] in found[1:]:
            return list(found[: found.index(found[0], 1)])
    raise AssertionError("Tab does not start over after 500 elements.")
