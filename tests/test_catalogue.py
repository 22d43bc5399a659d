"""What is told of every method: its paper, what crosses, what stays."""

from pathlib import Path

import pytest

from fedtailor.catalogue import as_markdown, catalogue
from fedtailor.methods import METHODS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_names_its_paper(name: str) -> None:
    entry = catalogue()[name]
    if name == "local":  # which is nobody's
        assert entry.paper.startswith("Training alone")
        return
    assert entry.authors and entry.title and entry.venue
    assert entry.year.isdigit() or entry.venue == "under review"
    assert entry.down and entry.up and entry.keeps


def test_the_page_of_all_methods_is_the_registrys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made anew with python -m fedtailor.catalogue > docs/methods/index.md."""
    monkeypatch.chdir(ROOT)
    assert (ROOT / "docs/methods/index.md").read_text() == as_markdown()


def test_pages_of_methods_are_linked() -> None:
    pages = {path.stem for path in (ROOT / "docs/methods").glob("*.md")} - {"index"}
    text = (ROOT / "docs/methods/index.md").read_text()
    assert pages and all(f"[{page}]({page}.md)" in text for page in pages)
