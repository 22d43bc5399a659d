"""The report on a paper: its figures have the printed values and ours, and missing cells are visible."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedtailor.errors import FedTailorError
from fedtailor.papers.cells import Cell
from fedtailor.papers.running import compare, read_done, select_cells
from fedtailor.reporting.figures.figure import Figure
from fedtailor.reporting.figures.paper_dots import paper_dots
from fedtailor.reporting.page import render_page
from fedtailor.reporting.paper_report import build_paper_page
from support.paper_results import write_results


def score(cell: Cell, seed: int) -> float:
    """80, 81, and 82 in the first columns, so that the mean is 81 and the deviation is 1."""
    return 80.0 + seed


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Results of FedAPA and local training in one column of Table 1."""
    cells = select_cells("fedapa", "table-1-20-clients", ["cifar10-practical"])
    wanted = [cell for cell in cells if cell.row.label in ("FedAPA", "Local training")]
    return write_results(tmp_path / "fedapa.jsonl", wanted, score)


def panel(figure: Figure, number: int) -> dict[str, Any]:
    """The traces of a panel by their names."""
    axis = f"x{number + 1}" if number else "x"
    return {str(trace.get("name", "lines")): trace for trace in figure.data if trace["xaxis"] == axis}


def dots(results: Path, table: str, paper: str = "fedapa") -> Figure:
    figure = paper_dots(compare(select_cells(paper, table), read_done(results)))
    assert figure is not None
    return figure


def test_dots_show_printed_values_and_our_means_with_deviations(results: Path) -> None:
    figure = dots(results, "table-1-20-clients")
    assert [note["text"] for note in figure.layout["annotations"]][4] == "<b>cifar10-practical</b>"
    practical = panel(figure, 4)
    printed = dict(zip(practical["paper"]["y"], practical["paper"]["x"], strict=True))
    assert printed["FedAPA"] == 85.85 and len(printed) == 12  # the baselines that we added have no printed value
    assert practical["ours"]["y"] == ["FedAPA", "Local training †"] and practical["ours"]["x"] == [81, 81]
    assert practical["ours"]["error_x"]["array"] == [1, 1]
    assert practical["lines"]["x"] == [85.85, 81, None]  # local training has nothing to be connected with
    assert figure.summary.startswith("Our mean differs from the paper's value by -4.85 at most (FedAPA, cifar10-prac")


def test_cells_that_are_not_run_are_crosses_and_say_why(results: Path) -> None:
    figure = dots(results, "table-1-20-clients")
    missing = panel(figure, 4)["not run"]["y"]
    assert len(missing) == 14 and "FedAvg" in missing and "FedAPA" not in missing
    assert len(panel(figure, 0)["not run"]["y"]) == 16
    rows = {(row[0], row[1]): row for row in figure.table.rows}
    assert rows["FedAPA", "cifar10-practical"][2:] == ["85.85", "–", "81.00", "1.00", 3, "-4.85", "no", ""]
    assert rows["FedAvg", "cifar10-practical"][-1] == "not run yet"


def test_all_panels_fit_into_the_figure_without_overlap(results: Path) -> None:
    layout = dots(results, "table-1-20-clients").layout
    arrangements: list[dict[str, Any]] = [{}, layout["meta"]["narrow"]]  # on a desk and on a phone
    for arrangement in arrangements:
        boxes: list[tuple[list[float], list[float]]] = []
        for number in ("", *"23456"):
            x, y = (
                arrangement.get(f"{axis}axis{number}.domain", layout[f"{axis}axis{number}"]["domain"]) for axis in "xy"
            )
            assert 0 <= x[0] < x[1] <= 1 and 0 <= y[0] < y[1] <= 1
            assert all(x[0] >= a[1] or a[0] >= x[1] or y[0] >= b[1] or b[0] >= y[1] for a, b in boxes)
            boxes.append((x, y))
    assert all(layout["meta"]["narrow"][f"xaxis{number}.domain"] == [0, 1] for number in ("", *"23456"))


def test_columns_that_cannot_be_run_have_no_panel(tmp_path: Path) -> None:
    figure = dots(tmp_path / "none.jsonl", "table-4", "fedapm")
    assert len(figure.layout["annotations"]) == 3  # CIFAR-10 of 18 columns
    reasons = {row[-1] for row in figure.table.rows if row[1].startswith("crisis-mmd")}
    assert reasons == {"needs the features of CrisisMMD, which cannot be downloaded"}
    assert paper_dots(compare(select_cells("selffl", "table-2a"), {})) is None
    assert paper_dots(compare(select_cells("selffl", "figure-1a"), {})) is None  # no number is printed, and none run


def test_page_has_verdicts_tables_choices_and_the_source_of_runs(results: Path) -> None:
    page = build_paper_page([results])
    claims, table, *_, reading = page.chapters[0].sections
    verdicts = claims.tables[0][1].rows
    assert (
        verdicts[0][2] == "holds: 10 of 12 comparisons; lead -0.51 to +1.3"
        and verdicts[0][3] == "open: nothing run yet"
    )
    assert (
        verdicts[1][4] == "does not hold: 0 of 1 comparisons, 5 not run yet; lead +0; 3 seeds"
    )  # equal to local training
    assert table.answer[:2] == ["2 of 96 cells have been run.", "0 of 1 printed values are within the spread of ours."]
    side_by_side = {row[0]: row for row in table.tables[0][1].rows}
    assert side_by_side["FedAPA"][5] == "85.85 / 81.00 ± 1.00 ≠"
    assert side_by_side["Local training †"][5] == "81.00 ± 1.00" and side_by_side["FedAvg"][5] == "56.68 / –"
    assert table.commands == ["fedtailor paper run fedapa table-1-20-clients"]
    assert list(reading.tables[-1][1].rows) == [["a test", "2", "1", "2026-01-01", 6]]
    html = render_page(page)
    assert "best round by test accuracy" in html and "the same number as FedPAC in Tables 1 and 2" in html


def test_diverged_runs_are_not_shown_as_not_run(results: Path) -> None:
    cells = select_cells("fedapa", "table-1-20-clients", ["cifar10-practical"])
    cell = next(one for one in cells if one.row.label == "FedAvg")
    line = {"fingerprint": cell.setup.fingerprint, "seed": 0, "error": "The loss is not finite.", "repeat": False}
    about = {"device": "a test", "torch": "2", "fedtailor": "1", "date": "2026-01-01"}
    with results.open("a") as file:
        file.write(json.dumps(line | about) + "\n")
    rows = {(row[0], row[1]): row for row in dots(results, "table-1-20-clients").table.rows}
    assert rows["FedAvg", "cifar10-practical"][-1] == "The loss is not finite."
    table = build_paper_page([results]).chapters[0].sections[1].tables[0][1]
    assert {row[0]: row for row in table.rows}["FedAvg"][5] == "56.68 / failed"


def test_several_papers_are_chapters(results: Path) -> None:
    other = write_results(results.parent / "selffl-mnist.jsonl", select_cells("selffl", "figure-1a"), score)
    assert [chapter.title for chapter in build_paper_page([results, other]).chapters] == ["FedAPA", "Self-FL"]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["fedapa.jsonl", "runs"], "'runs' is not a file of a paper's results"),
        (["other.jsonl"], "must begin with that of a paper"),
        (["fedlag.jsonl"], "write it with 'fedtailor paper run fedlag'"),
    ],
)
def test_files_that_are_no_results_are_errors(results: Path, names: list[str], problem: str) -> None:
    (results.parent / "other.jsonl").touch()
    paths = [Path(name) if name == "runs" else results.parent / name for name in names]
    with pytest.raises(FedTailorError, match=problem):
        build_paper_page(paths)
