"""Image files contain what the report draws, and no file of others is replaced."""

import asyncio
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from conftest import error_message
from fedtailor.cli.main import main
from fedtailor.reporting import figure_files
from fedtailor.reporting.figure_files import write_figures
from fedtailor.runs.run import Run
from support.browser import missing_programs
from support.dashboard_client import make_run
from support.example_runs import run_with_scores, runs_with_clear_winner

MISSING = missing_programs()
needs_browser = pytest.mark.skipif(bool(MISSING), reason=MISSING)
Wanted = Sequence[tuple[str, str]]


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """Replace the browser; return the figures that it would draw."""
    calls: list[Mapping[str, Any]] = []

    def render(figures: Mapping[str, Any], wanted: Wanted) -> dict[tuple[str, str], bytes]:
        calls.append(figures)
        return {(name, form): f"{name} as {form}".encode() for name, form in wanted}

    monkeypatch.setattr(figure_files, "_render", render)
    return calls


def one_run(data: str = "a") -> Run:
    run = run_with_scores("fedper", {0: 0.8, 1: 0.6}, before={0: 0.2, 1: 0.1})
    run.experiment["data"]["name"] = data
    return run


@needs_browser
@pytest.mark.slow
def test_images_are_readable_without_the_page(tmp_path: Path) -> None:
    """Title, axis title, labels of the lines, and legend are text in the SVG; the PNG has two pixels per point."""
    files = write_figures(runs_with_clear_winner(seeds=3, clients=4), tmp_path)
    texts = {path.stem: re.findall(r">([^<>]+)<", path.read_text("utf-8")) for path in files if path.suffix == ".svg"}
    shown = {text.strip() for text in texts["curves"]}
    assert {"round", "accuracy, %", "FedPer", "Local training"} <= shown
    assert "Accuracy during training (rounds; trained (before aggregation))" in shown  # the options of the controls
    assert {"Ranking", "trained", "received", "Ditto"} <= set(texts["ranking"])
    for name in texts:
        width, height = re.search(
            r'width="(\d+)" height="(\d+)"', (tmp_path / f"{name}.svg").read_text("utf-8")
        ).groups()  # type: ignore[union-attr]
        with Image.open(tmp_path / f"{name}.png") as image:
            assert image.size == (2 * int(width), 2 * int(height)) and int(width) == 800
            assert len(set(image.convert("L").tobytes())) > 10, f"{name} is empty"
        assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    captions = (tmp_path / "captions.md").read_text("utf-8")
    assert all(f"\n## {name}\n" in captions for name in texts) and "FedPer ranks first with" in captions


@needs_browser
@pytest.mark.slow
def test_images_can_be_written_while_an_event_loop_is_running(tmp_path: Path) -> None:
    """As in a notebook."""

    async def cell() -> list[Path]:
        return write_figures([one_run()], tmp_path, ["svg"])

    assert all(path.read_bytes().startswith(b"<svg") for path in asyncio.run(cell()))


def test_files_of_an_earlier_call_are_replaced_and_others_kept(
    rendered: list[Mapping[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):
        files = write_figures([one_run()], tmp_path, ["svg"])
    assert (tmp_path / "curves.svg").read_bytes() == b"curves as svg" and tmp_path / "curves.svg" in files
    before = (tmp_path / "captions.md").read_text("utf-8")
    write_figures([run_with_scores("fedper", {0: 0.8}, rounds=1)], tmp_path, ["svg"])  # a run without curves
    assert (tmp_path / "captions.md").read_text("utf-8").count("## curves") == before.count("## curves") == 1
    write_figures([one_run()], tmp_path, ["svg"])  # the earlier curves may still be replaced
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "curves.png").write_text("mine")
    message = error_message(lambda: write_figures([one_run()], tmp_path / "other", ["svg", "png"]))
    assert "curves.png' exists and was not written by FedTailor" in message and len(rendered) == 4
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["curves.png"]
    (tmp_path / "other" / "curves.png").rename(tmp_path / "other" / "captions.md")
    assert "captions.md' exists" in error_message(lambda: write_figures([one_run()], tmp_path / "other", ["svg"]))


def test_experiments_have_separate_files(rendered: list[Mapping[str, Any]], tmp_path: Path) -> None:
    names = [path.name for path in write_figures([one_run("a"), one_run("b")], tmp_path, ["pdf", "pdf"])]
    expected = [f"{chapter}-{key}.pdf" for chapter in (1, 2) for key in ("ranking", "curves", "clients", "split")]
    assert names == expected and len(rendered) == 1


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda folder: write_figures([one_run()], folder, ["gif"]), "There is no image format 'gif'; there are svg"),
        (lambda folder: write_figures([one_run()], folder, []), "No image format was given; there are svg, pdf, png."),
        (lambda folder: write_figures([one_run()], folder / "file" / "x", ["svg"]), "Not a directory"),
    ],
    ids=["format", "no format", "folder"],
)
def test_invalid_arguments_raise_error(
    call: Callable[[Path], Any], expected: str, rendered: list[Mapping[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert expected in error_message(lambda: call(tmp_path))


def test_missing_browser_and_library_give_installation_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    message = error_message(lambda: write_figures([one_run()], tmp_path / "figures"))
    assert message.startswith("No Chromium or Chrome was found") and "apt-get install chromium" in message
    monkeypatch.setitem(sys.modules, "kaleido", None)
    message = error_message(lambda: write_figures([one_run()], tmp_path / "figures"))
    assert message == "Image files need kaleido: pip install 'fedtailor[figures]'."
    assert not (tmp_path / "figures").exists()


def test_report_command_writes_figures_and_the_page_only_on_request(
    rendered: list[Mapping[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", 2)
    for extra, pages in (([], []), (["--out", "page.html"], ["page.html"])):
        command = ["fedtailor", "report", "run", "--figures", "figures", "--format", "SVG, png", *extra]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (0, None)
        assert "4 figures saved in figures as svg, png;" in capsys.readouterr().out
        assert [path.name for path in tmp_path.glob("*.html")] == pages
    assert {path.suffix for path in Path("figures").iterdir()} == {".svg", ".png", ".md"}
