"""Take the screenshots docs/report.png, docs/live.png, and docs/sweep.png: the report and the live page on the
second comparison of `make run`, and the report on a sweep. `make pictures` runs it; `python docs/screens.py FOLDER`
uses an existing comparison."""

import contextlib
import shutil
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image

from fedtailor.cli.app import app
from fedtailor.reporting.report import write_report
from pictures import COMMAND

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.browser import Browser, missing_programs, serve_dashboard

HERE = Path(__file__).parent.absolute()
WIDTH = 1000  # wide enough for all columns of the list of runs
SCALE = 2 * 830 / WIDTH  # for pages that show images 830 pixels wide, on high-resolution screens
COLORS = 128
MAX_BYTES = 200_000
SELECTED = ("selffl", "fedapa", "local")  # with seed 0
ROUNDS = 60
FORM = {"method": "fedapa", "data.clients": "20", "rounds": str(ROUNDS), "batch_size": "16", "seed": "3"}
SWEEP = (
    "fedtailor sweep --method ditto --method.lr 0.01,0.03,0.1,0.3 --method.lam 0.1,1,10 --data digits --rounds 10 "
    "--batch-size 16 --seed 0,1,2 --validation 0.2"
)


def report(browser: Browser, folder: Path, name: str) -> None:
    """Take a screenshot of the report, from the title to the first figure."""
    page = folder.parent / f"{name}.html"
    write_report([folder], page)
    browser.resize((WIDTH, 1200), device_scale=SCALE)
    browser.open(page.as_uri(), network=False)
    browser.figures()
    save(browser, name, browser.find_all("figure[data-figure] details")[0])


def live(browser: Browser, folder: Path) -> None:
    """Take a screenshot of the list of runs: an active one, started from the form, and those of the comparison."""
    browser.resize((WIDTH, 1000), device_scale=SCALE)
    with contextlib.chdir(folder.parent), serve_dashboard(Path(folder.name)) as address:  # show no absolute path
        browser.open(address)
        browser.click("#new-link")
        for name, value in FORM.items():
            browser.wait_for(f'[data-field="{name}"]').send_keys(value)
        browser.click("#start")
        browser.wait_for("#do-stop")
        browser.click("#home")
        progress = "return Number(document.querySelector('#running [role=progressbar]')?.ariaValueNow ?? 0)"
        browser.wait_until(lambda: browser.script(progress) >= ROUNDS // 3, "the run makes no progress")
        for name in SELECTED:
            browser.click(f'#runs input[aria-label="Select {name}-seed0"]')
        browser.wait_until(lambda: "reading" not in browser.text("#runs"), "the runs are not loaded")
        save(browser, "live", browser.find_all("#runs tbody tr")[9])
        browser.click("#running a")
        browser.click("#do-stop")
        browser.wait_until(lambda: browser.text("#run-buttons .state") != "running", "the run does not stop")


def save(browser: Browser, name: str, end: object) -> None:
    """Save the page down to an element, with a reduced palette."""
    script = "scrollTo(0, 0); return [innerWidth, arguments[0].getBoundingClientRect().bottom + scrollY]"
    width, height = browser.script(script, end)
    clip = {"x": 0, "y": 0, "width": width, "height": height + 1}
    image = Image.open(BytesIO(browser.screenshot(clip))).convert("RGB")
    reduced = image.quantize(COLORS, kmeans=2, dither=Image.Dither.NONE)
    path = HERE / f"{name}.png"
    reduced.save(path, optimize=True)
    print(f"{path.name}: {image.width} × {image.height}, {path.stat().st_size:,} bytes")
    assert path.stat().st_size < MAX_BYTES, f"{path.name} is too large"


def run_command(command: str, folder: Path) -> None:
    """Run a command with an output folder."""
    sys.argv = [*command.split(), "--out", str(folder)]
    app(standalone_mode=False)


def main(folder: Path | None) -> None:
    if missing := missing_programs():
        sys.exit(missing)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        runs = work / "runs"  # a copy, because one more run is started in it
        run_command(COMMAND, runs) if folder is None else shutil.copytree(folder, runs)
        browser = Browser(work / "profile")
        try:
            browser.set_color_scheme("light")
            report(browser, runs, "report")
            live(browser, runs)
            run_command(SWEEP, work / "sweep")
            report(browser, work / "sweep", "sweep")
        finally:
            browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else None)
