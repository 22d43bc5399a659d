"""Examples, and pages of methods and papers that are written by hand."""

import dataclasses
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.papers.definition import PAPERS, load_paper

ROOT = Path(__file__).parent.parent


def run_python(*words: str) -> str:
    """Run a script in the root of the repository, and return its output."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_own_method_example_beats_fedavg() -> None:
    output = run_python("examples/own_method.py")
    accuracies = [float(accuracy) for accuracy in re.findall(r"([\d.]+)% as received", output)]
    assert len(accuracies) == 3
    assert min(accuracies[1:]) > accuracies[0]


def test_own_data_example_prints_one_row_per_method() -> None:
    rows = run_python("examples/own_data.py").splitlines()
    assert [row[:15].strip() for row in rows] == ["accuracy", "Local training", "FedAvg", "FedPer", "Ditto"]
    assert all(len(row[15:].split()) == 4 for row in rows)


@pytest.mark.slow
def test_hospitals_example_answers_for_each_hospital(tmp_path: Path) -> None:
    example = runpy.run_path(str(ROOT / "examples/hospitals.py"))
    example["write_hospitals"](tmp_path)
    result = example["answer"](tmp_path, repeats=1)
    assert "federation" in result.verdict().partition(".")[0]
    for hospital in ("Cleveland", "Hungary", "Switzerland", "Long Beach VA"):
        assert re.search(rf"^ {hospital} *$", result.table(), re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "methods"),
    [
        ("fedapa", [ft.methods.FedAPA]),
        ("fedapm", [ft.methods.FedAPM]),
        ("fedlag", [ft.methods.FedLAG, ft.methods.LAG]),
        ("selffl", [ft.methods.SelfFL]),
    ],
)
def test_method_page_lists_exactly_the_fields_of_the_method(page: str, methods: list[type[ft.Method]]) -> None:
    text = (ROOT / "docs" / "methods" / f"{page}.md").read_text()
    table = text.split("## Fields")[1].split("\n\n")[1]
    named = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    shared = {field.name for field in dataclasses.fields(ft.LocalTraining)}  # on the page of local training
    fields = {field.name for method in methods for field in dataclasses.fields(method)}
    assert len(named) == len(set(named)) and fields - shared <= set(named) <= fields
    assert "](../training.md)" in text
    assert f"]({page}.svg)" in text and (ROOT / "docs" / "methods" / f"{page}.svg").is_file()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / "methods" / target).is_file(), target


@pytest.mark.parametrize("name", PAPERS)
def test_page_of_a_paper_has_its_claims_and_tables(name: str) -> None:
    """`make papers` was run after the definition was changed."""
    text, paper = (ROOT / "docs" / "papers" / f"{name}.md").read_text(), load_paper(name)
    assert all(claim.text in text for claim in paper.claims)
    assert all(f"\n### {table.id}: {table.title}\n" in text for table in paper.tables)
    assert all(f"- {choice.what}: " in text for choice in paper.choices)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (ROOT / "docs" / "papers" / target).is_file(), target
