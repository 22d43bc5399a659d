"""Makes docs/report.png, docs/live.png and docs/sweep.png: the report and the live page on the comparison of `make run`
and the report on a sweep, as a browser shows them. `make pictures`; `python docs/screens.py FOLDER` takes a comparison
that is there already."""

import contextlib
import shutil
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image

from fedtailor import cli
from fedtailor.see.report import write_report
from pictures import COMMAND

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from browsing import Browser, served, what_is_missing

HERE = Path(__file__).parent.absolute()
WIDTH = 1000  # so wide that a list of runs has all its columns
SHARP = 2 * 830 / WIDTH  # for pages that show pictures 830 wide, sharp on screens that show more
COLOURS = 128  # letters, lines and a few methods need no more
LARGEST = 200_000  # bytes
TICKED = ("selffl", "fedapa", "local")  # of the first seed
ROUNDS = 60
STARTED = {"method": "fedapa", "data.clients": "20", "rounds": str(ROUNDS), "batch_size": "16", "seed": "3"}
SWEEP = (
    "fedtailor sweep --method ditto --method.lr 0.01,0.03,0.1,0.3 --method.lam 0.1,1,10 --data digits --rounds 10 "
    "--batch-size 16 --seed 0,1,2 --validation 0.2"
)


def report(browser: Browser, folder: Path, name: str) -> None:
    """From the title to the first figure."""
    page = folder.parent / f"{name}.html"
    write_report([folder], page)
    browser.resize((WIDTH, 1200), sharp=SHARP)
    browser.open(page.as_uri(), network=False)
    browser.figures()
    save(browser, name, browser.all("figure[data-figure] details")[0])


def live(browser: Browser, folder: Path) -> None:
    """The list: one run that goes on, started from the form, and those of the comparison, some of them ticked."""
    browser.resize((WIDTH, 1000), sharp=SHARP)
    with contextlib.chdir(folder.parent), served(Path(folder.name)) as address:  # no path of a machine is to be seen
        browser.open(address)
        browser.click("#new-link")
        for name, value in STARTED.items():
            browser.wait_for(f'[data-field="{name}"]').send_keys(value)
        browser.click("#start")
        browser.wait_for("#do-stop")
        browser.click("#home")
        done = "return Number(document.querySelector('#running [role=progressbar]')?.ariaValueNow ?? 0)"
        browser.until(lambda: browser.script(done) >= ROUNDS // 3, "the run does not go on")
        for name in TICKED:
            browser.click(f'#runs input[aria-label="tick {name}-seed0"]')
        browser.until(lambda: "reading" not in browser.text("#runs"), "runs are not read")
        save(browser, "live", browser.all("#runs tbody tr")[9])
        browser.click("#running a")
        browser.click("#do-stop")
        browser.until(lambda: browser.text("#run-buttons .state") != "running", "the run does not stop")


def save(browser: Browser, name: str, end: object) -> None:
    """The page down to an element, in few colours."""
    script = "scrollTo(0, 0); return [innerWidth, arguments[0].getBoundingClientRect().bottom + scrollY]"
    width, height = browser.script(script, end)
    picture = Image.open(BytesIO(browser.picture({"x": 0, "y": 0, "width": width, "height": height + 1}))).convert(
        "RGB"
    )
    few = picture.quantize(COLOURS, kmeans=2, dither=Image.Dither.NONE)
    path = HERE / f"{name}.png"
    few.save(path, optimize=True)
    print(f"{path.name}: {picture.width} × {picture.height}, {path.stat().st_size:,} bytes")
    assert path.stat().st_size < LARGEST, f"{path.name} is too large"


def carry_out(command: str, folder: Path) -> None:
    """A command, into a folder."""
    sys.argv = [*command.split(), "--out", str(folder)]
    cli.app(standalone_mode=False)


def main(folder: Path | None) -> None:
    if words := what_is_missing():
        sys.exit(words)
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        runs = work / "runs"  # a copy, for one more is started
        carry_out(COMMAND, runs) if folder is None else shutil.copytree(folder, runs)
        browser = Browser(work / "profile")
        try:
            browser.prefer("light")
            report(browser, runs, "report")
            live(browser, runs)
            carry_out(SWEEP, work / "swept")
            report(browser, work / "swept", "sweep")
        finally:
            browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else None)
