"""The examples run and say what they promise; the pages' own code blocks run too."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import fedtailor as ft

ROOT = Path(__file__).parent.parent


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_own_method() -> None:
    shares = [float(share) for share in re.findall(r"([\d.]+)% as received", run("examples/own_method.py"))]
    assert len(shares) == 3
    assert min(shares[1:]) > shares[0]  # keeping a part of the own model beats FedAvg's one model for all here


def test_own_data() -> None:
    rows = run("examples/own_data.py").splitlines()
    assert [row.split()[0] for row in rows] == ["accuracy", "Local", "FedAvg", "FedPer", "Ditto"]
    assert all(len(row.split()) == 5 for row in rows)


@pytest.mark.parametrize(
    ("page", "methods"),
    [
        ("fedapa", [ft.methods.FedAPA]),
        ("fedapm", [ft.methods.FedAPM]),
        ("fedlag", [ft.methods.FedLAG, ft.methods.LAG]),
        ("selffl", [ft.methods.SelfFL]),
    ],
)
def test_a_methods_page_names_every_field_and_nothing_else(page: str, methods: list[type[ft.Method]]) -> None:
    text = (ROOT / "docs" / "methods" / f"{page}.md").read_text()
    table = text.split("## Fields")[1].split("\n\n")[1]
    named = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(named) == sorted({field.name for method in methods for field in dataclasses.fields(method)})
    assert f"]({page}.svg)" in text and (ROOT / "docs" / "methods" / f"{page}.svg").is_file()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / "methods" / target).is_file(), target


GUIDES = ("engines", "methods/selffl", "runs", "channel", "deploy", "models", "report", "trackers")
PAGES = ["README", "CONTRIBUTING", *(f"docs/{page}" for page in GUIDES)]


@pytest.mark.parametrize(
    "page", [p if p in PAGES[:2] else pytest.param(p, marks=pytest.mark.slow) for p in (*PAGES, "docs/heterogeneity")]
)
def test_python_blocks_of_the_pages_run(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^ *```python\n(.*?)```", (ROOT / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n".join(dedent(block) for block in blocks))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
