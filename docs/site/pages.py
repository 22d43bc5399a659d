"""Collect the pages of the documentation site in a folder, from which Sphinx builds it.

python docs/site/pages.py FOLDER

Pages are the files of docs/, three files of the repository's root, and generated pages: one per method, and the
command line. Links to other files of the repository become downloads, so that the site is complete by itself.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from os.path import relpath
from pathlib import Path

from command_pages import command_page
from method_pages import method_page

from fedtailor.methods import FAMILIES
from fedtailor.methods.catalog import as_markdown, catalog

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
ROOT_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "ARCHITECTURE.md": "architecture.md",
}
OTHER_PAGES = {"README.md": "index.md"}  # what a link to a file leads to that is not a page itself
ASSETS = {".svg", ".png"}

# index page -> caption in the sidebar -> pages below it, with or without a short title; Sphinx warns about a page that
# is missing here
NAVIGATION: dict[str, dict[str, list[str]]] = {
    "index": {
        "": [
            "Getting started <getting_started>", "Installation <install>", "concepts", "tutorials/index",
            "Guides <guides>",
            "Methods <methods/index>", "Papers <papers>", "reference/index",
            "Numbers <numbers>", "Questions <faq>", "coming_from", "security", "changelog", "contributing",
            "architecture",
        ],
    },
    "tutorials/index": {
        "": ["tutorials/compare_methods", "tutorials/own_data", "tutorials/own_network", "tutorials/own_method"],
        "In practice": ["tutorials/hospitals", "tutorials/federation", "tutorials/cluster"],
    },
    "guides": {
        "Experiments": ["compare", "notebooks", "training", "networks", "losses", "sweep", "own_code"],
        "Data": ["data", "tables", "splits"],
        "Results": ["report", "live", "trackers", "runs", "models"],
        "Scale": ["engines", "cluster"],
        "Real federations": ["deploy", "robust", "heterogeneity", "channel"],
        "Results on real clients": ["heart", "tcga_brca", "natural_clients"],
    },
    "papers": {
        "": [
            "FedAPA <papers/fedapa>", "FedAPM <papers/fedapm>", "FedLAG <papers/fedlag>", "Self-FL <papers/selffl>",
        ]
    },
    "methods/index": {
        family: [f"{one.display_name} <methods/{name}>" for name, one in catalog().items() if one.family == family]
        for family in FAMILIES
    },
    "reference/index": {"": ["reference/api", "reference/command_line"]},
    **{
        f"papers/{figures.parent.name}": {"": [f"papers/{figures.parent.name}/captions"]}
        for figures in (DOCS / "papers").glob("*/captions.md")
    },
}  # fmt: skip

_FENCED = re.compile(r"(^ *(?:```|~~~).*?^ *(?:```|~~~)[^\S\n]*$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def collect(target: Path) -> None:
    """Write all pages and their files to a folder; files that did not change keep their time, so Sphinx skips them."""
    texts = {path.relative_to(DOCS).as_posix(): path.read_text() for path in DOCS.rglob("*.md")}
    texts |= {path.relative_to(DOCS).as_posix(): path.read_text() for path in DOCS.rglob("*.ipynb")}
    sources = {page: f"docs/{page}" for page in texts}
    for source, page in ROOT_PAGES.items():
        texts[page], sources[page] = (ROOT / source).read_text(), source
    for name in catalog():
        page = f"methods/{name}.md"
        texts[page], sources[page] = method_page(name, texts.get(page)), f"docs/{page}"
    texts["methods/index.md"] = as_markdown(catalog())
    texts["reference/command_line.md"] = command_page()
    sources["reference/command_line.md"] = "docs/reference/command_line.md"

    written, by_source = set[Path](), {source: page for page, source in sources.items()} | OTHER_PAGES
    for page, text in texts.items():
        links = _Links(page, sources[page], by_source)
        text = rewrite_notebook(text, links) if page.endswith(".ipynb") else rewrite(text, links)
        text += toctrees(page.removesuffix(".md"))
        _write(target / page, text.encode())
        written |= {target / page}
        for file in links.files:
            _write(target / "files" / file, (ROOT / file).read_bytes())
            written |= {target / "files" / file}
    for path in DOCS.rglob("*"):
        if path.suffix in ASSETS:
            _write(target / path.relative_to(DOCS), path.read_bytes())
            written |= {target / path.relative_to(DOCS)}
    for path in target.rglob("*"):
        if path.is_file() and path not in written:
            path.unlink()


class _Links:
    """Where the links of one page lead on the site; `files` are those that are downloads."""

    def __init__(self, page: str, source: str, pages: Mapping[str, str]) -> None:
        self.files: list[str] = []
        self._page, self._source, self._pages = page, source, pages

    def __call__(self, link: str) -> str:
        if ":" in link:  # another site
            return link
        path = (ROOT / self._source).parent.joinpath(link).resolve()
        if not path.is_relative_to(ROOT) or not (path.exists() or self._known(path)):
            raise SystemExit(f"{self._source} links to '{link}', which does not exist.")
        file = path.relative_to(ROOT).as_posix()
        if file in self._pages:
            return relpath(self._pages[file], Path(self._page).parent)
        if path.is_relative_to(DOCS) and path.suffix in ASSETS:
            return link
        if path.is_dir():
            raise SystemExit(f"{self._source} links to the folder '{link}'; link to a file, which is a download.")
        self.files.append(file)
        return relpath(f"files/{file}", Path(self._page).parent)

    def _known(self, path: Path) -> bool:
        return path.relative_to(ROOT).as_posix() in self._pages


def rewrite(text: str, link: Callable[[str], str]) -> str:
    """Return Markdown with other targets of its relative links; code blocks are not changed.

    >>> rewrite("[a](b.md#c)", lambda target: "x/" + target)
    '[a](x/b.md#c)'
    """
    parts = _FENCED.split(text)
    parts[::2] = [_LINK.sub(lambda m: f"{m[1]}{link(m[2])}{m[3]}", part) for part in parts[::2]]
    return "".join(parts)


def rewrite_notebook(text: str, link: Callable[[str], str]) -> str:
    """Return a notebook with other targets of the relative links in its text."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = rewrite("".join(cell["source"]), link)
    return json.dumps(notebook)


def toctrees(page: str) -> str:
    """Return the navigation below a page: hidden tables of contents."""
    blocks = [
        "\n".join(["", "```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), "",
                   *(b.replace("<", "</") if "<" in b else f"/{b}" for b in pages), "```", ""])
        for caption, pages in NAVIGATION.get(page, {}).items()
    ]  # fmt: skip
    return "".join(blocks)


def _write(path: Path, content: bytes) -> None:
    if not path.is_file() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
