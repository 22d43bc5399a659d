"""Take the screenshots of the documentation: `make pictures`, or some of them by name: `python docs/screens.py live`.

`report`, `live`, and `neighbors` show the second comparison of `make run`, `hospitals` the first, and `sweep` a sweep.
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable
from hashlib import sha256
from io import BytesIO
from pathlib import Path

from PIL import Image

from fedtailor.cli.app import app
from fedtailor.reporting.report import write_report
from pictures import COMMAND as DIGITS

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.browser import Browser, missing_programs, serve_dashboard

HERE = Path(__file__).parent.absolute()
WIDTH = 1000  # wide enough for all columns of the list of runs
SCALE = 2 * 830 / WIDTH  # for pages that show images 830 pixels wide, on high-resolution screens
COLORS = 256
MAX_BYTES = 200_000
SELECTED = ("selffl", "fedapa", "local")  # with seed 0
ROUNDS = 60
FORM = {"method": "fedapa", "data.clients": "20", "rounds": str(ROUNDS), "batch_size": "16", "seed": "3"}
HOSPITALS = (
    "fedtailor compare local fedavg fedrep ditto --data heart --network logistic --network.intercept_head true "
    "--metrics auc,accuracy --rounds 20 --batch-size 16 --evaluate-every 5 --folds 5 --repeats 4"
)
SWEEP = (
    "fedtailor sweep --method ditto --method.lr 0.01,0.03,0.1,0.3 --method.lam 0.1,1,10 --data digits --rounds 10 "
    "--batch-size 16 --seed 0,1,2 --validation 0.2"
)


def report(browser: Browser, folder: Path, name: str) -> None:
    """Take a screenshot of a report, from the title to the first figure."""
    open_report(browser, folder)
    save(browser, name, browser.find_all("figure[data-figure] details")[0])


def hospitals(browser: Browser, folder: Path, name: str) -> None:
    """Take a screenshot of the answer for each client, and of the figure of their gains with intervals."""
    open_report(browser, folder)
    browser.script("document.querySelector('figure[data-figure=gainers]').remove()")  # fractions of four clients
    save(browser, name, browser.find_all("#clients figure details")[0], browser.find("#clients"))


def neighbors(browser: Browser, folder: Path, name: str) -> None:
    """Take a screenshot of the answer to which clients learn from which: FedAPA's weights."""
    open_report(browser, folder)
    save(browser, name, browser.find_all("#mixing figure details")[0], browser.find("#mixing"))


def open_report(browser: Browser, folder: Path) -> None:
    """Write the report on a folder, open it, and draw its figures."""
    page = folder.with_suffix(".html")
    write_report([folder], page)
    browser.resize((WIDTH, 1200), device_scale=SCALE)
    browser.open(page.as_uri(), network=False)
    browser.figures()


def live(browser: Browser, folder: Path, name: str) -> None:
    """Take a screenshot of the list of runs: an active one, started from the form, and those of the comparison."""
    browser.resize((WIDTH, 1000), device_scale=SCALE)
    with contextlib.chdir(folder.parent), serve_dashboard(Path(folder.name)) as address:  # show no absolute path
        browser.open(address)
        browser.click("#new-link")
        for field, value in FORM.items():
            browser.wait_for(f'[data-field="{field}"]').send_keys(value)
        browser.click("#start")
        browser.wait_for("#do-stop")
        browser.click("#home")
        progress = "return Number(document.querySelector('#running [role=progressbar]')?.ariaValueNow ?? 0)"
        browser.wait_until(lambda: browser.script(progress) >= ROUNDS // 3, "the run makes no progress")
        for run in SELECTED:
            browser.click(f'#runs input[aria-label="Select {run}-seed0"]')
        browser.wait_until(lambda: "reading" not in browser.text("#runs"), "the runs are not loaded")
        save(browser, name, browser.find_all("#runs tbody tr")[9])
        browser.click("#running a")
        browser.click("#do-stop")
        browser.wait_until(lambda: browser.text("#run-buttons .state") != "running", "the run does not stop")


def save(browser: Browser, name: str, end: object, start: object = None) -> None:
    """Save the page from the top of an element, or of the page, down to the end of another, with a reduced palette."""
    script = """
    scrollTo(0, 0);
    return [arguments[0]?.getBoundingClientRect().top ?? 0, arguments[1].getBoundingClientRect().bottom, innerWidth]"""
    top, bottom, width = browser.script(script, start, end)
    clip = {"x": 0, "y": top, "width": width, "height": bottom - top + 1}
    image = Image.open(BytesIO(browser.screenshot(clip))).convert("RGB")
    reduced = image.quantize(COLORS, kmeans=2, dither=Image.Dither.NONE)
    path = HERE / f"{name}.png"
    reduced.save(path, optimize=True)
    print(f"{path.name}: {image.width} × {image.height}, {path.stat().st_size:,} bytes")
    assert path.stat().st_size < MAX_BYTES, f"{path.name} is too large"


def run_command(command: str, root: Path) -> Path:
    """Return the output folder of a command, which runs once for all pictures."""
    folder = root / sha256(command.encode()).hexdigest()[:8] / "runs"
    if not folder.exists():
        sys.argv = [*command.split(), "--out", str(folder)]
        app(standalone_mode=False)
    return folder


# name of the picture -> how it is taken, and the command whose runs it shows
SCREENS: dict[str, tuple[Callable[[Browser, Path, str], None], str]] = {
    "report": (report, DIGITS),
    "neighbors": (neighbors, DIGITS),
    "live": (live, DIGITS),  # last of these: it adds a run to the folder
    "hospitals": (hospitals, HOSPITALS),
    "sweep": (report, SWEEP),
}


def main(names: list[str]) -> None:
    if missing := missing_programs():
        sys.exit(missing)
    with tempfile.TemporaryDirectory() as temporary:
        browser = Browser(Path(temporary) / "profile")
        try:
            browser.set_color_scheme("light")
            for name in names or SCREENS:
                take, command = SCREENS[name]
                take(browser, run_command(command, Path(temporary)), name)
        finally:
            browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
