"""The documentation site: it has a page for everything, links lead somewhere, and it builds without warnings."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedtailor as ft
from support.documented_code import pages

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", list(pages(ROOT)), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    """On GitHub; the site's own build checks its links."""
    for link in _LINK.findall(_FENCED.sub("", page.read_text())):
        file, _, anchor = link.partition("#")
        if ":" in file:  # other hosts
            continue
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_reference_lists_the_whole_public_api() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    listed = {name.rpartition(".")[2] for name in re.findall(r"^   ([\w.]+)$", text, re.MULTILINE)}
    public = {name for name in dir(ft) if not name.startswith("_")} - {"methods"}  # methods have pages of their own
    assert public <= listed


@pytest.mark.slow
def test_site_builds_without_warnings_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    source, built = tmp_path / "source", tmp_path / "html"
    commands = [
        [sys.executable, str(ROOT / "docs" / "site" / "pages.py"), str(source)],
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", str(ROOT / "docs" / "site"), "-D",
         "nb_execution_mode=off", str(source), str(built)],
    ]  # fmt: skip
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    for method in ft.methods.METHODS:
        text = (built / "methods" / f"{method}.html").read_text()
        assert "At a glance" in text and "All fields" in text
    for page in built.rglob("*.html"):
        assert not re.search(r'(?:src=|<link[^>]*href=)"(?:https?:)?//', page.read_text()), page
