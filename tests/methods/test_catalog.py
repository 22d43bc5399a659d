"""Catalog of all methods: paper, download, upload, and client state."""

import re
from pathlib import Path

import pytest

from fedtailor.methods import METHODS
from fedtailor.methods.catalog import as_markdown, catalog

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", METHODS)
def test_catalog_entry_of_each_method_is_complete(name: str) -> None:
    entry = catalog()[name]
    assert entry.newcomer_start and "|" not in entry.newcomer_start
    if name in ("local", "centralized", "averaged"):  # methods without a paper
        assert entry.paper.startswith(entry.display_name)
        return
    assert re.fullmatch(r'[^"]+, "[^"]+", (under review|.+ \d{4})', entry.paper)  # authors, title, venue, year
    assert entry.download and entry.upload and entry.client_state


def test_index_page_equals_generated_catalog() -> None:
    """Regenerate the page with python -m fedtailor.methods.catalog > docs/methods/index.md."""
    pages = {path.stem for path in (ROOT / "docs/methods").glob("*.md")}
    assert (ROOT / "docs/methods/index.md").read_text() == as_markdown(pages)


def test_index_page_links_all_method_pages() -> None:
    pages = {path.stem for path in (ROOT / "docs/methods").glob("*.md")} - {"index"}
    text = (ROOT / "docs/methods/index.md").read_text()
    assert pages and all(f"[{catalog()[page].display_name}]({page}.md)" in text for page in pages)
